"""The engine: requests come and go while the decode loop runs (continuous batching).

    engine = Engine(target, drafter, drafter_params)
    engine.submit(prompt_ids, SamplingParams(max_tokens=64))
    while engine.has_unfinished:
        for output in engine.step():
            ...

A step reads the report of the last call of the loop, lets the `Scheduler` decide what comes next,
and lets the `Runner` dispatch it: admissions, chunks of prompts, and rounds. Where no request
waits, the next call is dispatched before the report of the last one is read, so that the device
does not wait for the host.

Everything that the device does is a program of `programs`. Programs of rounds are compiled for a
few numbers of rows, with and without sampling, processors and log-probabilities, when they are
first needed or by `warm_up`; nothing is compiled afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import decode, parallel
from specjax.decode import DecodeConfig
from specjax.drafters.base import Drafter
from specjax.engine import batch, budget, runner, schedule
from specjax.engine.detokenize import TextBuilder
from specjax.engine.load import Model
from specjax.engine.pages import PagePool
from specjax.engine.programs import Report
from specjax.engine.request import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    fresh_seed,
    sampler_seed,
)
from specjax.engine.runner import Call, RowArrays, Runner
from specjax.engine.schedule import Chunk, Plan, Scheduler
from specjax.errors import SpecJAXError
from specjax.sampling import Logprobs
from specjax.tokenizer import Tokenizer

CHUNK_SIZES = (16, 32, 64, 128, 256)
# A pass over the weights costs a CPU as much as so many tokens; a GPU reads 256 tokens meanwhile.
CPU_CHUNK_OVERHEAD, GPU_CHUNK_OVERHEAD = 16, 256
OFFLINE_PREFILL_BUDGET = 4096  # tokens that are read before rounds run, where nobody waits for them
SECONDS_PER_CALL = 0.05  # what streams accept as delay
# on_end(request id, prompt and output, numbers of the pages that hold them)
OnEnd = Callable[[str, list[int], np.ndarray], None]
MAX_COMPLETIONS = 2**20  # of a request


@dataclasses.dataclass
class EngineStats:
    """Counts over the life of an engine.

    Attributes:
      num_running: completions that have a row.
      num_waiting: those that wait for one.
      num_preemptions: how often one was preempted.
      num_prompt_tokens: tokens of prompts, of requests that have begun.
      num_generated_tokens: tokens of outputs.
      num_finished: finished completions by reason.
      num_drafts: how often drafts of a row were verified.
      num_draft_tokens: drafts that were verified.
      num_accepted_tokens: drafts that were accepted.
      num_accepted_per_position: of them, those at each place of a draft.
      num_queried_tokens: prompt tokens that were looked up in the prefix index.
      num_hit_tokens: those that were found there.
      kv_cache_usage: share of the pages that sequences hold.
      prefill_seconds: time in which prompts were read.
      decode_seconds: time in which rounds ran.
      compile_seconds: time in which programs of rounds were compiled.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    kv_cache_usage: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0


class Memory(NamedTuple):
    """What an engine keeps in memory, in bytes.

    Attributes:
      weights: of the target and the drafter, over all devices.
      page: a page of one device, in all pools.
    """

    weights: int
    page: int


@dataclasses.dataclass(eq=False)
class _Request:
    """A request, while it waits or runs."""

    request_id: str
    number: int
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_length: int
    seed: int
    salt: bytes
    arrays: RowArrays
    arrival_time: float = dataclasses.field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    completions: list[_Completion] = dataclasses.field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)


@dataclasses.dataclass(eq=False)
class _Completion:
    """One of the `n` completions of a request."""

    request: _Request
    index: int
    seed: int
    arrays: RowArrays
    sequence: schedule.Sequence
    text: TextBuilder
    num_reported: int = 0  # tokens and characters of the outputs so far, where they are deltas
    num_characters: int = 0
    end_is_reported: bool = False
    cumulative: float = 0.0  # sum of the log-probabilities of the output
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    emitted: list[int] = dataclasses.field(default_factory=list)
    unusable_drafts: int = 0
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def token_ids(self) -> list[int]:
        """The output so far."""
        return self.sequence.token_ids[self.sequence.prompt_length :]

    @property
    def has_news(self) -> bool:
        """Whether there is more than in the deltas so far."""
        num_tokens = self.sequence.length - self.sequence.prompt_length
        is_ended = self.finish_reason is not None
        return num_tokens > self.num_reported or (is_ended and not self.end_is_reported)


class Engine:
    """Decodes requests that come and go. Not thread-safe: one thread calls all methods.

    Attributes:
      target: the model.
      config: static configuration of the loop.
      max_model_len: S, largest length of a request, prompt and output.
      num_rows: sequences of a replica that run at a time.
      num_pages: P, pages of a replica.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter | None = None,
        drafter_params: Any = None,
        *,
        verify: str = "rejection",
        page_size: int = 64,
        implementation: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        num_pages: int | None = None,
        gpu_memory_utilization: float = 0.92,
        kv_cache_gib: float | None = None,
        enable_prefix_caching: bool = True,
        seconds_per_call: float = SECONDS_PER_CALL,
        chunk_sizes: tuple[int, ...] = CHUNK_SIZES,
        on_end: OnEnd | None = None,
    ):
        """Makes an engine, with its pools of pages.

        Args:
          target: the model, from `specjax.load`.
          drafter: None for plain decoding.
          drafter_params: its parameters.
          verify: "rejection" or "coupled", see `specjax.verify`.
          page_size: Z, positions per page.
          implementation: see `config.Runtime`.
          max_model_len: largest length of a request; by default the model's context.
          max_num_seqs: sequences that run at a time, over all replicas; by default 16 per replica
            on a CPU and 64 on a GPU.
          num_pages: pages of a replica; by default as many as memory allows, see `budget`.
          gpu_memory_utilization: share of a GPU's memory that may be used.
          kv_cache_gib: GiB of the pools of a device; on a CPU 1 by default.
          enable_prefix_caching: whether requests with the same beginning share its pages.
          seconds_per_call: how long a call of the loop may run, roughly. Streams are delayed by
            up to this much.
          chunk_sizes: sizes of the chunks in which prompts are read, in rising order.
          on_end: called when a completion ends, before its pages may be used again.

        Raises:
          SpecJAXError: for an option out of range, or memory that does not hold one request.
        """
        self.target = target
        self._params = (target.params, drafter_params)
        runtime = target.runtime(page_size, implementation)
        self.config = DecodeConfig(target.config, drafter, verify, runtime)
        decode.check_params(target.params, self.config)
        num_replicas = parallel.dp_size(target.mesh)
        self.num_rows = budget.num_rows(max_num_seqs, num_replicas)
        self.max_model_len = batch.max_model_len(target, max_model_len)
        params = self._params
        if num_pages is None:
            available = budget.available_bytes(
                self.config, self.num_rows, gpu_memory_utilization, kv_cache_gib
            )
            available = parallel.least(available, target.mesh)
            page_bytes = budget.bytes_per_page(params, self.config)
            num_pages = available // page_bytes
            if max_model_len is None:
                self.max_model_len = budget.cut_context(self.config, self.max_model_len, num_pages)
            num_pages = budget.num_pages(
                self.config, self.num_rows, self.max_model_len, num_pages, page_bytes
            )
        self.num_pages = num_pages
        sizes = (page_size, self.num_rows, self.max_model_len, num_pages, self.config.num_tokens)
        static = (sizes, chunk_sizes, str(target.config), verify, enable_prefix_caching)
        parallel.check_alike(static, target.mesh)
        replicas = []
        for _ in range(num_replicas):
            pool = PagePool(num_pages, page_size, enable_prefix_caching=enable_prefix_caching)
            replicas.append(schedule.Replica(self.num_rows, pool))
        # A chunk of one prompt keeps a CPU busy.
        is_live = seconds_per_call <= SECONDS_PER_CALL
        chunk_rows = 1 if budget.is_cpu() else min(4, self.num_rows)
        self._scheduler = Scheduler(
            replicas,
            num_drafts=self.config.num_tokens,
            chunk_sizes=chunk_sizes,
            chunk_overhead=CPU_CHUNK_OVERHEAD if budget.is_cpu() else GPU_CHUNK_OVERHEAD,
            chunk_rows=chunk_rows,
            prefill_budget=chunk_sizes[-1] * chunk_rows if is_live else OFFLINE_PREFILL_BUDGET,
        )
        self._runner = Runner(
            params,
            self.config,
            num_rows=self.num_rows,
            max_model_len=self.max_model_len,
            num_pages=num_pages,
            chunk_sizes=chunk_sizes,
            chunk_rows=chunk_rows,
        )
        self._on_end = on_end
        self._seconds_per_call = seconds_per_call
        self._seconds_per_round: float | None = None
        self._requests: dict[str, _Request] = {}
        self._clients: dict[str, Callable[[RequestOutput], None] | None] = {}
        # New requests, and ids of those to abort: of this process, and what the mesh works on.
        self._arrived: list[_Request | str] = []
        self._events: collections.deque[_Request | str] = collections.deque()
        self._changed: dict[_Request, None] = {}  # has news for its client
        self._ready: list[RequestOutput] = []  # what `step` returns next
        self._order = itertools.count()
        self._calls: collections.deque[Call] = collections.deque()
        self._accounted = 0.0  # up to this moment time belongs to a counter of seconds
        self._stats = EngineStats(num_accepted_per_position=[0] * self.config.num_tokens)

    # --- Requests ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        salt: bytes = b"",
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> str:
        """Adds a request, and returns its id.

        Args:
          prompt_ids: token ids, see `batch.encode`.
          params: how the completions are generated.
          request_id: by default a number.
          prompt: the text of the prompt, for the output.
          salt: only prompts with the same salt share pages.
          on_output: called with each output of this request, which `step` then does not return.

        Raises:
          SpecJAXError: for a prompt that is empty or leaves no room for an output, an id that is in
            use, a parameter that does not fit the model, or a request that the cache cannot hold.
        """
        number = next(self._order)
        request_id = f"request {number}" if request_id is None else request_id
        if request_id in self._clients:
            raise SpecJAXError(f"request id {request_id!r} is in use")
        prompt_ids = tuple(map(int, prompt_ids))
        batch.check_prompt_ids(self.target, prompt_ids, self.max_model_len)
        room = self.max_model_len - len(prompt_ids)
        max_length = len(prompt_ids) + batch.max_new_tokens(params, self.target, room)
        self._scheduler.check_fits(len(prompt_ids), max_length)
        request = _Request(
            request_id=request_id,
            number=number,
            prompt=prompt,
            prompt_ids=prompt_ids,
            params=params.clone(),  # which the caller may change
            max_length=max_length,
            seed=fresh_seed() if params.seed is None else params.seed,
            salt=salt,
            arrays=self._arrays(params, len(prompt_ids), max_length),
        )
        self._clients[request_id] = on_output
        self._arrived.append(request)
        return request_id

    def _arrays(self, params: SamplingParams, prompt_length: int, max_length: int) -> RowArrays:
        eos_ids = () if params.ignore_eos else self.target.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
        row = batch.request_row(params, prompt_length, max_length, stop_ids)
        return RowArrays(
            row,
            stop_ids,
            batch.processor_row(params, self.target),
            params.logprobs,
            params.prompt_logprobs,
        )

    def abort(self, request_id: str) -> None:
        """Ends a request with the next step, without further output. Unknown ids are ignored."""
        self._arrived.append(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._clients or self._ready)

    def _begin(self, request: _Request) -> None:
        if self.target.mesh is not None and self.target.mesh.is_multi_process:
            request.arrival_time = time.monotonic()  # not by the clock of process 0
        try:
            self._add(request)
        except BaseException:
            self._clients.pop(request.request_id, None)
            raise
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._scheduler.add(completion.sequence)

    def _add(self, request: _Request) -> None:
        """Adds the completions of a request to it."""
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_ids)
        params, prompt_length = request.params, len(request.prompt_ids)
        for index in range(params.n):
            seed = request.seed + index
            is_scored = index == 0 and params.prompt_logprobs is not None
            sequence = schedule.Sequence(
                list(request.prompt_ids),
                prompt_length,
                request.max_length,
                order=request.number * MAX_COMPLETIONS + index,
                salt=request.salt,
                reuses_prefix=not is_scored,
                is_scored=is_scored,
            )
            arrays = request.arrays.with_seed(sampler_seed(seed))
            text = TextBuilder(self.target.tokenizer, params, arrays.stop_ids, request.prompt_ids)
            sequence.owner = _Completion(request, index, seed, arrays, sequence, text)
            request.completions.append(sequence.owner)

    def _abort(self, request_id: str) -> None:
        self._clients.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._changed.pop(request, None)
        for completion in request.completions:
            if completion.finish_reason is None:
                self._finish(completion, "abort")

    @property
    def max_num_seqs(self) -> int:
        """Completions that run at a time, over all replicas."""
        return self.num_rows * len(self._scheduler.replicas)

    def memory(self) -> Memory:
        """Returns what weights and pages take."""
        weights = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(self._params)}
        return Memory(sum(weights.values()), budget.bytes_per_page(self._params, self.config))

    @property
    def drafter_state(self) -> Any:
        """The drafter's state, on the devices: for `on_end` to read pools of its own."""
        return self._runner.drafter_state

    def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes; does nothing and returns False while a request runs."""
        if self._scheduler.num_running:
            return False
        return all(pool.reset_prefix_cache() for pool in self._pools)

    @property
    def _pools(self) -> list[PagePool]:
        return [replica.pool for replica in self._scheduler.replicas]

    def stats(self) -> EngineStats:
        """Returns counts over the life of the engine."""
        pools, stats = self._pools, self._stats
        num_referenced = sum(pool.num_referenced for pool in pools)
        return dataclasses.replace(
            stats,
            num_running=self._scheduler.num_running,
            num_waiting=len(self._scheduler.waiting),
            num_preemptions=self._scheduler.num_preemptions,
            num_finished=stats.num_finished.copy(),
            num_accepted_per_position=list(stats.num_accepted_per_position),
            num_queried_tokens=sum(pool.num_queried_tokens for pool in pools),
            num_hit_tokens=sum(pool.num_hit_tokens for pool in pools),
            kv_cache_usage=num_referenced / (len(pools) * self.num_pages),
            compile_seconds=self._runner.compile_seconds,
        )

    def warm_up(
        self,
        *,
        processors: bool = True,
        wait: bool = True,
        on_program: runner.OnProgram | None = None,
    ) -> None:
        """Compiles what requests may need, so that nothing is compiled later.

        Log-probabilities are not included: their programs are compiled when they are first asked
        for. Where attention runs through XLA on a GPU, programs for longer rows are compiled when a
        row first has so many pages.

        Args:
          processors: also for requests with penalties, biases or forbidden tokens.
          wait: whether to return when all is compiled. Else programs for a few numbers of rows are
            compiled, which can do all the work, and the others in the background while the first
            requests run.
          on_program: called when a program is compiled before this returns, with its name, the
            seconds that it took, and how many there are.
        """
        first, rest = self._runner.variants(has_processors=processors)
        if wait:
            first, rest = first + rest, []
        self._runner.warm_up(first, rest, on_program)

    @property
    def is_warm(self) -> bool:
        """Whether nothing is being compiled behind the requests."""
        return self._runner.is_warm

    def close(self) -> None:
        """Cancels compilations that have not started. The engine must not be used afterwards."""
        self._runner.close()

    # --- A step -----------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Lets the device go on, and returns the outputs that are new.

        It takes the time of one call of the loop, roughly `seconds_per_call`, and returns at once
        if no request waits or runs. After an exception, also one of a client's `on_output`, the
        engine can go on: requests that run are then recomputed from the tokens that are known.
        """
        try:
            self._advance()
        except BaseException:
            self._start_over()
            raise
        return self._deliver()

    def _advance(self) -> None:
        max_rounds = self._take_events()
        if self._scheduler.waiting:
            while self._calls:  # a row may be free
                self._read_report()
        plan = self._scheduler.plan(max_rounds)
        while plan is None and self._calls:
            self._read_report()
            plan = self._scheduler.plan(max_rounds)
        if plan is not None:
            self._execute(plan)
        while len(self._calls) > 1:
            self._read_report()

    def _start_over(self) -> None:
        """Gives up all rows and pages: what was planned for them may not have been done."""
        self._calls.clear()
        unfinished = []
        for request in self._requests.values():
            for completion in request.completions:
                if completion.finish_reason is None:
                    unfinished.append(completion.sequence)
        self._scheduler.reset(unfinished)
        self._runner.reset()

    def _take_events(self) -> int:
        """Begins and aborts requests; returns the most rounds of the next call.

        What depends on arrivals and on time is decided by process 0 of a mesh. The rest is a
        function of it, and the same in all processes.
        """
        arrived, self._arrived = self._arrived, []
        decided = (arrived, self._max_rounds())
        arrived, max_rounds = parallel.from_first_process(decided, self.target.mesh)
        self._events.extend(arrived)
        while self._events:  # some may be left of a step that failed
            event = self._events.popleft()
            if isinstance(event, str):
                self._abort(event)
            else:
                self._begin(event)
        return max_rounds

    def _max_rounds(self) -> int:
        if self._seconds_per_round is None:
            return 1
        rounds = round(self._seconds_per_call / self._seconds_per_round)
        return min(max(1, rounds), runner.MAX_ROUNDS)

    def _execute(self, plan: Plan) -> None:
        started_at = time.perf_counter()
        self._note_begin(plan.admitted)
        self._runner.admit(plan.admitted)
        for chunks in plan.prefill:
            self._take_scores(chunks, self._runner.prefill(chunks))
        if plan.prefill:
            self._runner.wait()
            self._stats.prefill_seconds += self._account(started_at)
        if plan.decoding:
            num_expected = self._scheduler.num_running + len(self._scheduler.waiting)
            self._calls.append(self._runner.rounds(plan, num_expected))

    def _take_scores(self, chunks: list[Chunk], scores: list[Logprobs] | None) -> None:
        """Takes in log-probabilities of prompts."""
        for chunk, logprobs in zip(chunks, scores or [], strict=False):
            request = chunk.sequence.owner.request
            first = chunk.start + 1
            last = min(first + chunk.count, len(request.prompt_ids))
            ids = request.prompt_ids[first:last]
            num_top = request.params.prompt_logprobs
            entries = token_logprobs(self.target.tokenizer, ids, logprobs, num_top)
            request.prompt_logprobs[first:last] = entries

    def _note_begin(self, admitted: list[schedule.Sequence]) -> None:
        for sequence in admitted:
            request = sequence.owner.request
            if request.first_scheduled_time is None:
                request.first_scheduled_time = time.monotonic()
                self._stats.num_prompt_tokens += len(request.prompt_ids)

    def _account(self, started_at: float) -> float:
        """Returns the seconds since `started_at` that no counter has yet."""
        now = time.perf_counter()
        seconds = now - max(started_at, self._accounted)
        self._accounted = now
        return seconds

    # --- Reports ----------------------------------------------------------------------------------

    def _read_report(self) -> None:
        """Waits for the oldest call in flight, and takes in what it did."""
        call = self._calls.popleft()
        report = parallel.get(call.report)
        seconds = self._account(call.dispatched_at)
        self._stats.decode_seconds += seconds
        num_rounds = int(report.log.rounds_B.max())
        if num_rounds:
            self._seconds_per_round = seconds / num_rounds
        for slot, sequence in zip(call.slots, call.plan.decoding, strict=True):
            if not sequence.is_done:
                self._take(sequence.owner, call.plan, report, slot)
                self._changed[sequence.owner.request] = None

    def _take(self, completion: _Completion, plan: Plan, report: Report, slot: int) -> None:
        """Takes in what a call did with a completion."""
        sequence, log = completion.sequence, report.log
        num_new = int(report.length_B[slot]) - sequence.length
        new_ids = report.tokens_BS[slot, :num_new].tolist()
        self._scheduler.observe(sequence, plan, new_ids, int(report.complete_B[slot]))
        num_rounds = int(log.rounds_B[slot])
        completion.drafted += log.drafted_BS[slot, :num_rounds].tolist()
        completion.accepted += log.accepted_BS[slot, :num_rounds].tolist()
        completion.emitted += log.emitted_BS[slot, :num_rounds].tolist()
        completion.unusable_drafts += int(log.unusable_drafts_B[slot])
        num_top = completion.arrays.logprobs
        if num_top is not None:
            logprobs = jax.tree.map(lambda x: x[slot], report.logprobs)
            new = token_logprobs(self.target.tokenizer, new_ids, logprobs, num_top)
            completion.logprobs += new
            completion.cumulative += _sum_of(new_ids, new)
        if num_new and completion.request.first_token_time is None:
            completion.request.first_token_time = time.monotonic()
        completion.text.push(new_ids)
        if completion.text.stop_reason is not None:
            self._cut(completion)
            self._finish(completion, "stop", completion.text.stop_reason)
        elif report.failed_B[slot]:
            self._finish(completion, "error")
        elif not report.active_B[slot]:
            self._end_of_row(completion)

    def _end_of_row(self, completion: _Completion) -> None:
        """Ends a completion whose row the device ended."""
        last_id = completion.sequence.token_ids[-1]
        params = completion.request.params
        if last_id not in completion.arrays.stop_ids:
            self._finish(completion, "length")
        elif last_id in params.stop_token_ids:
            self._finish(completion, "stop", last_id)
        else:
            self._finish(completion, "stop")

    def _cut(self, completion: _Completion) -> None:
        """Drops the tokens behind the one that completed a stop string."""
        num_kept, sequence = completion.text.num_tokens, completion.sequence
        if completion.logprobs:
            cut_ids = sequence.token_ids[sequence.prompt_length + num_kept :]
            completion.cumulative -= _sum_of(cut_ids, completion.logprobs[num_kept:])
        del sequence.token_ids[sequence.prompt_length + num_kept :]
        del completion.logprobs[num_kept:]
        num_left = num_kept
        for i, emitted in enumerate(completion.emitted):
            completion.emitted[i] = min(emitted, num_left)
            completion.accepted[i] = min(completion.accepted[i], completion.emitted[i])
            num_left -= completion.emitted[i]

    def _finish(
        self, completion: _Completion, reason: str, stop_reason: str | int | None = None
    ) -> None:
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        completion.text.finish()
        sequence = completion.sequence
        if self._on_end and sequence.pages:
            # Pages of the whole mesh: those of a replica follow those of the one before.
            pages = np.array(sequence.pages) + sequence.replica * self.num_pages
            self._on_end(completion.request.request_id, sequence.token_ids, pages)
        self._scheduler.end(completion.sequence)
        self._count(completion)

    def _count(self, completion: _Completion) -> None:
        stats = self._stats
        stats.num_finished[completion.finish_reason] += 1
        stats.num_generated_tokens += len(completion.token_ids)
        stats.num_drafts += sum(drafted > 0 for drafted in completion.drafted)
        stats.num_draft_tokens += sum(completion.drafted)
        stats.num_accepted_tokens += sum(completion.accepted)
        for accepted in completion.accepted:
            for i in range(accepted):
                stats.num_accepted_per_position[i] += 1

    # --- Outputs ----------------------------------------------------------------------------------

    def _deliver(self) -> list[RequestOutput]:
        """Calls the clients of requests with news, and returns the outputs of the others."""
        while self._changed:
            request = next(iter(self._changed))
            del self._changed[request]
            on_output = self._clients.get(request.request_id)
            if request.is_finished:
                self._requests.pop(request.request_id, None)
                self._clients.pop(request.request_id, None)
            is_final_only = request.params.output_kind == RequestOutputKind.FINAL_ONLY
            if is_final_only and not request.is_finished:
                continue
            output = self._output(request)
            if on_output:
                on_output(output)
            else:
                self._ready.append(output)
        ready, self._ready = self._ready, []
        return ready

    def _output(self, request: _Request) -> RequestOutput:
        finished_time = time.monotonic() if request.is_finished else None
        sequences = [completion.sequence for completion in request.completions]
        completions = request.completions
        if request.params.output_kind == RequestOutputKind.DELTA:
            completions = [completion for completion in completions if completion.has_news]
        metrics = RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=finished_time,
            num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
            num_completions=len(sequences),
            num_generation_tokens=sum(each.length - each.prompt_length for each in sequences),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_ids,
            prompt_logprobs=tuple(request.prompt_logprobs) or None,
            outputs=tuple(map(self._completion_output, completions)),
            finished=request.is_finished,
            metrics=metrics,
            num_cached_tokens=sequences[0].num_cached or 0,
        )

    def _completion_output(self, completion: _Completion) -> CompletionOutput:
        text, logprobs, sequence = completion.text.text, completion.logprobs, completion.sequence
        first, num_characters = 0, 0
        if completion.request.params.output_kind == RequestOutputKind.DELTA:
            first, num_characters = completion.num_reported, completion.num_characters
            completion.num_reported = sequence.length - sequence.prompt_length
            completion.num_characters = len(text)
            completion.end_is_reported = completion.finish_reason is not None
        has_logprobs = completion.arrays.logprobs is not None
        return CompletionOutput(
            index=completion.index,
            text=text[num_characters:],
            token_ids=tuple(
                completion.sequence.token_ids[completion.sequence.prompt_length + first :]
            ),
            cumulative_logprob=completion.cumulative if has_logprobs else None,
            logprobs=tuple(logprobs[first:]) if has_logprobs else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            seed=completion.seed,
            drafted=tuple(completion.drafted),
            accepted=tuple(completion.accepted),
            emitted=tuple(completion.emitted),
            unusable_drafts=completion.unusable_drafts,
        )


def _sum_of(ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> float:
    pairs = zip(ids, logprobs, strict=True)
    return sum(entries[token_id].logprob for token_id, entries in pairs)


def token_logprobs(
    tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Logprobs, num_top: int
) -> list[dict[int, Logprob]]:
    """Returns for each token log-probabilities by id: its own first, and the most likely ones.

    Args:
      tokenizer: for the texts; None for none.
      ids: of S tokens or fewer.
      logprobs: of these tokens, on the host: one row.
      num_top: how many of the most likely tokens.
    """
    found = []
    for i, token_id in enumerate(ids):
        top_ids = logprobs.top_ids_BSJ[i, :num_top].tolist()
        top = logprobs.top_BSJ[i, :num_top].tolist()
        entries = {token_id: (float(logprobs.token_BS[i]), int(logprobs.rank_BS[i]))}
        for rank, (top_id, logprob) in enumerate(zip(top_ids, top, strict=True), 1):
            if logprob > -np.inf:  # the vocabulary may have fewer tokens
                entries.setdefault(top_id, (logprob, rank))
        found.append(
            {
                key: Logprob(logprob, rank, _token_text(tokenizer, key))
                for key, (logprob, rank) in entries.items()
            }
        )
    return found


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    if tokenizer is None:
        return None
    return tokenizer.decode([token_id], skip_special_tokens=False)
