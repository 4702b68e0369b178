"""Our kernels on the GPU that is here: are they right, and how near do they come to what its memory
can do?

Right: `check` compares each kernel with the reference.

Fast: `seconds_per_call` takes the time of a chain of calls within one compiled program, each of
which needs what the one before it gave, so that they run one after the other on the device, without
the host. A rate is the bytes that must be moved at least, each once, over that time; it is seen
beside the rate at which the same card, in the same run, reads and writes one large array. Calls
take turns with as many different inputs (pages, logits) as it takes to be twice the size of the L2
cache, up to a limit. Where that is not enough the row says so: part of its bytes come from L2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch
from specjax.kernels import sampling as verify
from specjax.kernels.gpu import check
from specjax.kernels.paged_attention import mosaic_gpu as attention_kernel
from specjax.kernels.paged_attention import paged_attention
from specjax.kernels.sampling import mosaic_gpu as verify_kernel

L2_BYTES = 50 * 2**20  # of an H100 and an H200
BASELINE = "jax"  # JAX's own op, beside our implementations
FIXED_COST_GOAL = 8e-6  # seconds of a call for one token that sees
FIXED_COST_CONTEXT = 64


class Sizes(NamedTuple):
    """What is run."""

    heads: tuple[int, int, int]  # N, K, H
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    works: tuple[tuple[int, bool], ...]  # T, whether they are a tree
    vocab_size: int
    num_drafts: int
    logit_dtypes: tuple[str, ...]
    check_works: tuple  # (starts, T, tree, dtype, heads) of the checks of attention; a start of -1 is a placeholder
    check_vocab_sizes: tuple  # (V, dtype) of those of verification
    max_inputs: int  # that calls take turns with
    copy_bytes: int
    measure_seconds: float  # length of one measurement, of which
    repeats: int  # are made


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
    """Figures of one operation on one size."""

    operation: str  # "attention", "draw" or "reject"
    case: str  # what distinguishes it, in words
    bytes: int  # that must be moved at least
    in_l2: bool  # whether part of them comes from the L2 cache in these measurements
    goal: float | None  # least share of the copy's rate that is wanted; None for none
    seconds: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # of one call, by implementation
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # why there is no such figure


@dataclasses.dataclass
class Report:
    """What came of it."""

    checks: list[str] = dataclasses.field(default_factory=list)  # names of those that were made
    failures: list[str] = dataclasses.field(
        default_factory=list
    )  # what is wrong, after the name of the check or row
    copy_bytes_per_second: float | None = (
        None  # read and written bytes added; None where a check failed
    )
    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # that all of it took

    @property
    def fixed_seconds(self) -> float | None:
        """Of a call of attention with next to nothing to do: the first row is that."""
        return self.rows[0].seconds.get("mosaic_gpu") if self.rows else None

    def share(self, row: Row, implementation: str = "mosaic_gpu") -> float | None:
        """Of the copy's rate; None where there is no figure."""
        seconds = row.seconds.get(implementation)
        return seconds and row.bytes / seconds / self.copy_bytes_per_second


def run(sizes: Sizes, *, page_size: int, budget_seconds: float) -> Report:
    """Checks, then measures in the order of importance until the time is up; says in the rows what
    it left out."""
    start, report = time.monotonic(), Report()
    for name, problems in checks(sizes, page_size):
        report.checks.append(name)
        try:
            report.failures += [f"{name}: {problem}" for problem in problems()]
        except (
            Exception
        ) as error:  # whatever a kernel does wrong, the check that it does it in is to be named
            report.failures.append(f"{name}: {_in_short(error)}")
    if not report.failures:
        _measure(report, sizes, page_size, start + budget_seconds)
    report.seconds = time.monotonic() - start
    return report


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it the kernels run in Pallas' interpreter, on a CPU, through the same public
    functions.

    It counts while functions are traced. Raises NotImplementedError where this JAX has no such
    interpreter.
    """
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(
            "the interpreter for Mosaic GPU kernels comes with jax 0.11, and this is "
            f"{jax.__version__}"
        )
    options = dict(interpret=plgpu.InterpretGPUParams())
    attention = functools.partial(attention_kernel.paged_attention, **options)
    passes = {
        name: functools.partial(getattr(verify_kernel, name), **options)
        for name in ("sample_pass", "residual_pass")
    }
    with (
        dispatch.compiling_for(dispatch.HOPPER),
        mock.patch.object(attention_kernel, "paged_attention", attention),
        mock.patch.multiple(verify_kernel, **passes),
    ):
        yield


def checks(sizes: Sizes, page_size: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Names of checks, and functions that return what is wrong, in words."""
    for starts, T, tree, dtype, heads in sizes.check_works:
        N, K, H = heads
        name = f"attention, {'tree' if tree else 'chain'} of {T} after {starts}, N={N} K={K} H={H}, {dtype}"
        yield (
            name,
            functools.partial(check.check_attention, starts, T, tree, dtype, heads, page_size),
        )
    for V, dtype in sizes.check_vocab_sizes:
        yield (
            f"verification, V={V}, {dtype}",
            functools.partial(check.check_verification, V, sizes.num_drafts, dtype),
        )


def seconds_per_call(
    step: Callable, carry, inputs: Sequence, sizes: Sizes, estimate: float, fixed: tuple = ()
) -> float:
    """Seconds of `carry = step(carry, input, *fixed)` on the device, median of several
    measurements.

    A compiled program runs the steps over all inputs, as often as makes about 2 ms of it, in a loop
    with a number of turns that XLA knows (it would ask the device for any other after each). The
    host starts it once and many times in
    a row, and the difference counts: what it takes to start, and to notice the end, is in both.

    Args:
      step: jitted, so that it is traced once. Every call must need the carry, or calls may overlap.
      carry: is donated.
      inputs: pytrees of arrays that the calls take turns with.
      sizes: for how long.
      estimate: guess of the seconds, to begin with.
      fixed: pytrees of arrays that are the same for all calls.
    """
    turns = int(np.clip(2e-3 / (estimate * len(inputs)), 1, 200)) if sizes.measure_seconds else 1

    @functools.partial(jax.jit, donate_argnums=0)
    def program(carry, inputs, fixed):
        def turn(_, carry):
            for item in inputs:
                # Behind the barrier an input is new each time: nothing that depends on it alone can
                # leave the loop.
                carry = step(*lax.optimization_barrier((carry, item)), *fixed)
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
    return max(float(np.median(spent)), 1e-9) / (
        turns * len(inputs)
    )  # a tiny difference may come out negative


def _measure(report: Report, sizes: Sizes, page_size: int, deadline: float) -> None:
    copy = jnp.ones(sizes.copy_bytes // 4, jnp.int32)
    report.copy_bytes_per_second = (
        2
        * copy.nbytes
        / seconds_per_call(jax.jit(jnp.add), copy, [jnp.int32(1)], sizes, 2 * copy.nbytes / 2e12)
    )
    del copy
    measures = []

    def add(
        operation: str, case: str, size: int, goal: float | None, measure: Callable, /, **options
    ):
        report.rows.append(Row(operation, case, size, _num_inputs(size, sizes)[1], goal))
        measures.append(functools.partial(measure, **options))

    attention, works = (
        _Attention(sizes, page_size),
        itertools.product(sizes.batches, sizes.contexts, sizes.works),
    )
    for B, context, (T, tree) in [(1, FIXED_COST_CONTEXT, (1, False)), *works]:
        goal = (
            None
            if context < 8192
            else 0.85
            if B * sizes.heads[1] >= 64
            else 0.7
            if B == 1
            else None
        )
        add(
            "attention",
            f"B={B} context={context} T={T}{' tree' if tree else ''}",
            attention.bytes(B, context, T),
            goal,
            attention.measure,
            B=B,
            context=context,
            T=T,
            tree=tree,
        )
    K, V = sizes.num_drafts, sizes.vocab_size
    for operation, B, dtype in itertools.product(
        ("draw", "reject"), sizes.batches, sizes.logit_dtypes
    ):
        size = B * (K + 1 if operation == "draw" else 2) * V * jnp.dtype(dtype).itemsize
        add(
            operation,
            f"B={B} K={K} V={V} {dtype}",
            size,
            0.8,
            _measure_verification,
            operation=operation,
            B=B,
            dtype=dtype,
            size=size,
            sizes=sizes,
        )
    for implementation in ("mosaic_gpu", "xla", BASELINE):  # our own first: time may be short
        for row, measure in zip(report.rows, measures, strict=True):
            if implementation == BASELINE and (
                row.operation != "attention" or " T=1" not in row.case
            ):
                continue
            if time.monotonic() > deadline:
                row.skipped[implementation] = "no time left (--budget_seconds)"
                continue
            try:
                row.seconds[implementation] = measure(implementation)
            except Exception as error:
                # What does not fit, and what is not ours, must not end the run; a kernel of ours
                # that fails, fails it.
                reason = _in_short(error)
                row.skipped[implementation] = (
                    "out of memory" if "RESOURCE_EXHAUSTED" in reason else reason
                )
                if implementation == "mosaic_gpu" and "RESOURCE_EXHAUSTED" not in reason:
                    report.failures.append(f"{row.operation}, {row.case}: {reason}")


def _in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _num_inputs(size: int, sizes: Sizes) -> tuple[int, bool]:
    """How many inputs of so many bytes to take turns with, and whether L2 still holds a part of
    them."""
    count = min(-(-2 * L2_BYTES // size), sizes.max_inputs)
    return count, count * size < 2 * L2_BYTES


class _Attention:
    """Measures attention on one pair of pools that holds the largest case."""

    def __init__(self, sizes: Sizes, page_size: int):
        self.sizes, self.Z = sizes, page_size
        _, K, H = sizes.heads
        shapes = [
            (B, context) for B in sizes.batches for context in (FIXED_COST_CONTEXT, *sizes.contexts)
        ]
        P = max(
            B * -(-context // page_size) * _num_inputs(self.bytes(B, context, 1), sizes)[0]
            for B, context in shapes
        )

        @functools.partial(jax.jit, static_argnums=1)
        def pool(
            key, P
        ):  # a few random pages again and again: random numbers for all would take more room
            pages = jax.random.normal(key, (min(P, 256), K, page_size, H), jnp.bfloat16)
            return pages[jnp.arange(P) % len(pages)]

        self.P, self.k_pool, self.v_pool = P, pool(jax.random.key(0), P), pool(jax.random.key(1), P)

    def bytes(self, B: int, context: int, T: int) -> int:
        """Keys and values, queries and outputs, each once."""
        N, K, H = self.sizes.heads
        return B * (context * K + T * N) * 2 * H * 2

    def measure(self, implementation: str, *, B: int, context: int, T: int, tree: bool) -> float:
        """Seconds of a call on sequences of `context` tokens, the new ones included; outputs are
        the next queries."""
        rng, (N, _, H), X = np.random.default_rng(0), self.sizes.heads, -(-context // self.Z)
        count = _num_inputs(self.bytes(B, context, T), self.sizes)[0]
        tables_IBX = rng.permutation(self.P)[: count * B * X].reshape(count, B, X).astype(np.int32)
        start_B, ancestors_BT2 = (
            jnp.full(B, context - T, jnp.int32),
            check.random_tree(rng, B, T) if tree else None,
        )
        if implementation == BASELINE:
            call, pools = _peer, self.peer_pools
        else:
            call, pools = (
                functools.partial(_ours, implementation=implementation),
                (self.k_pool, self.v_pool),
            )
        q_BTNH = jax.random.normal(jax.random.key(2), (B, T, N, H), jnp.bfloat16)
        estimate = 5e-6 + self.bytes(B, context, T) / 2e12
        return seconds_per_call(
            jax.jit(call),
            q_BTNH,
            [jnp.asarray(x) for x in tables_IBX],
            self.sizes,
            estimate,
            (start_B, ancestors_BT2, *pools),
        )

    @functools.cached_property
    def peer_pools(self):
        """Copies in the layout of JAX's own op, `[K, P, Z, H]`."""
        return tuple(pool.swapaxes(0, 1) for pool in (self.k_pool, self.v_pool))


def _ours(q_BTNH, table_BX, start_B, ancestors_BT2, k_pool, v_pool, *, implementation: str):
    return paged_attention(
        q_BTNH,
        k_pool,
        v_pool,
        table_BX,
        start_B,
        ancestors_BT2=ancestors_BT2,
        implementation=implementation,
    )


def _peer(q_B1NH, table_BX, start_B, _, k_pool, v_pool):
    """JAX's own op for one token per sequence (Pallas for Triton, deprecated), where this JAX has
    it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as own

        splits = math.gcd(table_BX.shape[1], 16)
        pages = math.gcd(table_BX.shape[1] // splits, 8)
        return own(
            q_B1NH[:, 0],
            k_pool,
            v_pool,
            table_BX,
            start_B + 1,
            k_splits=splits,
            pages_per_compute_block=pages,
        )[:, None]


def _measure_verification(
    implementation: str, *, operation: str, B: int, dtype: str, size: int, sizes: Sizes
) -> float:
    """Seconds of a call of `verify.draw` or `verify.reject` at temperature 1; the keys follow from
    the tokens before.

    Every input of `reject` has its own accepted drafts. That the target's distributions are known is the
    work of `draw`.
    """
    K, V = sizes.num_drafts, sizes.vocab_size
    count = _num_inputs(size, sizes)[0]
    temperature_B, count_B = jnp.ones(B), jnp.full(B, K, jnp.int32)

    @jax.jit
    def make(key):
        p_key, q_key, u_key = jax.random.split(key, 3)
        logits_BTV = 3 * jax.random.normal(p_key, (B, K + 1, V))
        draft_BMV = (logits_BTV[:, :K] + 0.6 * jax.random.normal(q_key, (B, K, V))).astype(dtype)
        logits_BTV = logits_BTV.astype(dtype)
        if operation == "draw":
            return logits_BTV
        argmax_BT, p = verify.draw(logits_BTV, temperature_B, None, None, implementation="xla")
        key_BM2 = jnp.arange(2 * B * K, dtype=jnp.int32).reshape(B, K, 2)
        draft_BM, q = verify.draw(draft_BMV, temperature_B, None, key_BM2, implementation="xla")
        return p, argmax_BT, draft_BM, check.apart(q), jax.random.uniform(u_key, (B, K))

    @jax.jit
    def call(key_BT2, item):
        if operation == "draw":
            token_BT, _ = verify.draw(
                item, temperature_B, None, key_BT2, implementation=implementation
            )
            return key_BT2 ^ token_BT[..., None]
        p, argmax_BT, draft_BM, draft_distributions, u_BM = item
        _, token_B = verify.reject(
            p,
            argmax_BT,
            draft_BM,
            count_B,
            draft_distributions,
            temperature_B,
            u_BM,
            key_BT2,
            implementation=implementation,
        )
        return key_BT2 ^ token_B[:, None, None]

    items = [make(jax.random.key(i)) for i in range(count)]
    return seconds_per_call(
        call, jnp.zeros((B, K + 1, 2), jnp.int32), items, sizes, 5e-6 + size / 2e12
    )
