"""The two passes over a vocabulary in plain jax.numpy: the reference, and what runs where no kernel
of ours can."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels.sampling.noise import exponential
from specjax.kernels.sampling.partial import MASKED, ResidualSample, SoftmaxStats, finite, inverse


def scan(
    logits_RV, temperature_R, threshold_R, key_R2, first_token, num_valid: int
) -> SoftmaxStats:
    """Reads every row once.

    Args:
      logits_RV: float.
      temperature_R: float32, or None for 0 in all rows.
      threshold_R: float32, the least logit that may be drawn.
      key_R2: int32 keys of the noise; None for none, which finds the most likely token.
      first_token: int32 scalar, id of the first column.
      num_valid: ids at or above it do not count.

    Returns:
      A scan `[R, S]` of S parts, here one.
    """
    token_V = jnp.arange(logits_RV.shape[1], dtype=jnp.int32) + first_token
    x_RV = finite(logits_RV)
    # Not `>=`: NaN is kept, so that the largest says that there was one.
    kept_RV = ~(x_RV < threshold_R[:, None]) & (token_V < num_valid)
    x_RV = jnp.where(kept_RV, x_RV, MASKED)
    largest_R1 = x_RV.max(axis=-1, keepdims=True)
    total_R1, value_RV = None, x_RV
    if temperature_R is not None:
        weight_RV = jnp.where(
            kept_RV, jnp.exp((x_RV - largest_R1) * inverse(temperature_R)[:, None]), 0
        )
        total_R1 = weight_RV.sum(axis=-1, keepdims=True)
        if key_R2 is not None:
            race_RV = weight_RV / exponential(key_R2[:, :1], key_R2[:, 1:], token_V)
            value_RV = jnp.where(temperature_R[:, None] == 0, x_RV, race_RV)
    return SoftmaxStats(largest_R1, total_R1, *_best(value_RV, token_V))


def residual(
    p, q, row_B, subtract_B, temperature_B, key_B2, first_token, num_valid: int
) -> ResidualSample:
    """Reads one row of the target and one of the draft.

    Args:
      p: the target's distributions, see `api.Distribution`.
      q: the distributions of the K drafts, or where they have none the guess in question, int32 `[B]`.
      row_B: int32, which of the T distributions; the draft's is the same one, or the last.
      subtract_B: bool, whether there is anything to subtract.
      temperature_B, key_B2, first_token, num_valid: as for `scan`. Rows of temperature 0 mean
        nothing.

    Returns:
      A race `[B, S]` of S parts, here one.
    """
    token_V = jnp.arange(p.logits_BTV.shape[2], dtype=jnp.int32) + first_token

    def dense(distribution):
        rows_B1 = jnp.minimum(row_B, distribution.logits_BTV.shape[1] - 1)[:, None]
        threshold_B1, largest_B1, total_B1 = (
            jnp.take_along_axis(x_BT, rows_B1, axis=1) for x_BT in distribution[1:]
        )
        x_BV = finite(
            jnp.take_along_axis(distribution.logits_BTV, rows_B1[..., None], axis=1)[:, 0]
        )
        kept_BV = (x_BV >= threshold_B1) & (token_V < num_valid)
        return jnp.where(
            kept_BV, jnp.exp((x_BV - largest_B1) * inverse(temperature_B)[:, None]) / total_B1, 0
        )

    p_BV = dense(p)
    if isinstance(q, tuple):
        q_BV = dense(jax.tree.map(lambda *x: jnp.stack(x, axis=1), *q))
    else:
        q_BV = (token_V == q[:, None]).astype(jnp.float32)
    rest_BV = jnp.maximum(p_BV - jnp.where(subtract_B[:, None], q_BV, 0), 0)
    noise_BV = exponential(key_B2[:, :1], key_B2[:, 1:], token_V)
    races = [*_best(rest_BV / noise_BV, token_V), *_best(p_BV / noise_BV, token_V)]
    return ResidualSample(rest_BV.sum(axis=-1, keepdims=True), *races)


def _best(value_RV, token_V):
    """The largest value of each row, and the first token that has it.

    XLA's CPU compiler would work out what `jnp.argmax` reads inside its loop, one number at a time:
    noise took four times as long.
    """
    value_RV = jax.lax.optimization_barrier(
        value_RV
    )  # worked out once: rounded otherwise, no token would be the best
    best_R1 = value_RV.max(axis=-1, keepdims=True)
    last = value_RV.shape[1] - 1
    index_R1 = jnp.where(value_RV == best_R1, jnp.arange(last + 1), last).min(
        axis=-1, keepdims=True
    )
    return best_R1, token_V[index_R1]
