"""Benchmark of the kernels: whether they are right, and how close they come to the memory's
bandwidth.

`check` compares each kernel with the reference. Nothing is measured if a kernel is wrong.

`seconds_per_call` measures a chain of calls within one compiled program. Each call needs the result
of the one before, so that they run one after the other on the device, without the host. A rate is
the bytes that must be moved at least, each once, over that time. The roofline is the rate at which
the same card, in the same run, reads and writes one large array. Calls alternate between as many
inputs (pages, logits) as it takes to be twice the size of the L2 cache, up to a limit. Where that
is not enough the row is marked: part of its bytes come from L2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.kernels.gpu import check
from specjax.kernels.paged_attention import paged_attention
from specjax.kernels.sampling import residual_pass, sample_pass

L2_BYTES = 50 * 2**20  # of an H100 and an H200
KERNEL = "mosaic_gpu"  # name of the kernel's figures, even if it is interpreted
BASELINE = "jax"  # JAX's own op, for comparison with our implementations
FIXED_COST_GOAL = 8e-6  # seconds of a call for one token over FIXED_COST_CONTEXT positions
FIXED_COST_CONTEXT = 64
ESTIMATED_RATE = 2e12  # bytes per second, to begin a measurement with

# Passes over the vocabulary in the order of importance: operation, mode.
PASSES = (
    ("sample_pass", "with noise"),
    ("residual_pass", "sampled drafts"),
    ("sample_pass", "without noise"),
    ("residual_pass", "one-hot drafts"),
    ("residual_pass", "mixed drafts"),
)


class Sizes(NamedTuple):
    """Sizes of the checks and measurements.

    Attributes:
      heads: N, K and H of attention.
      batches, contexts: of the rows; all combinations are measured.
      works: new tokens per sequence T, and whether they are a tree.
      vocab_size, num_drafts, logit_dtypes: of the passes over the vocabulary.
      check_works: starts, T, whether a tree, dtype and heads of each check of attention; a start of
        -1 makes the first token a placeholder.
      check_vocab_sizes: V and dtype of each check of the passes.
      max_inputs: the most inputs that calls alternate between.
      copy_bytes: size of the array whose copy is the roofline.
      measure_seconds, repeats: length and number of the measurements of one figure.
    """

    heads: tuple[int, int, int]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    works: tuple[tuple[int, bool], ...]
    vocab_size: int
    num_drafts: int
    logit_dtypes: tuple[str, ...]
    check_works: tuple
    check_vocab_sizes: tuple
    max_inputs: int
    copy_bytes: int
    measure_seconds: float
    repeats: int


LLAMA_3_8B, SMOLLM2 = (32, 8, 128), (9, 3, 64)
FULL = Sizes(
    heads=LLAMA_3_8B,
    batches=(1, 8, 64),
    contexts=(512, 2048, 8192, 32768),
    works=((1, False), (6, False), (32, True)),
    vocab_size=128256,
    num_drafts=5,
    logit_dtypes=("float32", "bfloat16"),
    check_works=(
        ((-1, 0, 57, 58, 63, 64, 1000, 8186), 6, False, "bfloat16", LLAMA_3_8B),
        ((8191,), 1, False, "bfloat16", LLAMA_3_8B),
        ((-1, 5, 100, 2047), 32, True, "bfloat16", LLAMA_3_8B),
        ((3, 700), 64, True, "bfloat16", LLAMA_3_8B),
        ((0, 300), 256, False, "bfloat16", LLAMA_3_8B),
        ((100, 511), 6, False, "float16", LLAMA_3_8B),
        ((-1, 40, 1999), 9, True, "bfloat16", SMOLLM2),
    ),
    check_vocab_sizes=((128256, "float32"), (128256, "bfloat16"), (32003, "bfloat16")),
    max_inputs=32,
    copy_bytes=2**30,
    measure_seconds=0.06,
    repeats=5,
)
TINY = Sizes(
    heads=(2, 1, 64),
    batches=(1,),
    contexts=(128,),
    works=((3, True),),
    vocab_size=256,
    num_drafts=2,
    logit_dtypes=("bfloat16",),
    check_works=(((-1, 70), 4, True, "bfloat16", (4, 2, 64)),),
    check_vocab_sizes=((300, "bfloat16"),),
    max_inputs=1,
    copy_bytes=2**20,
    measure_seconds=0.0,
    repeats=1,
)


@dataclasses.dataclass
class Row:
    """Figures of one operation on one size.

    Attributes:
      operation: "attention", "sample_pass" or "residual_pass".
      case: its size and mode, in words.
      bytes: how many must be moved at least.
      in_l2: whether part of them comes from the L2 cache in these measurements.
      goal: least share of the roofline that is wanted; None for none.
      seconds: time of one call, by implementation.
      skipped: why an implementation has no figure.
    """

    operation: str
    case: str
    bytes: int
    in_l2: bool
    goal: float | None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Report:
    """Results of checks and measurements.

    Attributes:
      checks: names of the checks that were made.
      failures: descriptions, after the name of the check or row.
      copy_bytes_per_second: the roofline, read and written bytes added; None if a check failed.
      rows: the figures.
      seconds: how long everything took.
    """

    checks: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    copy_bytes_per_second: float | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def fixed_seconds(self) -> float | None:
        """Seconds of a call of attention with next to nothing to do, which is the first row."""
        return self.rows[0].seconds.get(KERNEL) if self.rows else None

    def share(self, row: Row, implementation: str = KERNEL) -> float | None:
        """Returns the share of the roofline that a row reaches; None where there is no figure."""
        seconds = row.seconds.get(implementation)
        return seconds and row.bytes / seconds / self.copy_bytes_per_second


class Measurement(NamedTuple):
    """A row to fill in, and what measures it: seconds of a call by implementation."""

    row: Row
    seconds: Callable[[str], float]


def run(
    sizes: Sizes, *, page_size: int, budget_seconds: float, implementation: str = KERNEL
) -> Report:
    """Checks the kernels, then measures in the order of importance until the time is up.

    Args:
      sizes: sizes of the checks and measurements.
      page_size: page size of attention.
      budget_seconds: rows that are not begun by then are skipped, and list why.
      implementation: that of the kernels, "mosaic_gpu" or "interpret".
    """
    start, report = time.monotonic(), Report()
    for name, problems in checks(sizes, page_size, implementation):
        report.checks.append(name)
        try:
            found = problems()
        except Exception as error:  # any exception is a failure of this check
            found = [_in_short(error)]
        report.failures += [f"{name}: {problem}" for problem in found]
    if not report.failures:
        report.copy_bytes_per_second = _copy_rate(sizes)
        measurements = [
            *_attention_measurements(sizes, page_size, implementation),
            *_pass_measurements(sizes, implementation),
        ]
        report.rows = [measurement.row for measurement in measurements]
        report.failures += _measure(measurements, start + budget_seconds)
    report.seconds = time.monotonic() - start
    return report


def checks(
    sizes: Sizes, page_size: int, implementation: str = KERNEL
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yields names of checks, and functions that return descriptions of errors."""
    for starts, T, is_tree, dtype, heads in sizes.check_works:
        N, K, H = heads
        work = f"{'tree' if is_tree else 'chain'} of {T} after {starts}"
        name = f"attention, {work}, N={N} K={K} H={H}, {dtype}"
        arguments = starts, T, is_tree, dtype, heads, page_size, implementation
        yield name, functools.partial(check.check_attention, *arguments)
    for V, dtype in sizes.check_vocab_sizes:
        for with_noise in (True, False):
            name = f"sample_pass, {'with' if with_noise else 'without'} noise, V={V}, {dtype}"
            arguments = V, dtype, with_noise, implementation
            yield name, functools.partial(check.check_sampling, *arguments)
        for drafts in check.DRAFTS:
            name = f"residual_pass, {drafts} drafts, V={V}, {dtype}"
            arguments = V, sizes.num_drafts, drafts, dtype, implementation
            yield name, functools.partial(check.check_residual, *arguments)


def seconds_per_call(
    step: Callable, carry, inputs: Sequence, sizes: Sizes, num_bytes: int, fixed: tuple = ()
) -> float:
    """Returns the seconds of `carry = step(carry, input, *fixed)`, median of several measurements.

    A compiled program runs the steps over all inputs in a loop of about 2 ms, with a trip count
    that XLA knows (in any other loop it would query the device after each iteration). The host
    starts the program once, and many times in a row; the difference counts. The time to start, and
    to notice the end, is in both.

    Args:
      step: jitted, so that it is traced once. Every call must need the carry, or calls may overlap.
      carry: is donated.
      inputs: pytrees of arrays that the calls alternate between.
      sizes: with the length and number of measurements.
      num_bytes: that a call moves, to estimate the trip count.
      fixed: pytrees of arrays that are the same for all calls.
    """
    turns = 1
    if sizes.measure_seconds:
        estimate = 5e-6 + num_bytes / ESTIMATED_RATE
        turns = int(np.clip(2e-3 / (estimate * len(inputs)), 1, 200))

    @functools.partial(jax.jit, donate_argnums=0)
    def program(carry, inputs, fixed):
        def turn(_, carry):
            for item in inputs:
                # Behind the barrier an input is new each time: nothing that depends on it alone can
                # leave the loop.
                carry, item = lax.optimization_barrier((carry, item))
                carry = step(carry, item, *fixed)
            return carry

        return lax.fori_loop(0, turns, turn, carry)

    def seconds(times: int) -> float:
        nonlocal carry
        start = time.perf_counter()
        for _ in range(times):
            carry = program(carry, inputs, fixed)
        jax.block_until_ready(carry)
        return time.perf_counter() - start

    seconds(1)  # compiles
    many = 1 + int(np.clip(sizes.measure_seconds / seconds(1), 1, 500))
    spent = [(seconds(many) - seconds(1)) / (many - 1) for _ in range(sizes.repeats)]
    median = max(float(np.median(spent)), 1e-9)  # a tiny difference may come out negative
    return median / (turns * len(inputs))


def _copy_rate(sizes: Sizes) -> float:
    """Returns the bytes per second, read and written, at which one large array is copied."""
    array = jnp.ones(sizes.copy_bytes // 4, jnp.int32)
    num_bytes = 2 * array.nbytes
    return num_bytes / seconds_per_call(jax.jit(jnp.add), array, [jnp.int32(1)], sizes, num_bytes)


def _measure(measurements: list[Measurement], deadline: float) -> list[str]:
    """Fills in the rows until the deadline. Returns failures of the kernels."""
    failures = []
    for name in (KERNEL, "xla", BASELINE):  # our own first: time may be short
        for row, seconds in measurements:
            # JAX's own op is attention of one token.
            if name == BASELINE and not (row.operation == "attention" and " T=1" in row.case):
                continue
            if time.monotonic() > deadline:
                row.skipped[name] = "no time left (--budget_seconds)"
                continue
            try:
                row.seconds[name] = seconds(name)
            except Exception as error:
                # Neither a lack of memory nor an error of another implementation must end the run.
                # An error of our kernel makes the run fail.
                reason = _in_short(error)
                is_memory = "RESOURCE_EXHAUSTED" in reason
                row.skipped[name] = "out of memory" if is_memory else reason
                if name == KERNEL and not is_memory:
                    failures.append(f"{row.operation}, {row.case}: {reason}")
    return failures


def _in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _num_inputs(num_bytes: int, sizes: Sizes) -> int:
    """Returns how many inputs of this size calls alternate between."""
    return min(-(-2 * L2_BYTES // num_bytes), sizes.max_inputs)


def _row(operation: str, case: str, num_bytes: int, goal: float | None, sizes: Sizes) -> Row:
    in_l2 = _num_inputs(num_bytes, sizes) * num_bytes < 2 * L2_BYTES
    return Row(operation, case, num_bytes, in_l2, goal)


def _attention_measurements(
    sizes: Sizes, page_size: int, implementation: str
) -> Iterator[Measurement]:
    attention = _Attention(sizes, page_size, implementation)
    works = itertools.product(sizes.batches, sizes.contexts, sizes.works)
    for B, context, (T, is_tree) in [(1, FIXED_COST_CONTEXT, (1, False)), *works]:
        case = f"B={B} context={context} T={T}{' tree' if is_tree else ''}"
        goal = _attention_goal(B, sizes.heads[1], context)
        row = _row("attention", case, attention.bytes(B, context, T), goal, sizes)
        options = dict(B=B, context=context, T=T, is_tree=is_tree)
        yield Measurement(row, functools.partial(attention.measure, **options))


def _attention_goal(B: int, K: int, context: int) -> float | None:
    if context < 8192:
        return None
    if B * K >= 64:
        return 0.85
    return 0.7 if B == 1 else None


class _Attention:
    """Measures attention on one pair of pools that holds the largest case."""

    def __init__(self, sizes: Sizes, page_size: int, implementation: str):
        self.sizes, self.Z, self.implementation = sizes, page_size, implementation
        _, K, H = sizes.heads
        self.P = 0
        for B, context in itertools.product(sizes.batches, (FIXED_COST_CONTEXT, *sizes.contexts)):
            num_inputs = _num_inputs(self.bytes(B, context, 1), sizes)
            self.P = max(self.P, num_inputs * B * -(-context // page_size))

        @functools.partial(jax.jit, static_argnums=1)
        def pool(key, P):
            # A few random pages again and again: random numbers for all need more memory.
            pages = jax.random.normal(key, (min(P, 256), K, page_size, H), jnp.bfloat16)
            return pages[jnp.arange(P) % len(pages)]

        self.k_pool, self.v_pool = pool(jax.random.key(0), self.P), pool(jax.random.key(1), self.P)

    def bytes(self, B: int, context: int, T: int) -> int:
        """Returns the bytes of keys and values, queries and outputs, each once."""
        N, K, H = self.sizes.heads
        return B * (context * K + T * N) * 2 * H * 2

    def measure(self, name: str, *, B: int, context: int, T: int, is_tree: bool) -> float:
        """Returns the seconds of a call on sequences of `context` tokens, new ones included.

        Outputs are the next queries.
        """
        rng, (N, _, H) = np.random.default_rng(0), self.sizes.heads
        num_bytes, X = self.bytes(B, context, T), -(-context // self.Z)
        count = _num_inputs(num_bytes, self.sizes)
        page = rng.permutation(self.P)[: count * B * X].reshape(count, B, X).astype(np.int32)
        start_B = jnp.full(B, context - T, jnp.int32)
        ancestors_BT2 = check.random_tree(rng, B, T) if is_tree else None
        if name == BASELINE:
            call, pools = _baseline_attention, self.baseline_pools
        else:
            implementation = self.implementation if name == KERNEL else name
            call = functools.partial(_attention, implementation=implementation)
            pools = self.k_pool, self.v_pool
        q_BTNH = jax.random.normal(jax.random.key(2), (B, T, N, H), jnp.bfloat16)
        tables = [jnp.asarray(table_BX) for table_BX in page]
        fixed = start_B, ancestors_BT2, *pools
        return seconds_per_call(jax.jit(call), q_BTNH, tables, self.sizes, num_bytes, fixed)

    @functools.cached_property
    def baseline_pools(self):
        """Copies in the layout of JAX's own op, `[K, P, Z, H]`."""
        return self.k_pool.swapaxes(0, 1), self.v_pool.swapaxes(0, 1)


def _attention(q_BTNH, table_BX, start_B, ancestors_BT2, k_pool, v_pool, *, implementation: str):
    return paged_attention(
        q_BTNH,
        k_pool,
        v_pool,
        table_BX,
        start_B,
        ancestors_BT2=ancestors_BT2,
        implementation=implementation,
    )


def _baseline_attention(q_B1NH, table_BX, start_B, _, k_pool, v_pool):
    """JAX's own op for one token per sequence (Pallas for Triton, deprecated), if JAX has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu import paged_attention as baseline

        splits = math.gcd(table_BX.shape[1], 16)
        pages = math.gcd(table_BX.shape[1] // splits, 8)
        out_BNH = baseline.paged_attention(
            q_B1NH[:, 0],
            k_pool,
            v_pool,
            table_BX,
            start_B + 1,
            k_splits=splits,
            pages_per_compute_block=pages,
        )
    return out_BNH[:, None]


def _pass_measurements(sizes: Sizes, implementation: str) -> Iterator[Measurement]:
    M, V = sizes.num_drafts, sizes.vocab_size
    cases = itertools.product(PASSES, sizes.batches, sizes.logit_dtypes)
    for (operation, mode), B, dtype in cases:
        measured = _Pass(mode, B, dtype, sizes, implementation)
        is_sampling = operation == "sample_pass"
        num_bytes = measured.rows(is_sampling) * V * jnp.dtype(dtype).itemsize
        row = _row(operation, f"B={B} M={M} V={V} {dtype} {mode}", num_bytes, 0.8, sizes)
        measure = measured.measure_sampling if is_sampling else measured.measure_residual
        yield Measurement(row, functools.partial(measure, num_bytes=num_bytes))


class _Pass(NamedTuple):
    """Measures a pass over the vocabulary at temperature 1."""

    mode: str
    B: int
    dtype: str
    sizes: Sizes
    implementation: str

    def rows(self, is_sampling: bool) -> int:
        """Returns how many rows of logits must be read."""
        if is_sampling:
            return self.B * (self.sizes.num_drafts + 1)
        return self.B + int(self.is_sampled_B().sum())

    def is_sampled_B(self) -> np.ndarray:
        """Returns which sequences have sampled drafts; of mixed drafts every other one."""
        if self.mode == "mixed drafts":
            return np.arange(self.B) % 2 == 0
        return np.full(self.B, self.mode == "sampled drafts")

    def measure_sampling(self, name: str, *, num_bytes: int) -> float:
        """Returns the seconds of a call; what it takes depends on the tokens before."""
        B, T = self.B, self.sizes.num_drafts + 1
        implementation = self.implementation if name == KERNEL else name
        temperature_B = jnp.ones(B)

        @jax.jit
        def call(key_BT2, logits_BTV):
            threshold_BT, noise_BT2 = None, key_BT2
            if self.mode == "without noise":  # a threshold below all logits needs the carry too
                threshold_BT = -1e6 - (key_BT2[..., 0] & 1023).astype(jnp.float32)
                noise_BT2 = None
            token_BT, _ = sample_pass(
                logits_BTV, temperature_B, threshold_BT, noise_BT2, implementation=implementation
            )
            return key_BT2 ^ token_BT[..., None]

        @jax.jit
        def logits(key):
            return 3 * jax.random.normal(key, (B, T, self.sizes.vocab_size), self.dtype)

        count = _num_inputs(num_bytes, self.sizes)
        items = [logits(jax.random.key(i)) for i in range(count)]
        carry = jnp.zeros((B, T, 2), jnp.int32)
        return seconds_per_call(call, carry, items, self.sizes, num_bytes)

    def measure_residual(self, name: str, *, num_bytes: int) -> float:
        """Returns the seconds of a call; its keys depend on the tokens before.

        Every input has rows of its own. The statistics of the distributions are known: they are the
        result of `sample_pass`.
        """
        B, M, V = self.B, self.sizes.num_drafts, self.sizes.vocab_size
        implementation = self.implementation if name == KERNEL else name
        temperature_B, subtract_B = jnp.ones(B), jnp.ones(B, bool)
        sampled_B = jnp.asarray(self.is_sampled_B()) if self.mode == "mixed drafts" else None

        @jax.jit
        def make(key):
            p_key, q_key, row_key = jax.random.split(key, 3)
            logits_BTV = 3 * jax.random.normal(p_key, (B, M + 1, V))
            other_BMV = jax.random.normal(q_key, (B, M, V))
            draft_logits_BMV = (logits_BTV[:, :M] + 0.6 * other_BMV).astype(self.dtype)
            logits_BTV = logits_BTV.astype(self.dtype)
            key_BM2 = jnp.arange(2 * B * M, dtype=jnp.int32).reshape(B, M, 2)
            arguments = temperature_B, None
            _, p = sample_pass(logits_BTV, *arguments, None, implementation="xla")
            draft_BM, q = sample_pass(draft_logits_BMV, *arguments, key_BM2, implementation="xla")
            distributions = None if self.mode == "one-hot drafts" else check.apart(q)
            return p, draft_BM, distributions, jax.random.randint(row_key, (B,), 0, M, jnp.int32)

        @jax.jit
        def call(key_B2, item):
            p, draft_BM, distributions, row_B = item
            sample = residual_pass(
                p,
                draft_BM,
                distributions,
                sampled_B,
                row_B,
                subtract_B,
                temperature_B,
                key_B2,
                implementation=implementation,
            )
            return key_B2 ^ sample.token[:, None]

        count = _num_inputs(num_bytes, self.sizes)
        items = [make(jax.random.key(i)) for i in range(count)]
        return seconds_per_call(call, jnp.zeros((B, 2), jnp.int32), items, self.sizes, num_bytes)
