"""The two passes over a vocabulary in plain jax.numpy: the reference, and the fallback."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.sampling.noise import exponential
from specjax.kernels.sampling.partial import MASKED, ResidualSample, SoftmaxStats, finite, inverse


def sample_pass(
    logits_RV, temperature_R, threshold_R, key_R2, first_token, num_valid: int
) -> SoftmaxStats:
    """Reads every row once.

    Args:
      logits_RV: float.
      temperature_R: float32, or None for 0 in all rows.
      threshold_R: float32, the smallest logit that may be sampled.
      key_R2: int32 keys of the noise; None for none, which finds the argmax.
      first_token: int32 scalar, id of the first column.
      num_valid: ids at or above it do not count.

    Returns:
      Softmax statistics `[R, tiles]`, here of one tile.
    """
    token_V = jnp.arange(logits_RV.shape[1], dtype=jnp.int32) + first_token
    x_RV = finite(logits_RV)
    # Not `>=`: NaN is kept, and so the largest logit is NaN where any is.
    kept_RV = ~(x_RV < threshold_R[:, None]) & (token_V < num_valid)
    x_RV = jnp.where(kept_RV, x_RV, MASKED)
    largest_R1 = x_RV.max(axis=-1, keepdims=True)
    total_R1, value_RV = None, x_RV
    if temperature_R is not None:
        weight_RV = jnp.exp((x_RV - largest_R1) * inverse(temperature_R)[:, None])
        weight_RV = jnp.where(kept_RV, weight_RV, 0)
        total_R1 = weight_RV.sum(axis=-1, keepdims=True)
        if key_R2 is not None:
            race_RV = weight_RV / exponential(key_R2[:, :1], key_R2[:, 1:], token_V)
            value_RV = jnp.where(temperature_R[:, None] == 0, x_RV, race_RV)
    return SoftmaxStats(largest_R1, total_R1, *_best(value_RV, token_V))


def residual_pass(
    target,
    draft_distributions,
    draft_B,
    sampled_B,
    row_B,
    subtract_B,
    temperature_B,
    key_B2,
    first_token,
    num_valid: int,
) -> ResidualSample:
    """Reads one row of the target and one of the drafter.

    Args:
      target: the target's distributions, see `api.Distribution`.
      draft_distributions: those of the M drafts; None where q is one-hot on the draft.
      draft_B: int32, the draft in question.
      sampled_B: bool, rows where q is not one-hot; None for all.
      row_B, subtract_B, temperature_B, key_B2: see `api.residual_pass`.
      first_token, num_valid: as for `sample_pass`.

    Returns:
      Residual samples `[B, tiles]`, here of one tile.
    """
    token_V = jnp.arange(target.logits_BTV.shape[2], dtype=jnp.int32) + first_token

    def dense(distribution):
        rows_B1 = jnp.minimum(row_B, distribution.logits_BTV.shape[1] - 1)[:, None]
        x_BV = jnp.take_along_axis(distribution.logits_BTV, rows_B1[..., None], axis=1)[:, 0]
        x_BV = finite(x_BV)
        threshold_B1, largest_B1, total_B1 = (
            jnp.take_along_axis(x_BT, rows_B1, axis=1) for x_BT in distribution[1:]
        )
        kept_BV = (x_BV >= threshold_B1) & (token_V < num_valid)
        weight_BV = jnp.exp((x_BV - largest_B1) * inverse(temperature_B)[:, None])
        return jnp.where(kept_BV, weight_BV / total_B1, 0)

    p_BV = dense(target)
    q_BV = (token_V == draft_B[:, None]).astype(jnp.float32)
    if draft_distributions is not None:
        stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *draft_distributions)
        sampled_BV = dense(stacked)
        q_BV = sampled_BV if sampled_B is None else jnp.where(sampled_B[:, None], sampled_BV, q_BV)
    rest_BV = jnp.maximum(p_BV - jnp.where(subtract_B[:, None], q_BV, 0), 0)
    noise_BV = exponential(key_B2[:, :1], key_B2[:, 1:], token_V)
    best_of_rest = _best(rest_BV / noise_BV, token_V)
    best_of_target = _best(p_BV / noise_BV, token_V)
    mass_B1 = rest_BV.sum(axis=-1, keepdims=True)
    return ResidualSample(mass_B1, *best_of_rest, *best_of_target)


def _best(value_RV, token_V):
    """Returns the largest value of each row, and the first token that has it.

    XLA's CPU compiler would compute the argument of `jnp.argmax` inside its loop, one number at a
    time: noise took four times as long.
    """
    # Computed once: if it were rounded differently a second time, no token would be the best.
    value_RV = jax.lax.optimization_barrier(value_RV)
    best_R1 = value_RV.max(axis=-1, keepdims=True)
    last = value_RV.shape[1] - 1
    index_RV = jnp.where(value_RV == best_R1, jnp.arange(last + 1), last)
    return best_R1, token_V[index_RV.min(axis=-1, keepdims=True)]
