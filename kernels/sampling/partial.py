"""What one pass over a part of the vocabulary leaves of it, a few numbers per row, and how parts
become a whole.

Parts are tiles of a kernel and shards of a mesh. Their arrays have the parts on the last axis, in
order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED, LARGEST = -1e30, 1e30  # finite: differences of logits must not turn into NaN


def finite(logits):
    """Logits as float32, infinite ones replaced by numbers beyond all others."""
    return jnp.minimum(jnp.maximum(logits.astype(jnp.float32), MASKED), LARGEST)


def inverse(temperature):
    """1 / temperature, finite for the smallest of them too; 1 for 0, whose rows mean nothing where
    this is used."""
    return jnp.minimum(1.0 / jnp.where(temperature == 0.0, 1.0, temperature), 1e38)


def usable(largest):
    """Whether a token can be drawn from logits with this `SoftmaxStats.largest`: none was NaN, and one was
    above -inf."""
    return largest > MASKED


class SoftmaxStats(NamedTuple):
    """Of one row of logits.

    Attributes:
      largest: the largest logit that may be drawn; NaN where a logit that may be drawn is NaN.
      total: sum of the weights exp((logit - largest) / temperature); None without temperature.
      best: the largest value: of the race, weight / noise, where there is noise, and else of the
        logits.
      token: int32, the first token that has it.
    """

    largest: jax.Array
    total: jax.Array | None
    best: jax.Array
    token: jax.Array


class ResidualSample(NamedTuple):
    """Of the residual max(p - q, 0) of one row, and of p itself.

    Attributes:
      mass: sum of the residual.
      best, token: the winner of the residual's race, and its value.
      target_best, target_token: those of p.
    """

    mass: jax.Array
    best: jax.Array
    token: jax.Array
    target_best: jax.Array
    target_token: jax.Array


def join_stats(parts: SoftmaxStats, temperature_R: jax.Array | None, noise: bool) -> SoftmaxStats:
    """One scan `[R]` of scans `[R, S]`: weights are brought to the common largest logit."""
    largest_R1 = parts.largest.max(axis=-1, keepdims=True)
    if temperature_R is None:
        best, token = _winner(parts.best, parts.token)
        return SoftmaxStats(largest_R1[:, 0], None, best, token)
    scale_RS = jnp.exp((parts.largest - largest_R1) * inverse(temperature_R)[:, None])
    best_RS = (
        jnp.where(temperature_R[:, None] == 0, parts.best, parts.best * scale_RS)
        if noise
        else parts.best
    )
    return SoftmaxStats(
        largest_R1[:, 0], (parts.total * scale_RS).sum(axis=-1), *_winner(best_RS, parts.token)
    )


def join_residuals(parts: ResidualSample) -> ResidualSample:
    """One race `[B]` of races `[B, S]`."""
    return ResidualSample(
        parts.mass.sum(axis=-1),
        *_winner(parts.best, parts.token),
        *_winner(parts.target_best, parts.target_token),
    )


def _winner(best_RS, token_RS):
    """The first of the largest: parts are in order."""
    part_R1 = jnp.argmax(best_RS, axis=-1, keepdims=True)
    return tuple(jnp.take_along_axis(x, part_R1, axis=-1)[:, 0] for x in (best_RS, token_RS))
