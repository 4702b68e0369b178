"""The server's process: the socket, uvicorn, signals, and how it all ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from specjax.engine.llm import LLM
from specjax.errors import SpecJAXError
from specjax.serve.app import Settings, make_app
from specjax.serve.async_engine import MAX_QUEUE, AsyncEngine

FAILURE, INTERRUPTED = 1, 130  # exit codes
MAX_HEADER_BYTES = 64 * 2**10
STEP_SECONDS = 10  # in which a step of the engine should end
LAST_ANSWER_SECONDS = 5  # in which clients may take what is left for them


@dataclasses.dataclass(frozen=True)
class Options:
    """How the server runs.

    Attributes:
      host: address to listen at.
      port: port to listen at; 0 for a free one.
      max_queue: most completions that may wait for a row.
      shutdown_seconds: how long SIGTERM lets requests go on.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_queue: int = MAX_QUEUE
    shutdown_seconds: float = 30.0


class Server:
    """A server for one event loop: `start`, then `run` until it ends.

    Attributes:
      engine: the engine.
      address: URL of the server.
    """

    def __init__(self, load: Callable[[], LLM], settings: Settings, options: Options):
        """Opens the socket.

        Args:
          load: returns the models; it is called in a thread while the server says that it loads.
          settings: how requests are answered.
          options: where, and within which bounds.

        Raises:
          SpecJAXError: the address cannot be used.
        """
        self._options = options
        self._socket = _listen(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        self.engine = AsyncEngine(load, max_queue=options.max_queue)
        config = uvicorn.Config(
            make_app(self.engine, settings),
            http="h11",  # limits headers
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            lifespan="off",
            access_log=False,
            log_config=None,  # logging is the program's
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=LAST_ANSWER_SECONDS,
        )
        self._http = _Http(config)
        self._asked_to_end, self._is_urgent = asyncio.Event(), asyncio.Event()
        self._exit_code = 0

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Serves until the engine dies or `end` is called; returns the exit code.

        Args:
          on_ready: called when requests are taken.

        Raises:
          SpecJAXError: the models cannot be loaded.
        """
        self._http_task = asyncio.ensure_future(self._http.serve(sockets=[self._socket]))
        self.engine.start()
        ready = asyncio.ensure_future(self._wait_until_ready(on_ready))
        waits = [asyncio.ensure_future(self._asked_to_end.wait())]
        waits.append(asyncio.ensure_future(self.engine.died.wait()))
        try:
            with self._signals():
                await asyncio.wait([*waits, self._http_task], return_when=asyncio.FIRST_COMPLETED)
                await self._finish()
        finally:
            for task in (*waits, ready):
                task.cancel()
            await asyncio.gather(*waits, ready, return_exceptions=True)
        if isinstance(self.engine.error, SpecJAXError) and self.engine.llm is None:
            raise self.engine.error
        return FAILURE if self.engine.died.is_set() else self._exit_code

    async def _wait_until_ready(self, on_ready: Callable[[], None]) -> None:
        await self.engine.wait_until_ready()
        on_ready()

    def end(self, exit_code: int = 0, *, at_once: bool = False) -> None:
        """Ends the server. A second call does not wait for requests any more.

        Args:
          exit_code: of the process.
          at_once: do not let requests go on.
        """
        if self._asked_to_end.is_set() or at_once:
            self._is_urgent.set()
        self._exit_code = exit_code
        self._asked_to_end.set()

    async def _finish(self) -> None:
        drain = asyncio.ensure_future(self.engine.drain(self._options.shutdown_seconds))
        urgent = asyncio.ensure_future(self._is_urgent.wait())
        await asyncio.wait((drain, urgent), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await self.engine.drain(0)
        urgent.cancel()
        self._http.should_exit = True
        await self._http_task
        await self.engine.stop(1.0 if self._is_urgent.is_set() else STEP_SECONDS)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles SIGTERM and Ctrl-C, in the main thread only."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop.add_signal_handler(signal.SIGTERM, self.end)
        loop.add_signal_handler(signal.SIGINT, lambda: self.end(INTERRUPTED, at_once=True))
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Http(uvicorn.Server):
    """uvicorn without handlers of signals, which are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecJAXError(f"cannot listen at {host}, port {port}: {reason}") from error
