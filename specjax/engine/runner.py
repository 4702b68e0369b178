"""The device of an engine: its state, and calls of the programs with arrays for each sequence."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from specjax import kv_cache, parallel
from specjax.decode import DecodeConfig, RequestArrays
from specjax.engine import batch, programs
from specjax.engine.programs import Admission, Pages, Report
from specjax.engine.request import SamplingParams
from specjax.engine.schedule import Chunk, Plan
from specjax.engine.schedule import Sequence as Row
from specjax.kernels import dispatch
from specjax.processors import ProcessorArrays
from specjax.sampling import Logprobs

MAX_ROUNDS = 16  # of a call: the tables of a report have so many columns
TOP_BUCKETS = (0, 5, 20)
# Rounds in programs with far too many rows, before one with fewer is compiled. Each of them costs a
# CPU about a tenth of a second more than necessary, and a GPU next to nothing.
CPU_OVERSIZED_ROUNDS, GPU_OVERSIZED_ROUNDS = 128, 4096
# on_program(what was compiled, seconds, number of programs)
OnProgram = Callable[[str, float, int], None]
ADMISSION_ROWS = 4  # rows of a replica that one call of `admit` can fill


@dataclasses.dataclass(frozen=True)
class RowArrays:
    """What the device must know of a sequence, apart from its tokens: arrays of one row.

    Attributes:
      request: constants of the request, without processors.
      stop_ids: ids that end it.
      processors: None for none.
      logprobs: for how many of the most likely tokens log-probabilities are reported, beside those
        of the output; None for none at all.
      prompt_logprobs: the same for the prompt.
    """

    request: RequestArrays
    stop_ids: tuple[int, ...] = ()
    processors: ProcessorArrays | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def with_seed(self, seed: int) -> RowArrays:
        """Returns the arrays of the same request with another seed, a uint32."""
        sampling = self.request.sampling.replace(seed_B=np.array([seed], np.uint32))
        return dataclasses.replace(self, request=self.request.replace(sampling=sampling))

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return not self.request.sampling.temperature_B.any()


class Variant(NamedTuple):
    """What a program of rounds is compiled for.

    Attributes:
      num_rows: rows of a replica.
      is_greedy: whether all of them are greedy, and none has processors.
      has_processors: whether logits are processed.
      logprobs: see `DecodeConfig`.
    """

    num_rows: int
    is_greedy: bool
    has_processors: bool = False
    logprobs: int | None = None

    @property
    def description(self) -> str:
        """In words, for the progress of `Runner.warm_up`."""
        kind = "greedy" if self.is_greedy else "sampled"
        if self.has_processors:
            kind = "with processors"
        rows = "row" if self.num_rows == 1 else "rows"
        return f"rounds of {self.num_rows} {rows}, {kind}"


class Call(NamedTuple):
    """A call of `rounds` whose report has not been read yet.

    Attributes:
      plan: what it does.
      slots: the row of each sequence of the plan in the arrays of the report.
      report: on the device.
      dispatched_at: seconds of `time.perf_counter`.
    """

    plan: Plan
    slots: list[int]
    report: Report
    dispatched_at: float


class Runner:
    """Owns the state on the device.

    The owner of each sequence (`schedule.Sequence.owner`) has a field `arrays` of `RowArrays`.

    Attributes:
      compile_seconds: time in which programs were compiled.
    """

    def __init__(
        self,
        params: tuple[Any, Any],
        config: DecodeConfig,
        *,
        num_rows: int,
        max_model_len: int,
        num_pages: int,
        chunk_sizes: tuple[int, ...],
        chunk_rows: int,
    ):
        """Makes the state.

        Args:
          params: of the target and of the drafter.
          config: static configuration of the loop.
          num_rows: sequences of a replica that run at a time.
          max_model_len: S, the largest length of a sequence.
          num_pages: P, pages of a replica.
          chunk_sizes: sizes of the chunks in which prompts are read, in rising order.
          chunk_rows: chunks of a replica in a call of `prefill`.
        """
        self._params, self._config, self._mesh = params, config, config.runtime.mesh
        self._num_replicas = parallel.dp_size(self._mesh)
        self._num_rows, self._max_model_len = num_rows, max_model_len
        self._num_pages = num_pages
        self._chunk_sizes, self._chunk_rows = chunk_sizes, chunk_rows
        num_positions = max_model_len + config.num_tokens
        self._table_width = kv_cache.pages_for(num_positions, config.runtime.page_size)
        # Attention through XLA on a GPU gathers all pages of the tables: they are cut to the power
        # of two that the longest row of a call needs. Each width is another program.
        is_xla = config.runtime.implementation == "xla" or dispatch.missing_gpu() is not None
        self._cuts_tables = is_xla and jax.default_backend() != "cpu"
        self._buckets = row_buckets(num_rows)
        is_cpu = jax.default_backend() == "cpu"
        self._max_oversized_rounds = CPU_OVERSIZED_ROUNDS if is_cpu else GPU_OVERSIZED_ROUNDS
        self._num_oversized_rounds = 0
        self._compiled: set[Variant] = set()
        self._later: dict[Variant, concurrent.futures.Future] = {}  # being compiled
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "specjax-compile")
        self.compile_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        """Makes the state anew, without requests."""
        self._processors: ProcessorArrays | None = None  # of all rows, once a sequence has any
        self._state = None  # frees its memory
        state = programs.init_jit(
            *self._params,
            self._config,
            self._num_rows,
            self._max_model_len,
            self._num_pages,
            batch.MAX_STOP_IDS,
        )
        if self._mesh is None:
            # Programs return arrays that are committed to the device of the parameters. For arrays
            # that are not, each program would be compiled once more.
            state = jax.device_put(state, jax.tree.leaves(self._params)[0].sharding)
        self._state = state

    @property
    def drafter_state(self) -> Any:
        """The drafter's state, on the devices."""
        return self._state.drafter

    # --- Calls ------------------------------------------------------------------------------------

    def admit(self, sequences: list[Row]) -> None:
        """Writes the rows of sequences that were given one."""
        for i in range(0, len(sequences), ADMISSION_ROWS):
            self._admit(sequences[i : i + ADMISSION_ROWS])

    def _admit(self, sequences: list[Row]) -> None:
        num_slots = min(ADMISSION_ROWS, self._num_rows)
        slots = self._slots(sequences, num_slots)
        num_rows = num_slots * self._num_replicas
        tokens_BS = np.zeros((num_rows, self._max_model_len), np.int32)
        length_B, start_B = np.zeros((2, num_rows), np.int32)
        rows = [batch.request_row(SamplingParams(), 1, 1, ())] * num_rows
        for slot, sequence in zip(slots, sequences, strict=True):
            tokens_BS[slot, : sequence.length] = sequence.token_ids
            length_B[slot], start_B[slot] = sequence.length, sequence.num_found
            rows[slot] = sequence.owner.arrays.request
        request = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
        row_B = self._row_numbers(sequences, slots, num_slots)
        admission = Admission(row_B, tokens_BS, length_B, start_B, request)
        admission = self._put(admission)
        with _host_arrays_allowed():
            self._state = programs.admit_jit(self._config, self._state, admission)
        if any(sequence.owner.arrays.processors for sequence in sequences):
            self._start_processors()  # if none had any before
        if self._processors is not None:
            self._admit_processors(sequences, slots, row_B)

    def _start_processors(self) -> None:
        """Makes the processors of all rows, which change nothing."""
        if self._processors is None:
            V = self._config.target.vocab_size
            neutral = batch.neutral_processors(self._num_rows * self._num_replicas, V)
            self._processors = parallel.put(neutral, self._mesh, None)

    def _admit_processors(self, sequences: list[Row], slots: list[int], row_B) -> None:
        neutral = batch.neutral_processors(1, self._config.target.vocab_size)
        parts = [neutral] * len(row_B)
        for slot, sequence in zip(slots, sequences, strict=True):
            parts[slot] = batch.filled(sequence.owner.arrays.processors, neutral)
        new = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        arguments = (self._put(row_B), self._put(new, None))
        with _host_arrays_allowed():
            self._processors = programs.admit_processors_jit(
                self._config, self._processors, *arguments
            )

    def prefill(self, chunks: list[Chunk]) -> list[Logprobs] | None:
        """Reads chunks of prompts, at most `chunk_rows` of each replica.

        Returns log-probabilities of the tokens after each of a chunk, `[S]` and `[S, J]`, if the
        sequences are scored; else None.
        """
        sequences = [chunk.sequence for chunk in chunks]
        slots = self._slots(sequences, self._chunk_rows)
        start_B, count_B = np.zeros((2, self._chunk_rows * self._num_replicas), np.int32)
        for slot, chunk in zip(slots, chunks, strict=True):
            start_B[slot], count_B[slot] = chunk.start, chunk.count
        most = max(chunk.count for chunk in chunks)
        size = next(size for size in self._chunk_sizes if size >= most)
        pages = self._pages(sequences, slots, self._chunk_rows)
        if not sequences[0].is_scored:
            self._prefill(pages, start_B, count_B, size)
            return None
        num_top = max(sequence.owner.arrays.prompt_logprobs for sequence in sequences)
        *head, config, state, pages, starts, counts, size = self._prefill_arguments(
            pages, start_B, count_B, size
        )
        config = dataclasses.replace(config, logprobs=_top_bucket(num_top))
        with _host_arrays_allowed():
            self._state, logprobs = programs.score_jit(
                *head, config, state, pages, starts, counts, size
            )
        logprobs = parallel.get(logprobs)
        return [jax.tree.map(lambda x, slot=slot: x[slot], logprobs) for slot in slots]

    def _prefill(self, pages: Pages, start_B, count_B, size: int) -> None:
        arguments = self._prefill_arguments(pages, start_B, count_B, size)
        with _host_arrays_allowed():
            self._state = programs.prefill_jit(*arguments)

    def _prefill_arguments(self, pages: Pages, start_B, count_B, size: int) -> tuple:
        arrays = self._put((pages, start_B, count_B))
        return (*self._params, self._config, self._state, *arrays, size)

    def wait(self) -> None:
        """Waits until everything that was dispatched is done."""
        jax.block_until_ready(self._state.length_B)

    def rounds(self, plan: Plan, num_expected: int) -> Call:
        """Dispatches rounds of the sequences that decode.

        Args:
          plan: what to do.
          num_expected: most sequences of a replica that are likely to decode soon. A program for
            so many is compiled where there is none that fits.
        """
        most = max(
            sum(sequence.replica == replica for sequence in plan.decoding)
            for replica in range(self._num_replicas)
        )
        arrays = [sequence.owner.arrays for sequence in plan.decoding]
        has_processors = any(row.processors for row in arrays)
        num_top = max(-1 if row.logprobs is None else row.logprobs for row in arrays)
        wanted = Variant(
            most,
            is_greedy=all(row.is_greedy for row in arrays) and not has_processors,
            has_processors=has_processors,
            logprobs=None if num_top < 0 else _top_bucket(num_top),
        )
        longest = max(sequence.max_length - sequence.length for sequence in plan.decoding)
        variant = self._variant(wanted, num_expected, min(plan.max_rounds, longest))
        slots = self._slots(plan.decoding, variant.num_rows)
        pages = self._pages(plan.decoding, slots, variant.num_rows)
        limits = (plan.max_rounds, plan.until_a_row_ends)
        dispatched_at = time.perf_counter()
        return Call(plan, slots, self._rounds(variant, pages, limits), dispatched_at)

    def _rounds(self, variant: Variant, pages: Pages, limits: tuple[int, int]) -> Report:
        arguments = self._round_arguments(variant, pages, limits)
        with _host_arrays_allowed():
            self._state, report = programs.rounds_jit(*arguments)
        return report

    def _round_arguments(self, variant: Variant, pages: Pages, limits: tuple[int, int]) -> tuple:
        limits = self._put(np.array(limits, np.int32), PartitionSpec())
        return (
            *self._params,
            dataclasses.replace(self._config, logprobs=variant.logprobs),
            self._state,
            self._put(pages),
            self._processors if variant.has_processors else None,
            limits,
            MAX_ROUNDS,
            variant.is_greedy,
        )

    def _variant(self, wanted: Variant, num_expected: int, num_rounds: int) -> Variant:
        """Returns the variant for these rows: a compiled one if there is any, else a new one.

        A compiled one with far more rows than are needed serves for a while: to compile another
        one pays only if few rows decode for long.
        """
        for variant in [variant for variant, future in self._later.items() if future.done()]:
            if self._later.pop(variant).exception() is None:
                self._compiled.add(variant)
        compiled = [variant for variant in self._compiled if variant[1:] == wanted[1:]]
        fitting = [variant for variant in compiled if variant.num_rows >= wanted.num_rows]
        num_rows = max(wanted.num_rows, min(num_expected, self._num_rows))
        if fitting:
            smallest = min(fitting)
            if smallest.num_rows < 2 * self._bucket(num_rows):
                return smallest
            self._num_oversized_rounds += num_rounds
            if self._num_oversized_rounds < self._max_oversized_rounds:
                return smallest
            self._num_oversized_rounds = 0
        variant = wanted._replace(num_rows=self._bucket(num_rows))
        if variant in self._later:
            self._later[variant].result()
        else:
            self.compile(variant)
        return variant

    def _bucket(self, num_rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    # --- Compilation ------------------------------------------------------------------------------

    def compile(self, variant: Variant) -> None:
        """Compiles a program of rounds by a call that does nothing."""
        start = time.perf_counter()
        self.wait()
        if variant.has_processors:
            self._start_processors()
        self._rounds(variant, self._no_pages(variant.num_rows), (0, 0))
        self.wait()
        self._compiled.add(variant)
        self.compile_seconds += time.perf_counter() - start

    def _no_pages(self, num_slots: int) -> Pages:
        return self._pages([], [], num_slots)

    def variants(self, *, has_processors: bool) -> tuple[list[Variant], list[Variant]]:
        """Returns what requests without log-probabilities may need: the first, and the rest.

        The first ones can do all the work, but for processors. They have the largest number of
        rows and every second one below.
        """
        most, some = self._buckets[::-1][::2], self._buckets[::-1][1::2]

        def of(row_numbers, is_greedy=False, has_processors=False):
            return [Variant(num_rows, is_greedy, has_processors) for num_rows in row_numbers]

        first = of(most, is_greedy=True) + of(most)
        rest = of(some, is_greedy=True) + of(some)
        if has_processors:
            rest += of((*most, *some), has_processors=True)
        return first, rest

    @property
    def is_warm(self) -> bool:
        """Whether nothing is being compiled behind the calls."""
        return all(future.done() for future in self._later.values())

    def close(self) -> None:
        """Cancels compilations that have not started."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def warm_up(
        self,
        variants: list[Variant],
        later: Sequence[Variant] = (),
        on_program: OnProgram | None = None,
    ) -> None:
        """Compiles what the calls of some variants need, several programs at a time.

        Args:
          variants: they are compiled when this returns.
          later: compiled one by one behind the calls that follow, and used once they are there.
            Until then, rows run in programs with more rows.
          on_program: called when one of `variants`, or a program that reads prompts, is compiled.
        """
        start = time.perf_counter()
        if any(variant.has_processors for variant in (*variants, *later)):
            self._start_processors()
        self._admit([])
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            names = {}
            for size in self._chunk_sizes:
                program = self._lower_prefill(size)
                names[pool.submit(_seconds_of, program.compile)] = f"prompts, {size} tokens"
            for variant in variants:
                program = self._lower(variant)
                names[pool.submit(_seconds_of, program.compile)] = variant.description
            for future in concurrent.futures.as_completed(names):
                seconds = future.result()  # raises what went wrong
                if on_program:
                    on_program(names[future], seconds, len(names))
        # A call with the same types of arguments finds what was compiled.
        self._compiled.update(variants)
        self.compile_seconds += time.perf_counter() - start
        for variant in later:
            self._compile_later(variant)

    def _lower_prefill(self, size: int):
        chunk_B = np.zeros((2, self._chunk_rows * self._num_replicas), np.int32)
        arguments = self._prefill_arguments(self._no_pages(self._chunk_rows), *chunk_B, size)
        return programs.prefill_jit.lower(*arguments)

    def _lower(self, variant: Variant):
        return programs.rounds_jit.lower(*self._idle_arguments(variant))

    def _idle_arguments(self, variant: Variant) -> tuple:
        """Returns arguments of a call that does nothing."""
        return self._round_arguments(variant, self._no_pages(variant.num_rows), (0, 0))

    def _compile_later(self, variant: Variant) -> None:
        # Processes of a mesh would not use a new program with the same call.
        if self._mesh is not None and jax.process_count() > 1:
            self.compile(variant)
            return
        arguments = self._idle_arguments(variant)

        def compile_():
            programs.rounds_jit.lower(*arguments).compile()

        self._later[variant] = self._worker.submit(compile_)

    # --- Arrays of a call -------------------------------------------------------------------------

    def _put(self, tree: Any, spec: PartitionSpec | None = parallel.ROWS) -> Any:
        """Returns arrays of the host as arguments of a program, see `parallel.put`."""
        # The call takes them to the only device itself, in a fraction of the time.
        return tree if self._mesh is None else parallel.put(tree, self._mesh, spec)

    def _slots(self, sequences: Sequence[Row], num_slots: int) -> list[int]:
        """Returns the row of each sequence in arrays that have `num_slots` for each replica."""
        used = [0] * self._num_replicas
        slots = []
        for sequence in sequences:
            slots.append(sequence.replica * num_slots + used[sequence.replica])
            used[sequence.replica] += 1
        return slots

    def _row_numbers(self, sequences: Sequence[Row], slots: list[int], num_slots: int):
        row_B = np.full(num_slots * self._num_replicas, self._num_rows, np.int32)
        row_B[slots] = [sequence.row for sequence in sequences]
        return row_B

    def _pages(self, sequences: Sequence[Row], slots: list[int], num_slots: int) -> Pages:
        num_rows = num_slots * self._num_replicas
        width = self._table_width
        if self._cuts_tables:
            most = max((len(sequence.pages) for sequence in sequences), default=1)
            width = min(width, 2 ** (most - 1).bit_length())
        table_BX = np.full((num_rows, width), self._num_pages, np.int32)
        capacity_B = np.zeros(num_rows, np.int32)
        for slot, sequence in zip(slots, sequences, strict=True):
            table_BX[slot, : len(sequence.pages)] = sequence.pages
            capacity_B[slot] = len(sequence.pages) * self._config.runtime.page_size
        return Pages(self._row_numbers(sequences, slots, num_slots), table_BX, capacity_B)


def _host_arrays_allowed():
    """A context for calls whose arguments are arrays of the host, also where transfers are not."""
    return jax.transfer_guard_host_to_device("allow")


def _seconds_of(function: Callable[[], Any]) -> float:
    """Calls a function, and returns how long it took."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _top_bucket(num_top: int) -> int:
    """Returns for how many of the most likely tokens a program is compiled."""
    return next(bucket for bucket in TOP_BUCKETS if bucket >= num_top)


def row_buckets(num_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which programs are compiled, in rising order.

    A pass over a few rows costs a CPU more with each row. On a GPU it hardly does, and programs
    take longer to compile.
    """
    step = 2 if jax.default_backend() == "cpu" else 4
    buckets = [1]
    while buckets[-1] < num_rows:
        buckets.append(min(buckets[-1] * step, num_rows))
    return tuple(buckets)
