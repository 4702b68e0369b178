"""A server of `specjax serve` that runs in a thread, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from specjax.engine.llm import LLM
from specjax.serve.app import Settings
from specjax.serve.server import Options, Server

TIMEOUT = 60.0


class RunningServer:
    """A server on a free port.

    Attributes:
      url: where it is.
      server: the server.
      exit_code: what it ended with; None while it runs.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        waits: bool = True,
        max_queue: int = 64,
        shutdown_seconds: float = 30.0,
        **settings: Any,
    ):
        settings = Settings(**{"model_names": ("tiny", "alias"), **settings})
        options = Options(port=0, max_queue=max_queue, shutdown_seconds=shutdown_seconds)
        self.exit_code: int | None = None
        self._ready, self._made = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load, settings, options))
        self._thread.start()
        assert self._made.wait(TIMEOUT)
        self.url = self.server.address
        if waits:
            assert self._ready.wait(TIMEOUT)

    def _run(self, load, settings, options) -> None:
        async def run():
            self.server = Server(load, settings, options)
            self.loop = asyncio.get_running_loop()
            self._made.set()
            return await self.server.run(self._ready.set)

        try:
            self.exit_code = asyncio.run(run())
        except Exception as error:
            self.exit_code = error

    def end(self, **options: Any) -> None:
        """Asks the server to end."""
        self.loop.call_soon_threadsafe(lambda: self.server.end(**options))

    def wait(self, seconds: float = TIMEOUT) -> None:
        """Waits until it has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server has not ended"

    def client(self, **options: Any) -> httpx.Client:
        """A client."""
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, trust_env=False, **options)


@contextlib.contextmanager
def running(load: Callable[[], LLM], **options: Any) -> Iterator[RunningServer]:
    """A server for a `with` block."""
    server = RunningServer(load, **options)
    try:
        yield server
    finally:
        if server.exit_code is None:
            server.end(at_once=True)
        server.wait()


def events(client: httpx.Client, path: str, body: dict) -> list[dict]:
    """The chunks of a stream, which must end as it should."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for something that must happen soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
