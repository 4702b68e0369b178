"""Public functions: the passes over a vocabulary, their tiles and shards joined.

The two passes are in the implementations in this folder. Small computations, and the joining of
tiles and shards, are here, once for all implementations. Nothing here decides what is
accepted: see `specjax.verify`.

Bytes: `sample_pass` reads each row of logits once. `residual_pass` reads one row of the target and
one of the drafter per sequence, `probability` single logits. Nothing of the vocabulary's size is
written or sent between shards, only a few numbers per row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.kernels import dispatch
from specjax.kernels.sampling.partial import (
    MASKED,
    ResidualSample,
    SoftmaxStats,
    finite,
    inverse,
    join_residuals,
    join_stats,
)

NO_LIMIT = 2**31 - 1

# Of the mesh; the number of a shard counts its axes from the left.
AxisName = str | tuple[str, ...] | None


class Distribution(NamedTuple):
    """Distributions over tokens as logits with three numbers per row; probabilities are not stored.

    The probability of a token is exp((logit - largest) / temperature) / total where its logit
    reaches the threshold, else 0. Which ids are valid is not part of it.

    Attributes:
      logits_BTV: float32, bfloat16 or float16; with shards, this device's.
      threshold_BT: float32, the smallest logit that may be sampled.
      largest_BT: float32, the largest logit of the whole vocabulary that may be sampled, see
        `usable`.
      total_BT: float32, sum over the whole vocabulary of exp((logit - largest) / temperature), from
        the threshold on; None without temperature.
    """

    logits_BTV: jax.Array
    threshold_BT: jax.Array
    largest_BT: jax.Array
    total_BT: jax.Array | None


def sample_pass(
    logits_BTV: jax.Array,
    temperature_B: jax.Array | None,
    threshold_BT: jax.Array | None,
    key_BT2: jax.Array | None,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Distribution]:
    """Samples tokens from softmax(logits / temperature) over the logits that reach a threshold.

    The noise of token i under a key is a function of the key and i alone (`noise.exponential`):
    distributions sampled with the same key agree as often as their shapes allow, however the
    vocabulary is split.

    Args:
      logits_BTV: `[B, T, V]`, V the size of the shard where `axis_name` is given.
      temperature_B: float32; 0 takes the first token of the largest logit. None for 0 in all rows,
        which costs least.
      threshold_BT: float32; None lets every logit pass.
      key_BT2: int32, two words per token to sample; None takes the argmax at any temperature.
      num_valid: token ids at or above it are never sampled (static); None for no limit.
      axis_name: mesh axis, or axes, over which the vocabulary is split, inside `jax.shard_map`.
      implementation: see `dispatch.choose`.

    Returns:
      Tokens, int32 `[B, T]`, and the distributions.

    Raises:
      ValueError: for shapes that do not fit together, or an implementation that cannot run here.
    """
    B, T, V = logits_BTV.shape
    _check_shapes(
        temperature_B=(temperature_B, (B,)),
        threshold_BT=(threshold_BT, (B, T)),
        key_BT2=(key_BT2, (B, T, 2)),
    )
    if threshold_BT is None:
        threshold_BT = jnp.full((B, T), MASKED, jnp.float32)
    temperature_R = None if temperature_B is None else jnp.repeat(temperature_B, T)
    has_noise = temperature_B is not None and key_BT2 is not None
    parts = _implementation("sample_pass", implementation)(
        logits_BTV.reshape(B * T, V),
        temperature_R,
        threshold_BT.reshape(-1),
        key_BT2.reshape(-1, 2) if has_noise else None,
        _first_token(V, axis_name),
        _limit(num_valid),
    )
    stats = join_stats(parts, temperature_R, has_noise)
    if axis_name:
        stats = join_stats(_gather(stats, axis_name), temperature_R, has_noise)
    stats = jax.tree.map(lambda x_R: x_R.reshape(B, T), stats)
    return stats.token, Distribution(logits_BTV, threshold_BT, stats.largest, stats.total)


def residual_pass(
    target: Distribution,
    draft_BM: jax.Array,
    draft_distributions: tuple[Distribution, ...] | None,
    sampled_B: jax.Array | None,
    row_B: jax.Array,
    subtract_B: jax.Array,
    temperature_B: jax.Array,
    key_B2: jax.Array,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> ResidualSample:
    """Samples from the residual max(p - q, 0) of one row of each sequence, and from p itself.

    Args:
      target: the target's distributions p, T of them per sequence.
      draft_BM: int32 drafts.
      draft_distributions: the M distributions q that the drafts were sampled from, without the
        axis T: `[B, V]` and `[B]`; None where no draft was sampled. q is then one-hot on the draft.
      sampled_B: bool, rows whose drafts were sampled; q is one-hot in the others. None for all.
      row_B: int32, which of the T distributions; the drafter's is the same one, or the last.
      subtract_B: bool, whether q is subtracted at all.
      temperature_B: float32; rows of temperature 0 are undefined.
      key_B2: int32 keys of the noise.
      num_valid, axis_name, implementation: as for `sample_pass`.

    Returns:
      The samples and the mass of the residual, `[B]` each.

    Raises:
      ValueError: for shapes that do not fit together, or an implementation that cannot run here.
    """
    B, _, V = target.logits_BTV.shape
    M = draft_BM.shape[1]
    _check_shapes(temperature_B=(temperature_B, (B,)), key_B2=(key_B2, (B, 2)))
    for m, q in enumerate(draft_distributions or ()):
        _check_shapes(**{f"draft_distributions[{m}]": (q.logits_BTV, (B, V))})
    if draft_distributions is not None and len(draft_distributions) != M:
        raise ValueError(f"expected {M} draft distributions, got {len(draft_distributions)}")
    last_B = jnp.minimum(row_B, M - 1)
    parts = _implementation("residual_pass", implementation)(
        target,
        draft_distributions,
        jnp.take_along_axis(draft_BM, last_B[:, None], axis=1)[:, 0],
        sampled_B,
        row_B,
        subtract_B,
        temperature_B,
        key_B2,
        _first_token(V, axis_name),
        _limit(num_valid),
    )
    sample = join_residuals(parts)
    if axis_name:
        sample = join_residuals(_gather(sample, axis_name))
    return sample


def probability(
    distribution: Distribution,
    token_BT: jax.Array,
    temperature_B: jax.Array,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Returns the probability of one token under each distribution, float32 `[B, T]`.

    It is 0 for an id that cannot be sampled, and undefined for rows of temperature 0. Arguments as
    for `sample_pass`.
    """
    x_BT, is_here_BT = _logit(distribution, token_BT, num_valid, axis_name)
    weight_BT = jnp.exp((x_BT - distribution.largest_BT) * inverse(temperature_B)[:, None])
    is_kept_BT = is_here_BT & (x_BT >= distribution.threshold_BT)
    probability_BT = jnp.where(is_kept_BT, weight_BT / distribution.total_BT, 0)
    return jax.lax.psum(probability_BT, axis_name) if axis_name else probability_BT


def logit(
    distribution: Distribution,
    token_BT: jax.Array,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Returns the logit of one token under each distribution, `finite` and float32 `[B, T]`.

    It is undefined for an id that is not valid. Arguments as for `probability`.
    """
    x_BT, is_here_BT = _logit(distribution, token_BT, num_valid, axis_name)
    return jax.lax.psum(jnp.where(is_here_BT, x_BT, 0), axis_name) if axis_name else x_BT


def _logit(distribution: Distribution, token_BT, num_valid: int | None, axis_name: AxisName):
    """Returns the logit of a token under each distribution, and whether it is in this shard."""
    _check_shapes(token_BT=(token_BT, distribution.threshold_BT.shape))
    V = distribution.logits_BTV.shape[2]
    index_BT = token_BT - _first_token(V, axis_name)
    is_here_BT = (index_BT >= 0) & (index_BT < V) & (token_BT < _limit(num_valid))
    index_BT1 = jnp.clip(index_BT, 0, V - 1)[..., None]
    x_BT = finite(jnp.take_along_axis(distribution.logits_BTV, index_BT1, axis=-1)[..., 0])
    return x_BT, is_here_BT


def _check_shapes(**arrays) -> None:
    for name, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has the shape {array.shape}, expected {shape}")


def _implementation(name: str, implementation: str | None):
    return dispatch.function(__package__, name, dispatch.choose(implementation))


def _limit(num_valid: int | None) -> int:
    return NO_LIMIT if num_valid is None else num_valid


def _first_token(V: int, axis_name: AxisName):
    return jax.lax.axis_index(axis_name) * V if axis_name else jnp.int32(0)


def _gather(parts: SoftmaxStats | ResidualSample, axis_name: AxisName):
    """Returns the numbers of all shards, on a last axis, in one exchange."""
    leaves, treedef = jax.tree.flatten(parts)
    words = jnp.stack([jax.lax.bitcast_convert_type(x_R, jnp.int32) for x_R in leaves], axis=1)
    gathered = jax.lax.all_gather(words, axis_name, axis=1)
    arrays = []
    for i, x_R in enumerate(leaves):
        arrays.append(jax.lax.bitcast_convert_type(gathered[..., i], x_R.dtype))
    return treedef.unflatten(arrays)
