"""Our kernels on the GPU that is here: are they right, and how near do they come to what its memory can do?

Right: `check_attention` and `check_verification` compare each kernel with the `xla` implementation in float32, from the
same inputs. Every check also shows that it would have found zeros and shifted outputs wrong.

Fast: `seconds_per_call` takes the time of a chain of calls within one compiled program, each of which needs what the
one before it gave, so that they run one after the other on the device, without the host. A rate is the bytes that must
be moved at least, each once, over that time; it is seen beside the rate at which the same card, in the same run, reads
and writes one large array. Calls take turns with as many different inputs (pages, logits) as it takes to be twice the
size of the L2 cache, up to a limit. Where that is not enough the row says so: part of its bytes come from L2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch, verify
from specjax.kernels.paged_attention import mosaic_gpu as attention_kernel
from specjax.kernels.paged_attention import pack_ancestors, paged_attention
from specjax.kernels.verify import api as verify_api
from specjax.kernels.verify import mosaic_gpu as verify_kernel
from specjax.kernels.verify.noise import exponential

L2_BYTES = 50 * 2**20  # of an H100 and an H200
PEER = "jax"  # JAX's own op, beside our implementations
FIXED_COST_GOAL = 8e-6  # seconds of a call for one token that sees
FIXED_COST_CONTEXT = 64
# Relative distance below which two results of float32 arithmetic may fall either way: exp of an argument of up to 80
# that is off by half a unit in the last place is off by 5e-6, and there are two of them.
TIE = 1e-5


class Sizes(NamedTuple):
    """What is run.

    Attributes:
      heads: N, NKV, H.
      batches, contexts: of the grid for attention; the batches are those for verification, too.
      works: (T, whether they are a tree).
      vocab_size, num_drafts, logit_dtypes: of verification.
      check_works: (starts, T, tree, dtype, heads) of the checks of attention; a start of -1 is a placeholder.
      check_vocab_sizes: (V, dtype) of those of verification.
      max_inputs: that calls take turns with.
      copy_bytes: size of the array that is copied.
      measure_seconds: length of one measurement, of which
      repeats: are made.
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
    heads=LLAMA_3_8B, batches=(1, 8, 64), contexts=(512, 2048, 8192, 32768), works=((1, False), (6, False), (32, True)),
    vocab_size=128256, num_drafts=5, logit_dtypes=("float32", "bfloat16"),
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
    max_inputs=32, copy_bytes=2**30, measure_seconds=0.06, repeats=5,
)  # fmt: skip
TINY = Sizes(
    heads=(2, 1, 64), batches=(1,), contexts=(128,), works=((3, True),), vocab_size=256, num_drafts=2,
    logit_dtypes=("bfloat16",),
    check_works=(((-1, 70), 4, True, "bfloat16", (4, 2, 64)),),
    check_vocab_sizes=((300, "bfloat16"),), max_inputs=1, copy_bytes=2**20, measure_seconds=0.0, repeats=1)  # fmt: skip


@dataclasses.dataclass
class Row:
    """Figures of one operation on one size.

    Attributes:
      operation: "attention", "draw" or "reject".
      case: what distinguishes it, in words.
      bytes: that must be moved at least.
      in_l2: whether part of them comes from the L2 cache in these measurements.
      goal: least share of the copy's rate that is wanted; None for none.
      seconds: of one call, by implementation.
      skipped: why there is no such figure, by implementation.
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
    """What came of it.

    Attributes:
      checks: names of the checks that were made.
      failures: what is wrong, each beginning with the name of the check or of the row. Without timings after a check.
      copy_bytes_per_second: rate of the copy, read and written bytes added; None where it was not come to.
      rows: figures.
      seconds: that all of it took.
    """

    checks: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    copy_bytes_per_second: float | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def fixed_seconds(self) -> float | None:
        """Of a call of attention with next to nothing to do: the first row is that."""
        return self.rows[0].seconds.get("mosaic_gpu") if self.rows else None

    def share(self, row: Row, implementation: str = "mosaic_gpu") -> float | None:
        """Of the copy's rate; None where there is no figure."""
        seconds = row.seconds.get(implementation)
        return seconds and row.bytes / seconds / self.copy_bytes_per_second


def run(sizes: Sizes, *, page_size: int, budget_seconds: float) -> Report:
    """Checks, then measures in the order of importance until the time is up; says in the rows what it left out."""
    start, report = time.monotonic(), Report()
    for name, check in checks(sizes, page_size):
        report.checks.append(name)
        try:
            report.failures += [f"{name}: {problem}" for problem in check()]
        except Exception as error:  # whatever a kernel does wrong, the check that it does it in is to be named
            report.failures.append(f"{name}: {_in_short(error)}")
    if not report.failures:
        _measure(report, sizes, page_size, start + budget_seconds)
    report.seconds = time.monotonic() - start
    return report


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it the kernels run in Pallas' interpreter, on a CPU, through the same public functions.

    It counts while functions are traced. Raises NotImplementedError where this JAX has no such interpreter.
    """
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError("the interpreter for Mosaic GPU kernels comes with jax 0.11, and this is "
                                  f"{jax.__version__}")  # fmt: skip
    options = dict(interpret=plgpu.InterpretGPUParams())
    attention = functools.partial(attention_kernel.paged_attention, **options)
    passes = SimpleNamespace(scan=functools.partial(verify_kernel.scan, **options),
                             residual=functools.partial(verify_kernel.residual, **options))
    with (dispatch.compiling_for(dispatch.HOPPER), mock.patch.object(attention_kernel, "paged_attention", attention),
          mock.patch.dict(verify_api.PASSES, mosaic_gpu=passes)):  # fmt: skip
        yield


# ---- Right? ----


def checks(sizes: Sizes, page_size: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Names of checks, and functions that return what is wrong, in words."""
    for starts, T, tree, dtype, heads in sizes.check_works:
        name = f"attention, {'tree' if tree else 'chain'} of {T} after {starts}, N={heads[0]} NKV={heads[1]} " \
               f"H={heads[2]}, {dtype}"  # fmt: skip
        yield name, functools.partial(check_attention, starts, T, tree=tree, dtype=dtype, heads=heads,
                                      page_size=page_size)  # fmt: skip
    for V, dtype in sizes.check_vocab_sizes:
        yield f"verification, V={V}, {dtype}", functools.partial(check_verification, V, sizes.num_drafts, dtype)


def check_attention(starts: Sequence[int], T: int, *, tree: bool, dtype: str, heads: tuple[int, int, int],
                    page_size: int) -> list[str]:
    """What is wrong with the kernel's outputs. Slots and pages that hold nothing are NaN.

    Two roundings to the dtype are allowed, of the weights and of the output, each to the nearest: together one unit in
    the last place of the same attention over the magnitudes of the values. 1e-5 is for sums in float32.
    """
    rng, (N, NKV, H), B, Z = np.random.default_rng(0), heads, len(starts), page_size
    start_B = np.array(starts, np.int32)
    X = -(-int(start_B.max() + T) // Z)
    P = B * X + 3
    table_BX = rng.permutation(P)[: B * X].reshape(B, X).astype(np.int32)
    held_BX = np.arange(X) * Z < (start_B + T)[:, None]
    written_PZ = np.zeros((P, Z), bool)
    slots_BXZ = np.arange(X * Z).reshape(X, Z) < (start_B + T)[:, None, None]
    written_PZ[table_BX] = slots_BXZ
    table_BX[~held_BX] = P
    ancestors_BT2 = random_tree(rng, B, T) if tree else None

    @jax.jit
    def outputs(written_PZ, table_BX, start_B, ancestors_BT2):
        q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
        # Large queries make for outputs that a few values dominate, and that differ where these do.
        q_BTNH = (3 * jax.random.normal(q_key, (B, T, N, H))).astype(dtype)
        k_pool, v_pool = (jnp.where(written_PZ[:, None, :, None], jax.random.normal(key, (P, NKV, Z, H), dtype),
                                    jnp.nan) for key in (k_key, v_key))  # fmt: skip
        out_BTNH = paged_attention(q_BTNH, k_pool, v_pool, table_BX, start_B, ancestors_BT2=ancestors_BT2,
                                   implementation="mosaic_gpu")  # fmt: skip
        q_BTNH, k_pool, v_pool = (x.astype(jnp.float32) for x in (q_BTNH, k_pool, v_pool))
        with jax.default_matmul_precision("highest"):  # on a GPU float32 is TF32 otherwise
            expected_BTNH, size_BTNH = (paged_attention(q_BTNH, k_pool, v, table_BX, start_B, implementation="xla",
                                                        ancestors_BT2=ancestors_BT2) for v in (v_pool, abs(v_pool)))
        return out_BTNH, expected_BTNH, size_BTNH

    arrays = outputs(jnp.asarray(written_PZ), jnp.asarray(table_BX), jnp.asarray(start_B), ancestors_BT2)
    out_BTNH, expected_BTNH, size_BTNH = (np.asarray(x, np.float64) for x in arrays)

    def wrong(out_BTNH):
        return ~(abs(out_BTNH - expected_BTNH) <= float(jnp.finfo(dtype).eps) * size_BTNH + 1e-5)

    problems = []
    if wrong(out_BTNH).any():
        b, t, n, h = np.argwhere(wrong(out_BTNH))[0]
        problems.append(f"{wrong(out_BTNH).mean():.2%} of the outputs are wrong, the first at sequence {b}, token {t}, "
                        f"head {n}, channel {h}: {out_BTNH[b, t, n, h]:.4g} instead of {expected_BTNH[b, t, n, h]:.4g}")
    # In each head of each token that sees anything.
    controls = {"zeros": 0 * expected_BTNH, "shifted channels": np.roll(expected_BTNH, 1, 3)}
    if NKV > 1:
        controls["shifted kv heads"] = np.roll(expected_BTNH, N // NKV, 2)
    seen_BTN = size_BTNH.any(-1)
    return problems + [f"the check itself takes {name} for right" for name, control_BTNH in controls.items()
                       if not wrong(control_BTNH).any(-1)[seen_BTN].all()]


def random_tree(rng, B: int, T: int) -> jax.Array:
    """Ancestor bits of random trees, in which every node but the first has a parent before it."""
    mask_BTT = np.zeros((B, T, T), bool)
    for b in range(B):
        for t in range(T):
            if t:
                mask_BTT[b, t] = mask_BTT[b, rng.integers(t)]
            mask_BTT[b, t, t] = True
    return pack_ancestors(jnp.asarray(mask_BTT))


def check_verification(V: int, K: int, dtype: str) -> list[str]:
    """What is wrong with the kernel's draws, laws and decisions.

    They must be the reference's, but where the reference itself says that it was a tie within `TIE`.
    """
    rng, B, T, num_valid = np.random.default_rng(0), 10, K + 1, V - 3
    temperature_B = jnp.float32([1.0, 0.0, 0.7, 1.6, 1.0, 1.0, 0.8, 1.2, 0.0, 1.0])
    threshold_BT = jnp.full((B, T), -jnp.inf).at[2].set(1.0)
    key_BT2, draft_key_BT2 = jnp.asarray(rng.integers(-(2**31), 2**31, (2, B, T, 2)), jnp.int32)
    u_BK = jnp.asarray(rng.random((B, K)), jnp.float32).at[4].set(0)  # which accepts all
    count_B = jnp.asarray(rng.permutation(np.clip(np.arange(B) + K - 2, 1, K)), jnp.int32).at[4].set(K)

    def dense(law):
        """Probabilities as the reference computes them, and one at the first most likely token at temperature 0."""
        x_BTV = jnp.where(jnp.arange(V) < num_valid, law.logits_BTV, -jnp.inf)
        greedy_BTV = jax.nn.one_hot(x_BTV.argmax(-1), V)
        scale_B11 = jnp.where(temperature_B == 0, 1, temperature_B)[:, None, None]
        weight_BTV = jnp.exp((x_BTV - law.largest_BT[..., None]) / scale_B11) / law.total_BT[..., None]
        law_BTV = jnp.where(x_BTV >= law.threshold_BT[..., None], weight_BTV, 0)
        return jnp.where(temperature_B[:, None, None] == 0, greedy_BTV, law_BTV)

    def at(x_BTV, token_BT):
        return jnp.take_along_axis(x_BTV, token_BT[..., None], axis=-1)[..., 0]

    def wins(token_BT, weight_BTV, slack_BTV):
        """Whether no token's race can have been won by more than the slack of both."""
        noise_BTV = exponential(key_BT2[..., :1], key_BT2[..., 1:], jnp.arange(V, dtype=jnp.int32))
        lowest_BT = ((weight_BTV - slack_BTV) / noise_BTV).max(-1)
        return (at((weight_BTV + slack_BTV) / noise_BTV, token_BT) >= lowest_BT) & (at(weight_BTV, token_BT) > 0)

    @jax.jit
    def outputs():
        # Logits and drafts resemble each other, so that some drafts are accepted and some are not.
        logits_BTV, other_BTV = jax.random.normal(jax.random.key(0), (2, B, T, V))
        draft_BKV = (3 * logits_BTV + 1.2 * other_BTV)[:, :K].astype(dtype)
        logits_BTV = (3 * logits_BTV).astype(dtype)
        wide_BTV, wide_BKV = logits_BTV.astype(jnp.float32), draft_BKV.astype(jnp.float32)
        options = dict(num_valid=num_valid, implementation="xla")
        draft_BK, q = verify.draw(wide_BKV, temperature_B, threshold_BT[:, :K], draft_key_BT2[:, :K], **options)
        likeliest_BT, p = verify.draw(wide_BTV, temperature_B, threshold_BT, None, **options)
        accepted_B, _ = verify.reject(p, likeliest_BT, draft_BK, count_B, q, temperature_B, u_BK, key_BT2, **options)
        options |= dict(implementation="mosaic_gpu")
        likeliest = verify.draw(logits_BTV, temperature_B, threshold_BT, None, **options)[0] == likeliest_BT
        token_BT, law = verify.draw(logits_BTV, temperature_B, threshold_BT, key_BT2, **options)
        n_B, own_B = verify.reject(p._replace(logits_BTV=logits_BTV), likeliest_BT, draft_BK, count_B,
                                   q._replace(logits_BTV=draft_BKV), temperature_B, u_BK, key_BT2, **options)

        p_BTV, q_BKV = dense(p), dense(q)
        right_BT = wins(token_BT, p_BTV, TIE * p_BTV)
        shifted_BT = wins((token_BT + 1) % V, p_BTV, TIE * p_BTV)
        # The first place at which the numbers of accepted drafts can differ is the lower of the two.
        place_B1 = jnp.minimum(jnp.minimum(n_B, accepted_B), K - 1)[:, None]
        p_BK, uq_BK = at(p_BTV[:, :K], draft_BK), u_BK * at(q_BKV, draft_BK)
        tie_BK = abs(p_BK - uq_BK) <= TIE * (p_BK + uq_BK)
        counted_B = (n_B == accepted_B) | jnp.take_along_axis(tie_BK, place_B1, axis=1)[:, 0]
        drafted_BT = jnp.pad(jnp.arange(K) < count_B[:, None], ((0, 0), (0, 1)))[..., None]
        q_BTV = jnp.where(drafted_BT, jnp.pad(q_BKV, ((0, 0), (0, 1), (0, 0))), 0)
        left_BTV = jnp.maximum(p_BTV - q_BTV, 0)
        n_B1, greedy_BT = n_B[:, None], jnp.broadcast_to(temperature_B[:, None] == 0, (B, T))
        # At temperature 0 the most likely token is there, whatever is left.
        left_BTV = jnp.where(greedy_BT[..., None], p_BTV, left_BTV)

        def own(token_B):
            tokens_BT = jnp.broadcast_to(token_B[:, None], (B, T))
            return jnp.take_along_axis(wins(tokens_BT, left_BTV, TIE * p_BTV), n_B1, axis=1)[:, 0]

        same = {"largest logits": law.largest_BT == p.largest_BT,
                "sums of weights": abs(law.total_BT / p.total_BT - 1) <= TIE,
                "most likely tokens": likeliest, "drawn tokens": right_BT, "numbers of accepted drafts": counted_B,
                "tokens after the accepted drafts": own(own_B)}  # fmt: skip
        controls = {"shifted draws": shifted_BT, "shifted tokens after the accepted drafts": own((own_B + 1) % V)}
        return same, controls, n_B

    same, controls, n_B = jax.tree.map(np.asarray, outputs())
    problems = [f"{name}: {(~ok).sum()} of {ok.size} are wrong" for name, ok in same.items() if not ok.all()]
    problems += [f"the check itself takes {name} for right" for name, ok in controls.items() if ok.any()]
    if not (n_B < count_B).any() or not n_B.any():
        problems.append(f"the check has no drafts that are accepted, or none that are not: {n_B.tolist()}")
    return problems


# ---- Fast? ----


def seconds_per_call(step: Callable, carry, inputs: Sequence, sizes: Sizes, estimate: float,
                     fixed: tuple = ()) -> float:
    """Seconds of `carry = step(carry, input, *fixed)` on the device, median of several measurements.

    A compiled program runs the steps over all inputs, as often as makes about 2 ms of it, in a loop with a number of
    turns that XLA knows (it would ask the device for any other after each). The host starts it once and many times in
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
                # Behind the barrier an input is new each time: nothing that depends on it alone can leave the loop.
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
    return max(float(np.median(spent)), 1e-9) / (turns * len(inputs))  # a tiny difference may come out negative


def _measure(report: Report, sizes: Sizes, page_size: int, deadline: float) -> None:
    copy = jnp.ones(sizes.copy_bytes // 4, jnp.int32)
    report.copy_bytes_per_second = 2 * copy.nbytes / seconds_per_call(
        jax.jit(jnp.add), copy, [jnp.int32(1)], sizes, 2 * copy.nbytes / 2e12)
    del copy
    attention = _Attention(sizes, page_size)
    grid = [(1, FIXED_COST_CONTEXT, 1, False), *((B, context, *work) for B in sizes.batches
                                                 for context in sizes.contexts for work in sizes.works)]  # fmt: skip
    work = []
    for B, context, T, tree in grid:
        size = attention.bytes(B, context, T)
        goal = None if context < 8192 else 0.85 if B * sizes.heads[1] >= 64 else 0.7 if B == 1 else None
        row = Row("attention", f"B={B} context={context} T={T}{' tree' if tree else ''}", size,
                  _num_inputs(size, sizes)[1], goal)  # fmt: skip
        work.append((row, functools.partial(attention.measure, B=B, context=context, T=T, tree=tree)))
    for operation in ("draw", "reject"):
        for B in sizes.batches:
            for dtype in sizes.logit_dtypes:
                rows = B * (sizes.num_drafts + 1 if operation == "draw" else 2)
                size = rows * sizes.vocab_size * jnp.dtype(dtype).itemsize
                row = Row(operation, f"B={B} K={sizes.num_drafts} V={sizes.vocab_size} {dtype}", size,
                          _num_inputs(size, sizes)[1], 0.8)  # fmt: skip
                work.append((row, functools.partial(_measure_verification, operation=operation, B=B, dtype=dtype,
                                                    size=size, sizes=sizes)))
    report.rows = [row for row, _ in work]
    for implementation in ("mosaic_gpu", "xla", PEER):  # our own first: time may be short
        for row, measure in work:
            if implementation == PEER and (row.operation != "attention" or " T=1" not in row.case):
                continue
            if time.monotonic() > deadline:
                row.skipped[implementation] = "no time left (--budget_seconds)"
                continue
            try:
                row.seconds[implementation] = measure(implementation)
            except Exception as error:
                # What does not fit, and what is not ours, must not end the run; a kernel of ours that fails, fails it.
                reason = _in_short(error)
                row.skipped[implementation] = "out of memory" if "RESOURCE_EXHAUSTED" in reason else reason
                if implementation == "mosaic_gpu" and "RESOURCE_EXHAUSTED" not in reason:
                    report.failures.append(f"{row.operation}, {row.case}: {reason}")


def _in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _num_inputs(size: int, sizes: Sizes) -> tuple[int, bool]:
    """How many inputs of so many bytes to take turns with, and whether L2 still holds a part of them."""
    count = min(-(-2 * L2_BYTES // size), sizes.max_inputs)
    return count, count * size < 2 * L2_BYTES


class _Attention:
    """Measures attention on one pair of pools that holds the largest case."""

    def __init__(self, sizes: Sizes, page_size: int):
        self.sizes, self.Z = sizes, page_size
        _, NKV, H = sizes.heads
        shapes = [(B, context) for B in sizes.batches for context in (FIXED_COST_CONTEXT, *sizes.contexts)]
        P = max(B * -(-context // page_size) * _num_inputs(self.bytes(B, context, 1), sizes)[0]
                for B, context in shapes)  # fmt: skip

        @functools.partial(jax.jit, static_argnums=1)
        def pool(key, P):  # a few random pages again and again: random numbers for all would take more room
            pages = jax.random.normal(key, (min(P, 256), NKV, page_size, H), jnp.bfloat16)
            return pages[jnp.arange(P) % len(pages)]

        self.P, self.k_pool, self.v_pool = P, pool(jax.random.key(0), P), pool(jax.random.key(1), P)

    def bytes(self, B: int, context: int, T: int) -> int:
        """Keys and values, queries and outputs, each once."""
        N, NKV, H = self.sizes.heads
        return B * (context * NKV + T * N) * 2 * H * 2

    def measure(self, implementation: str, *, B: int, context: int, T: int, tree: bool) -> float:
        """Seconds of a call on sequences of `context` tokens, the new ones included; outputs are the next queries."""
        rng, (N, _, H), X = np.random.default_rng(0), self.sizes.heads, -(-context // self.Z)
        count = _num_inputs(self.bytes(B, context, T), self.sizes)[0]
        tables_IBX = rng.permutation(self.P)[: count * B * X].reshape(count, B, X).astype(np.int32)
        start_B, ancestors_BT2 = jnp.full(B, context - T, jnp.int32), random_tree(rng, B, T) if tree else None
        if implementation == PEER:
            call, pools = _peer(X), self.peer_pools
        else:
            pools = self.k_pool, self.v_pool

            def call(q_BTNH, table_BX, start_B, ancestors_BT2, k_pool, v_pool):
                return paged_attention(q_BTNH, k_pool, v_pool, table_BX, start_B, ancestors_BT2=ancestors_BT2,
                                       implementation=implementation)

        q_BTNH = jax.random.normal(jax.random.key(2), (B, T, N, H), jnp.bfloat16)
        estimate = 5e-6 + self.bytes(B, context, T) / 2e12
        return seconds_per_call(jax.jit(call), q_BTNH, [jnp.asarray(x) for x in tables_IBX], self.sizes, estimate,
                                (start_B, ancestors_BT2, *pools))

    @functools.cached_property
    def peer_pools(self):
        """Copies in the layout of JAX's own op, `[NKV, P, Z, H]`."""
        return tuple(pool.swapaxes(0, 1) for pool in (self.k_pool, self.v_pool))


def _peer(X: int) -> Callable:
    """JAX's own op for one token per sequence (Pallas for Triton, deprecated), called as `measure` calls ours.

    Raises:
      NotImplementedError: this JAX has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as own
    except ImportError:
        raise NotImplementedError("not in this JAX") from None
    splits = math.gcd(X, 16)

    def call(q_B1NH, table_BX, start_B, _, k_pool, v_pool):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return own(q_B1NH[:, 0], k_pool, v_pool, table_BX, start_B + 1, k_splits=splits,
                       pages_per_compute_block=math.gcd(X // splits, 8))[:, None]  # fmt: skip

    return call


def _measure_verification(implementation: str, *, operation: str, B: int, dtype: str, size: int,
                          sizes: Sizes) -> float:
    """Seconds of a call of `verify.draw` or `verify.reject` at temperature 1; the keys follow from the tokens before.

    Every input of `reject` has its own accepted drafts. That the target's laws are known is the work of `draw`.
    """
    K, V = sizes.num_drafts, sizes.vocab_size
    count = _num_inputs(size, sizes)[0]
    temperature_B, count_B = jnp.ones(B), jnp.full(B, K, jnp.int32)

    @jax.jit
    def make(key):
        p_key, q_key, u_key = jax.random.split(key, 3)
        logits_BTV = 3 * jax.random.normal(p_key, (B, K + 1, V))
        draft_BKV = (logits_BTV[:, :K] + 0.6 * jax.random.normal(q_key, (B, K, V))).astype(dtype)
        logits_BTV = logits_BTV.astype(dtype)
        if operation == "draw":
            return logits_BTV
        likeliest_BT, p = verify.draw(logits_BTV, temperature_B, None, None, implementation="xla")
        key_BK2 = jnp.arange(2 * B * K, dtype=jnp.int32).reshape(B, K, 2)
        draft_BK, q = verify.draw(draft_BKV, temperature_B, None, key_BK2, implementation="xla")
        return p, likeliest_BT, draft_BK, q, jax.random.uniform(u_key, (B, K))

    @jax.jit
    def call(key_BT2, item):
        if operation == "draw":
            token_BT, _ = verify.draw(item, temperature_B, None, key_BT2, implementation=implementation)
            return key_BT2 ^ token_BT[..., None]
        p, likeliest_BT, draft_BK, q, u_BK = item
        _, token_B = verify.reject(p, likeliest_BT, draft_BK, count_B, q, temperature_B, u_BK, key_BT2,
                                   implementation=implementation)
        return key_BT2 ^ token_B[:, None, None]

    items = [make(jax.random.key(i)) for i in range(count)]
    return seconds_per_call(call, jnp.zeros((B, K + 1, 2), jnp.int32), items, sizes, 5e-6 + size / 2e12)
