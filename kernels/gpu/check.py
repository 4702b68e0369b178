"""Checks the kernels against the `xla` implementation in float32, on the same inputs.

Every check also shows that it would find zeros, shifted outputs and the like wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.paged_attention import pack_ancestors, paged_attention
from specjax.kernels.sampling import Distribution, residual_pass, sample_pass
from specjax.kernels.sampling.noise import exponential

# Relative distance below which two results of float32 arithmetic may fall either way: exp of an
# argument of up to 80 that is off by half a unit in the last place is off by 5e-6, and there are
# two of them.
TIE = 1e-5
# Kinds of drafts of `check_residual`: q is a distribution, one-hot, or one-hot in some rows.
DRAFTS = ("sampled", "one-hot", "mixed")


def check_attention(
    starts: Sequence[int],
    T: int,
    is_tree: bool,
    dtype: str,
    heads: tuple[int, int, int],
    page_size: int,
    implementation: str = "mosaic_gpu",
) -> list[str]:
    """Returns descriptions of errors in the outputs of attention.

    Unwritten positions and pages are NaN. Two roundings to the dtype are allowed, of the weights
    and of the output, each to the nearest: together one unit in the last place of the same
    attention over the magnitudes of the values. 1e-5 is for sums in float32.
    """
    N, K, _ = heads
    eps = float(jnp.finfo(dtype).eps)
    arrays = _attention_outputs(starts, T, is_tree, dtype, heads, page_size, implementation)
    out_BTNH, expected_BTNH, size_BTNH = (np.asarray(x, np.float64) for x in arrays)

    def wrong(out_BTNH):
        return ~(abs(out_BTNH - expected_BTNH) <= eps * size_BTNH + 1e-5)

    problems = []
    wrong_BTNH = wrong(out_BTNH)
    if wrong_BTNH.any():
        b, t, n, h = index = tuple(np.argwhere(wrong_BTNH)[0])
        problems.append(
            f"{wrong_BTNH.mean():.2%} of the outputs are wrong, the first at sequence {b}, "
            f"token {t}, head {n}, channel {h}: got {out_BTNH[index]:.4g}, "
            f"expected {expected_BTNH[index]:.4g}"
        )
    controls = {"zeros": 0 * expected_BTNH, "shifted channels": np.roll(expected_BTNH, 1, 3)}
    if K > 1:
        controls["shifted kv heads"] = np.roll(expected_BTNH, N // K, 2)
    # A control must be wrong in each head of each token that attends to anything.
    attends_BTN = size_BTNH.any(-1)
    for name, control_BTNH in controls.items():
        if not wrong(control_BTNH).any(-1)[attends_BTN].all():
            problems.append(f"the check itself accepts {name}")
    return problems


def _attention_outputs(starts, T, is_tree, dtype, heads, page_size, implementation):
    """Returns outputs, expected outputs, and attention over the values' magnitudes."""
    rng = np.random.default_rng(0)
    B, (N, K, H), Z = len(starts), heads, page_size
    start_B = np.array(starts, np.int32)
    written_PZ, table_BX = _scattered_pages(rng, start_B + T, Z)
    P = len(written_PZ)
    ancestors_BT2 = random_tree(rng, B, T) if is_tree else None

    @jax.jit
    def outputs(written_PZ, table_BX, start_B, ancestors_BT2):
        q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
        # Large queries make a few values dominate each output, and outputs differ where these do.
        q_BTNH = (3 * jax.random.normal(q_key, (B, T, N, H))).astype(dtype)
        is_written = written_PZ[:, None, :, None]

        def pool(key):
            return jnp.where(is_written, jax.random.normal(key, (P, K, Z, H), dtype), jnp.nan)

        attention = functools.partial(
            paged_attention,
            block_table_BX=table_BX,
            start_B=start_B,
            ancestors_BT2=ancestors_BT2,
        )
        k_pool, v_pool = pool(k_key), pool(v_key)
        out_BTNH = attention(q_BTNH, k_pool, v_pool, implementation=implementation)
        q_BTNH, k_pool, v_pool = (x.astype(jnp.float32) for x in (q_BTNH, k_pool, v_pool))
        with jax.default_matmul_precision("highest"):  # on a GPU float32 is TF32 otherwise
            expected_BTNH = attention(q_BTNH, k_pool, v_pool, implementation="xla")
            size_BTNH = attention(q_BTNH, k_pool, abs(v_pool), implementation="xla")
        return out_BTNH, expected_BTNH, size_BTNH

    arrays = (jnp.asarray(x) for x in (written_PZ, table_BX, start_B))
    return outputs(*arrays, ancestors_BT2)


def _scattered_pages(rng, length_B, Z: int):
    """Returns which positions of a pool's pages are written, and a block table of random pages."""
    B, X = len(length_B), -(-int(length_B.max()) // Z)
    P = B * X + 3
    table_BX = rng.permutation(P)[: B * X].reshape(B, X).astype(np.int32)
    written_BXZ = np.arange(X * Z).reshape(X, Z) < length_B[:, None, None]
    written_PZ = np.zeros((P, Z), bool)
    written_PZ[table_BX] = written_BXZ
    table_BX[~written_BXZ.any(-1)] = P
    return written_PZ, table_BX


def random_tree(rng, B: int, T: int) -> jax.Array:
    """Returns ancestor bits of random trees: every node but the first has a parent before it."""
    mask_BTT = np.zeros((B, T, T), bool)
    for t in range(T):
        mask_BTT[:, t] = mask_BTT[np.arange(B), rng.integers(max(t, 1), size=B)]
        mask_BTT[:, t, t] = True
    return pack_ancestors(jnp.asarray(mask_BTT))


class _Inputs(NamedTuple):
    """Logits of a target and of a drafter that resembles it, and the sampling parameters."""

    logits_BTV: jax.Array
    draft_logits_BMV: jax.Array
    temperature_B: jax.Array
    threshold_BT: jax.Array
    key_BT2: jax.Array
    draft_key_BM2: jax.Array


def _inputs(V: int, M: int, dtype: str) -> _Inputs:
    rng, B, T = np.random.default_rng(0), 10, M + 1
    # Two rows are greedy, and one has a threshold.
    temperature_B = jnp.float32([1.0, 0.0, 0.7, 1.6, 1.0, 1.0, 0.8, 1.2, 0.0, 1.0])
    threshold_BT = jnp.full((B, T), -jnp.inf).at[2].set(1.0)
    key_BT2, draft_key_BT2 = jnp.asarray(rng.integers(-(2**31), 2**31, (2, B, T, 2)), jnp.int32)
    logits_BTV, other_BTV = jax.random.normal(jax.random.key(0), (2, B, T, V))
    draft_logits_BMV = (3 * logits_BTV + 1.2 * other_BTV)[:, :M]
    return _Inputs(
        (3 * logits_BTV).astype(dtype),
        draft_logits_BMV.astype(dtype),
        temperature_B,
        threshold_BT,
        key_BT2,
        draft_key_BT2[:, :M],
    )


def check_sampling(
    V: int, dtype: str, with_noise: bool = True, implementation: str = "mosaic_gpu"
) -> list[str]:
    """Returns descriptions of errors in the tokens and distributions of `sample_pass`.

    They must be the reference's, except for ties within `TIE`. Without noise every token is the
    argmax.
    """
    inputs, num_valid = _inputs(V, 3, dtype), V - 3

    @jax.jit
    def outputs(inputs: _Inputs):
        def sample(logits_BTV, key_BT2, implementation):
            return sample_pass(
                logits_BTV,
                inputs.temperature_B,
                inputs.threshold_BT,
                key_BT2,
                num_valid=num_valid,
                implementation=implementation,
            )

        logits_BTV = inputs.logits_BTV
        key_BT2 = inputs.key_BT2 if with_noise else None
        token_BT, got = sample(logits_BTV, key_BT2, implementation)
        argmax_BT, expected = sample(logits_BTV.astype(jnp.float32), None, "xla")
        p_BTV = _dense(expected, inputs.temperature_B, num_valid)

        def is_right(token_BT):
            if not with_noise:
                return token_BT == argmax_BT
            return _wins(token_BT, p_BTV, TIE * p_BTV, inputs.key_BT2)

        right = {
            "largest logits": got.largest_BT == expected.largest_BT,
            "sums of weights": abs(got.total_BT / expected.total_BT - 1) <= TIE,
            "sampled tokens": is_right(token_BT),
        }
        controls = {"shifted tokens": is_right((token_BT + 1) % V)}
        return right, controls

    return _problems(*outputs(inputs))


def check_residual(
    V: int, M: int, drafts: str, dtype: str, implementation: str = "mosaic_gpu"
) -> list[str]:
    """Returns descriptions of errors in the samples of `residual_pass`.

    They must be the reference's, except for ties within `TIE`. `drafts` is one of `DRAFTS`.
    """
    inputs, num_valid = _inputs(V, M, dtype), V - 3
    B = len(inputs.temperature_B)
    # All rows of the target, in the order 0, 1, ..., M; after the last draft nothing is subtracted.
    row_B = jnp.arange(B, dtype=jnp.int32) % (M + 1)
    subtract_B = row_B < M
    is_sampled_B = {
        "sampled": jnp.ones(B, bool),
        "one-hot": jnp.zeros(B, bool),
        "mixed": jnp.arange(B) // 3 % 2 == 0,
    }[drafts]

    @jax.jit
    def outputs(inputs: _Inputs):
        temperature_B, key_B2 = inputs.temperature_B, inputs.key_BT2[:, 0]
        _, p = _reference(inputs.logits_BTV, inputs.threshold_BT, None, inputs, num_valid)
        draft_BM, q = _reference(
            inputs.draft_logits_BMV,
            inputs.threshold_BT[:, :M],
            inputs.draft_key_BM2,
            inputs,
            num_valid,
        )
        distributions = apart(q._replace(logits_BTV=inputs.draft_logits_BMV))
        got = residual_pass(
            p._replace(logits_BTV=inputs.logits_BTV),
            draft_BM,
            None if drafts == "one-hot" else distributions,
            is_sampled_B if drafts == "mixed" else None,
            row_B,
            subtract_B,
            temperature_B,
            key_B2,
            num_valid=num_valid,
            implementation=implementation,
        )
        p_BV = _row(_dense(p, temperature_B, num_valid), row_B)
        last_B = jnp.minimum(row_B, M - 1)
        sampled_BV = _row(_dense(q, temperature_B, num_valid), last_B)
        one_hot_BV = jax.nn.one_hot(_row(draft_BM, last_B), V)

        def residual(is_sampled_B, subtract_B):
            q_BV = jnp.where(is_sampled_B[:, None], sampled_BV, one_hot_BV)
            return jnp.maximum(p_BV - jnp.where(subtract_B[:, None], q_BV, 0), 0)

        rest_BV = residual(is_sampled_B, subtract_B)
        is_defined_B = temperature_B > 0
        is_subtracted_B = is_defined_B & subtract_B

        def is_mass(mass_B):  # p and q are off by TIE of themselves each, and add up to 1
            return abs(mass_B - rest_BV.sum(-1)) <= 2 * TIE

        def is_token(token_B, weight_BV):
            return _wins(token_B, weight_BV, TIE * p_BV, key_B2)

        right = {
            "masses": is_mass(got.mass),
            "tokens of the residual": is_token(got.token, rest_BV),
            "tokens of the target": is_token(got.target_token, p_BV),
        }
        right = {name: ok_B | ~is_defined_B for name, ok_B in right.items()}
        controls = {
            "masses without subtraction": is_mass(p_BV.sum(-1)) & is_subtracted_B,
            "masses with the other kind of q": is_mass(residual(~is_sampled_B, subtract_B).sum(-1))
            & is_subtracted_B,
            "shifted tokens of the residual": is_token((got.token + 1) % V, rest_BV) & is_defined_B,
            "shifted tokens of the target": is_token((got.target_token + 1) % V, p_BV)
            & is_defined_B,
        }
        return right, controls

    return _problems(*outputs(inputs))


def _reference(logits_BTV, threshold_BT, key_BT2, inputs: _Inputs, num_valid: int):
    return sample_pass(
        logits_BTV.astype(jnp.float32),
        inputs.temperature_B,
        threshold_BT,
        key_BT2,
        num_valid=num_valid,
        implementation="xla",
    )


def _dense(distribution: Distribution, temperature_B, num_valid: int):
    """Returns probabilities as the reference computes them; one-hot at temperature 0."""
    V = distribution.logits_BTV.shape[-1]
    is_greedy_B11 = temperature_B[:, None, None] == 0
    x_BTV = jnp.where(jnp.arange(V) < num_valid, distribution.logits_BTV, -jnp.inf)
    scale_B11 = jnp.where(is_greedy_B11, 1, temperature_B[:, None, None])
    weight_BTV = jnp.exp((x_BTV - distribution.largest_BT[..., None]) / scale_B11)
    is_kept_BTV = x_BTV >= distribution.threshold_BT[..., None]
    probs_BTV = jnp.where(is_kept_BTV, weight_BTV / distribution.total_BT[..., None], 0)
    return jnp.where(is_greedy_B11, jax.nn.one_hot(x_BTV.argmax(-1), V), probs_BTV)


def _row(x, row_B):
    """Returns one entry per sequence along the second axis."""
    return x[jnp.arange(len(row_B)), row_B]


def _wins(token, weight, slack, key):
    """Returns whether no other token's weight / noise is larger by more than the slack of both.

    Args:
      token: int32 `[...]`.
      weight, slack: `[..., V]`.
      key: int32 `[..., 2]`.
    """

    def of_token(x):
        return jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]

    ids_V = jnp.arange(weight.shape[-1], dtype=jnp.int32)
    noise = exponential(key[..., :1], key[..., 1:], ids_V)
    lowest = ((weight - slack) / noise).max(-1)
    is_largest = of_token((weight + slack) / noise) >= lowest
    return is_largest & (of_token(weight) > 0)


def _problems(right: dict, controls: dict) -> list[str]:
    """Returns descriptions of errors, and of controls that pass the check."""
    problems = []
    for name, ok in right.items():
        wrong = ~np.asarray(ok)
        if wrong.any():
            problems.append(f"{name}: {wrong.sum()} of {wrong.size} are wrong")
    for name, ok in controls.items():
        if np.asarray(ok).any():
            problems.append(f"the check itself accepts {name}")
    return problems


def apart(distribution: Distribution) -> tuple[Distribution, ...]:
    """Returns the distributions along the axis T one by one, as `residual_pass` takes drafts."""
    parts = []
    for t in range(distribution.logits_BTV.shape[1]):
        parts.append(jax.tree.map(lambda x, t=t: x[:, t], distribution))
    return tuple(parts)
