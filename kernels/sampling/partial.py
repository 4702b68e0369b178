"""Per-tile and per-shard partial results of a vocabulary pass, and how they are combined.

Parts are tiles of a kernel and shards of a mesh. Their arrays have the parts on the last axis, in
order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Finite: differences of logits must not turn into NaN.
MASKED, LARGEST = -1e30, 1e30


def finite(logits):
    """Returns logits as float32, infinite ones replaced by numbers beyond all others."""
    return jnp.minimum(jnp.maximum(logits.astype(jnp.float32), MASKED), LARGEST)


def inverse(temperature):
    """Returns 1 / temperature, finite for the smallest ones too; 1 for temperature 0."""
    return jnp.minimum(1.0 / jnp.where(temperature == 0.0, 1.0, temperature), 1e38)


def usable(largest):
    """Returns whether a token can be sampled from logits with this `SoftmaxStats.largest`.

    It cannot where a logit is NaN, or where none is above -inf.
    """
    return largest > MASKED


class SoftmaxStats(NamedTuple):
    """Statistics of one row of logits.

    Attributes:
      largest: the largest logit that may be sampled; NaN where one of them is NaN.
      total: sum of the weights exp((logit - largest) / temperature); None without temperature.
      best: the largest weight / noise where there is noise, else the largest logit.
      token: int32, the first token that has it.
    """

    largest: jax.Array
    total: jax.Array | None
    best: jax.Array
    token: jax.Array


class ResidualSample(NamedTuple):
    """A sample from the residual max(p - q, 0) of one row, and one from p itself.

    Attributes:
      mass: sum of the residual.
      best, token: the largest residual / noise, and its token.
      target_best, target_token: the largest p / noise, and its token.
    """

    mass: jax.Array
    best: jax.Array
    token: jax.Array
    target_best: jax.Array
    target_token: jax.Array


def join_stats(parts: SoftmaxStats, temperature_R: jax.Array | None, noise: bool) -> SoftmaxStats:
    """Returns statistics `[R]` of parts `[R, parts]`; weights become relative to the largest."""
    largest_R1 = parts.largest.max(axis=-1, keepdims=True)
    if temperature_R is None:
        best, token = _winner(parts.best, parts.token)
        return SoftmaxStats(largest_R1[:, 0], None, best, token)
    scale = jnp.exp((parts.largest - largest_R1) * inverse(temperature_R)[:, None])
    best = parts.best
    if noise:
        best = jnp.where(temperature_R[:, None] == 0, parts.best, parts.best * scale)
    total_R = (parts.total * scale).sum(axis=-1)
    return SoftmaxStats(largest_R1[:, 0], total_R, *_winner(best, parts.token))


def join_residuals(parts: ResidualSample) -> ResidualSample:
    """Returns residual samples `[B]` of parts `[B, parts]`."""
    best_of_rest = _winner(parts.best, parts.token)
    best_of_target = _winner(parts.target_best, parts.target_token)
    return ResidualSample(parts.mass.sum(axis=-1), *best_of_rest, *best_of_target)


def _winner(best, token):
    """Returns the first of the largest values and its token: parts are in order."""
    part_R1 = jnp.argmax(best, axis=-1, keepdims=True)
    return tuple(jnp.take_along_axis(x, part_R1, axis=-1)[:, 0] for x in (best, token))
