"""The engine in a thread of its own, for asyncio: prompts in, outputs out.

    engine = AsyncEngine(load)
    engine.start()
    stream = engine.open(num_completions=1)
    await stream.submit([engine.encode("1, 2, 3,")], SamplingParams())
    async for index, output in stream:
        ...
    stream.close()

The thread makes the engine, and is the only one that calls it. Messages to it are functions in a
queue, which it calls between steps; outputs come back once a step, all together. A stream keeps one
output for each prompt: what its reader has not taken yet is merged, so that a slow reader costs no
more memory than its text, and holds nobody up.

Completions are counted before anything is done for them. A request beyond the bound is refused at
once, and so is every request while the model loads, while the server drains, and after the engine
has died.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specjax.engine import batch
from specjax.engine.engine import EngineStats
from specjax.engine.llm import LLM
from specjax.engine.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
)
from specjax.errors import SpecJAXError
from specjax.tokenizer import StreamDecoder

logger = logging.getLogger("specjax.serve")

MAX_QUEUE = 1024  # completions that wait for a row
NOTABLE_SECONDS = 1.0  # of compilation while requests wait


class QueueFull(Exception):
    """Too many completions wait already: the client should come back later."""


class Unavailable(Exception):
    """The engine takes no requests: it loads, drains or has died."""


class State(enum.Enum):
    """What an engine is doing; the values are what clients read in errors."""

    LOADING = "the model is still loading"
    READY = "ready"
    DRAINING = "the server is shutting down"
    DEAD = "the engine has died"


class Prompt(NamedTuple):
    """A prompt as the engine reads it.

    Attributes:
      text: None for a prompt that was given as token ids.
      ids: token ids.
    """

    text: str | None
    ids: tuple[int, ...]


# observe(an output, seconds since the last one of the same prompt: None for the first)
Observer = Callable[[RequestOutput, float | None], None]


class AsyncEngine:
    """An engine for the coroutines of one event loop, which call all methods but `encode...`.

    Attributes:
      state: what it is doing.
      error: why it died; None while it lives.
      llm: the models; only when it has been ready.
      stats: counts of the engine after its last step.
      died: set when it has died.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        max_queue: int = MAX_QUEUE,
        observe: Observer | None = None,
    ):
        """Makes an engine that `start` starts.

        Args:
          load: returns the models. It is called in the engine's thread.
          max_queue: most completions that may wait for a row.
          observe: called with every output.
        """
        self.state = State.LOADING
        self.error: BaseException | None = None
        self.llm: LLM | None = None
        self.stats = EngineStats()
        self.died = asyncio.Event()
        self.observe = observe
        self._load = load
        self._max_queue = max_queue
        self._capacity = 0  # completions that may run or wait
        self._num_completions = 0
        self._streams: set[Stream] = set()
        self._ready, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._outputs: list[tuple[Stream, int, RequestOutput]] = []  # of a step
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_until_ready(self) -> None:
        """Waits until requests are taken.

        Raises:
          The exception that loading ended with.
        """
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self.died)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.error is not None:
            raise self.error

    @property
    def num_unfinished(self) -> int:
        """Completions that run or wait."""
        return self._num_completions

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check_available(self) -> None:
        """Raises Unavailable unless requests are taken."""
        if self.state is not State.READY:
            raise Unavailable(self.state.value)

    def open(self, num_completions: int) -> Stream:
        """Returns a stream for a request with so many completions, which must be closed.

        Raises:
          Unavailable: requests are not taken.
          QueueFull: too many completions wait.
          SpecJAXError: this request alone is beyond the bound.
        """
        self.check_available()
        if num_completions > self._capacity:
            raise SpecJAXError(
                f"a request may have at most {self._capacity} completions, got {num_completions}"
            )
        if self._num_completions + num_completions > self._capacity:
            raise QueueFull(f"{self._num_completions} completions run or wait; try again later")
        stream = Stream(self, num_completions)
        self._num_completions += num_completions
        self._streams.add(stream)
        self._idle.clear()
        return stream

    def _release(self, stream: Stream) -> None:
        """Forgets a stream that is finished or closed."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._num_completions -= stream.num_completions
        if not self._streams:
            self._idle.set()

    # --- Texts ------------------------------------------------------------------------------------

    def encode(self, prompt: str | Sequence[int], add_special_tokens: bool = True) -> Prompt:
        """Returns a prompt. This takes time for a long text: not for the event loop.

        Raises:
          SpecJAXError: for a prompt that cannot be used.
        """
        target = self.llm.target
        text = prompt if isinstance(prompt, str) else None
        if text and target.tokenizer is not None:
            batch.check_unicode(text, "the prompt")
            if add_special_tokens:
                prompt = batch.encode_text(target.tokenizer, text, None)
            else:
                prompt = target.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(text, batch.encode(target, prompt, "the prompt"))

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> Prompt:
        """Returns the prompt of a chat. Not for the event loop.

        Args:
          messages: of the chat.
          add_special_tokens: also those that the tokenizer adds; the template writes its own.
          **options: see `Tokenizer.render_chat`.

        Raises:
          SpecJAXError: for messages that cannot be used.
        """
        target = self.llm.target
        if target.tokenizer is None:
            raise SpecJAXError("messages need a tokenizer, but the model has none")
        text, ids = batch.encode_chat(target, messages, "messages", **options)
        if add_special_tokens:
            ids = target.tokenizer.encode(text)
        return Prompt(text, batch.encode(target, ids, "messages"))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included.

        Raises:
          SpecJAXError: for ids outside the vocabulary, or a model without tokenizer.
        """
        ids = batch.encode(self.llm.target, ids, "tokens") if ids else ()
        return self.llm.get_tokenizer().decode(ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token; "" without a tokenizer."""
        tokenizer = self.llm.target.tokenizer
        return "" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    def decoder(self, prompt: Prompt) -> StreamDecoder | None:
        """Returns a decoder for what follows a prompt; None without a tokenizer."""
        tokenizer = self.llm.target.tokenizer
        return None if tokenizer is None else tokenizer.stream(previous_ids=prompt.ids)

    def without_paths(self, message: str, name: str) -> str:
        """Returns a message for clients, which do not learn where the model lies."""
        return message.replace(str(self.llm.target.path), name) if self.llm else message

    # --- The end ----------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, and lets those that are there end, but no longer than `seconds`.

        The rest of them end with an error.
        """
        if self.state is State.DEAD:
            return
        self.state = State.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), max(0.0, seconds))
        except TimeoutError:
            if self._streams:
                logger.warning("%d completions did not end in time", self._num_completions)
        self._fail_streams(Unavailable(State.DRAINING.value))

    async def stop(self, seconds: float) -> None:
        """Ends the thread. If it does not end within `seconds`, it `is_alive` afterwards."""
        self._is_stopping = True
        self._messages.put(lambda: None)
        await asyncio.to_thread(self._thread.join, seconds)

    def _fail_streams(self, error: Exception) -> None:
        for stream in list(self._streams):
            stream.fail(error)

    # --- In the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llm = self._load()
            self._call_soon(self._on_ready)
            while not self._is_stopping:
                self._step()
        except BaseException as error:  # the server must know, whatever it is
            if not self._is_stopping:
                self._call_soon(self._on_death, error)
        finally:
            if self.llm is not None:
                self.llm.engine.close()

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _step(self) -> None:
        """Takes all messages, waiting for one if there is nothing else to do; then a step."""
        engine = self.llm.engine
        must_wait = not engine.has_unfinished
        while True:
            try:
                message = self._messages.get(block=must_wait)
            except queue.Empty:
                break
            message()
            must_wait = False
        if engine.has_unfinished and not self._is_stopping:
            engine.step()
            outputs, self._outputs = self._outputs, []
            self._call_soon(self._on_step, outputs, engine.stats())

    def _submit(
        self, stream: Stream, ids: Sequence[str], prompts: Sequence[Prompt], options: _Options
    ) -> None:
        """Submits the prompts of a stream: all or none."""
        engine, error = self.llm.engine, None
        for index, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            try:
                engine.submit(
                    prompt.ids,
                    options.params,
                    request_id=request_id,
                    prompt=prompt.text,
                    salt=options.salt,
                    on_output=functools.partial(self._collect, stream, index),
                )
            except Exception as reason:  # of this request alone
                error = reason
                for submitted in ids[:index]:
                    engine.abort(submitted)
                break
        self._call_soon(stream.on_submitted, error)

    def _collect(self, stream: Stream, index: int, output: RequestOutput) -> None:
        self._outputs.append((stream, index, output))

    def _abort(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self.llm.engine.abort(request_id)

    # --- In the event loop, called by the thread --------------------------------------------------

    def _on_ready(self) -> None:
        engine = self.llm.engine
        self._capacity = engine.max_num_seqs + self._max_queue
        self.stats = engine.stats()
        if self.state is State.LOADING:
            self.state = State.READY
            self._ready.set()

    def _on_step(
        self, outputs: list[tuple[Stream, int, RequestOutput]], stats: EngineStats
    ) -> None:
        seconds = stats.compile_seconds - self.stats.compile_seconds
        if seconds > NOTABLE_SECONDS:
            logger.warning("requests needed a new program, which took %.1f s to compile", seconds)
        self.stats = stats
        for stream, index, output in outputs:
            stream.put(index, output)

    def _on_death(self, error: BaseException) -> None:
        if not isinstance(error, SpecJAXError):
            logger.critical("the engine has died", exc_info=error)
        self.state, self.error = State.DEAD, error
        self._fail_streams(Unavailable(State.DEAD.value))
        self.died.set()


class _Options(NamedTuple):
    """What the prompts of a stream have in common."""

    params: SamplingParams
    salt: bytes


class Stream:
    """The outputs of the prompts of one HTTP request, as they come.

    Attributes:
      num_completions: of all prompts together.
    """

    def __init__(self, engine: AsyncEngine, num_completions: int):
        self.num_completions = num_completions
        self._engine = engine
        self._ids: list[str] = []
        self._unfinished: set[int] = set()  # numbers of prompts
        self._pending: dict[int, RequestOutput] = {}  # what the reader has not taken
        self._times: dict[int, float] = {}  # of the last output of a prompt
        self._accepted: asyncio.Future | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, salt: bytes = b""
    ) -> None:
        """Submits the prompts, and waits until the engine has accepted them. Called once.

        Raises:
          SpecJAXError: a prompt or a parameter cannot be used.
          Unavailable: requests are not taken any more.
        """
        self._raise_error()
        self._ids = [uuid.uuid4().hex for _ in prompts]
        self._unfinished = set(range(len(prompts)))
        self._accepted = asyncio.get_running_loop().create_future()
        engine, options = self._engine, _Options(params, salt)
        engine._messages.put(lambda: engine._submit(self, self._ids, prompts, options))
        await self._accepted
        self._raise_error()

    def on_submitted(self, error: Exception | None) -> None:
        """Takes the engine's answer to `submit`."""
        if self._accepted is None or self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
            return
        self._unfinished.clear()
        self._accepted.set_exception(error)

    def put(self, index: int, output: RequestOutput) -> None:
        """Takes an output of a prompt."""
        if self._is_closed or index not in self._unfinished:
            return
        if self._engine.observe:
            now = time.monotonic()
            last = self._times.get(index)
            self._engine.observe(output, None if last is None else now - last)
            self._times[index] = now
        earlier = self._pending.get(index)
        self._pending[index] = output if earlier is None else _merged(earlier, output)
        if output.finished:
            self._unfinished.discard(index)
            if not self._unfinished:
                self._engine._release(self)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, behind the outputs that it has."""
        self._error = error
        self._changed.set()
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(None)
        self._engine._release(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """Returns the number of a prompt, and what is new of it."""
        while not self._pending:
            self._raise_error()
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        index = next(iter(self._pending))
        return index, self._pending.pop(index)

    def close(self) -> None:
        """Ends the stream; aborts what is not finished. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        engine = self._engine
        ids = [self._ids[index] for index in self._unfinished]
        if ids and engine.state is not State.DEAD:
            engine._messages.put(lambda: engine._abort(ids))
        self._pending.clear()
        engine._release(self)


def _merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Returns two consecutive outputs of `RequestOutputKind.DELTA` as one."""
    parts = {part.index: part for part in first.outputs}
    for part in second.outputs:
        earlier = parts.get(part.index)
        parts[part.index] = part if earlier is None else _merged_completion(earlier, part)
    outputs = tuple(parts[index] for index in sorted(parts))
    return dataclasses.replace(second, outputs=outputs)


def _merged_completion(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
    )
