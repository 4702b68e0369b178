"""From logits to a distribution, and from a distribution to a token: the one place for temperature, filters and
randomness.

Drafts, verified tokens and bonus tokens all go through `draw`, so a filter can never hold for one
and not for another. Every random number comes from a key made of (sequence seed, absolute position,
stream), so a sequence's text depends neither on its neighbours or its row in the batch nor on how
the loop is cut into calls.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct

from specjax.kernels import sampling as passes
from specjax.kernels.sampling import AxisName, Distribution
from specjax.kernels.sampling.partial import finite, inverse


class Stream(enum.IntEnum):
    """Purposes of random numbers. Those that must be independent have different streams."""

    TARGET = (
        0  # tokens of the target: plain, correction and bonus; `coupled` drafts share it on purpose
    )
    DRAFT = 1  # tokens of the drafter under `rejection`
    ACCEPT = 2  # acceptance uniforms under `rejection`


@struct.dataclass
class SamplingArrays:
    """How each sequence is sampled.

    A field that is None is off in all rows, and what it would need is not even compiled.

    Attributes:
      seed_B: uint32.
      temperature_B: float32, at least 0; 0 is greedy: the first most likely token. None: all rows
        are.
      top_k_B: int32; only tokens at least as likely as the k-th may come; 0 is off.
      top_p_B: float32 in (0, 1]; the fewest most likely tokens with at least this mass (after
        top-k); 1 is off.
      min_p_B: float32 in [0, 1]; only tokens with at least this share of the largest probability; 0
        is off.
    """

    seed_B: jax.Array
    temperature_B: jax.Array | None = None
    top_k_B: jax.Array | None = None
    top_p_B: jax.Array | None = None
    min_p_B: jax.Array | None = None


def params(seed_B, temperature_B, top_k_B, top_p_B, min_p_B) -> SamplingArrays:
    """The same from arrays for all fields, on the host: None for what is off in all rows."""
    fields = dict(
        temperature_B=(temperature_B, 0),
        top_k_B=(top_k_B, 0),
        top_p_B=(top_p_B, 1),
        min_p_B=(min_p_B, 0),
    )
    return SamplingArrays(
        seed_B, **{name: x_B for name, (x_B, off) in fields.items() if (x_B != off).any()}
    )


def draw(
    logits_BTV: jax.Array,
    sampling: SamplingArrays,
    position_BT: jax.Array | None,
    stream: Stream | None,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Distribution]:
    """Draws a token from the distribution of each row of logits: temperature first, then top-k, top-p and
      min-p.

    The noise is a function of (seed, position, stream) alone, so two distributions drawn with the same three
    agree as often as their shapes let them. A token of probability 0 is never drawn.

    Args:
      logits_BTV: `[B, T, V]`.
      sampling: see `SamplingArrays`.
      position_BT: int32 absolute position of each token to be drawn.
      stream: purpose of the draw; None for the most likely token instead.
      num_valid: token ids at or above it have probability 0 (static); None for none.
      axis_name: mesh axis, or axes, over which the vocabulary is split, inside `jax.shard_map`; V
        is then a shard's.
      implementation: of the pass over the vocabulary, see `kernels.dispatch.choose` (static).

    Returns:
      int32 `[B, T]`, and the distributions.
    """
    key_BT2 = None if stream is None else keys(sampling, position_BT, stream)
    threshold_BT = thresholds(logits_BTV, sampling, num_valid, axis_name)
    return passes.draw(
        logits_BTV,
        sampling.temperature_B,
        threshold_BT,
        key_BT2,
        num_valid=num_valid,
        axis_name=axis_name,
        implementation=implementation,
    )


def thresholds(
    logits_BTV: jax.Array,
    sampling: SamplingArrays,
    num_valid: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array | None:
    """Least logit that passes all filters, float32 `[B, T]`; None where there are no filters.

    Every filter keeps the tokens whose logit reaches a threshold, so tokens that tie are kept or
    dropped together. It
    is compared with logits as they came: a scaled one may be rounded differently each time that the
      compiler computes
    it, and would then not reach itself. Of a shard, only counts and masses leave it. Arguments as
    for `draw`.
    """
    if sampling.temperature_B is None or (sampling.top_k_B, sampling.top_p_B, sampling.min_p_B) == (
        None,
        None,
        None,
    ):
        return None
    V = logits_BTV.shape[-1]
    num_shards, shard = (
        (jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)) if axis_name else (1, 0)
    )
    logits_BTV = finite(logits_BTV)
    if num_valid is not None:
        logits_BTV = jnp.where(jnp.arange(V) + shard * V < num_valid, logits_BTV, -jnp.inf)
    largest_BT = logits_BTV.max(axis=-1)
    if axis_name:
        largest_BT = jax.lax.pmax(largest_BT, axis_name)
    order_BTV = _order(logits_BTV)
    threshold_BT = jnp.broadcast_to(_order(jnp.float32(-jnp.inf)), logits_BTV.shape[:2])
    if sampling.top_k_B is not None:
        k_B1 = jnp.where(
            sampling.top_k_B > 0, jnp.minimum(sampling.top_k_B, num_shards * V), num_shards * V
        )[:, None]
        threshold_BT = _largest_threshold(order_BTV, jnp.ones_like(order_BTV), k_B1, axis_name)
    if sampling.top_p_B is not None:
        scale_B11 = inverse(sampling.temperature_B)[:, None, None]
        weight_BTV = jnp.exp((logits_BTV - largest_BT[..., None]) * scale_B11)
        weight_BTV = jnp.where(order_BTV >= threshold_BT[..., None], weight_BTV, 0)
        # The most likely token always passes, even where p times the mass underflows.
        mass_BT = _sum(weight_BTV, axis_name)
        enough_BT = jnp.maximum(sampling.top_p_B[:, None] * mass_BT, 1e-37)
        nucleus_BT = _largest_threshold(order_BTV, weight_BTV, enough_BT, axis_name)
        threshold_BT = jnp.where(
            sampling.top_p_B[:, None] < 1, jnp.maximum(threshold_BT, nucleus_BT), threshold_BT
        )
    threshold_BT = _from_order(threshold_BT)
    if sampling.min_p_B is not None:
        min_p_B1 = sampling.min_p_B[:, None]
        floor_BT = largest_BT + sampling.temperature_B[:, None] * jnp.log(
            jnp.maximum(min_p_B1, 1e-30)
        )
        threshold_BT = jnp.maximum(threshold_BT, jnp.where(min_p_B1 > 0, floor_BT, -jnp.inf))
    return threshold_BT


def _largest_threshold(order_BTV, weight_BTV, enough_BT, axis_name: AxisName):
    """The largest t such that the tokens of order t and above weigh enough: exact, by search over
    the digits of t.

    Nothing is sorted. Every pass reads the vocabulary once, and finds one digit.
    """

    def search(digit_bits: int, unroll: bool):
        digits = jnp.arange(1, 1 << digit_bits)

        def find_digit(i, t_BT):
            shift = 32 - digit_bits * (i + 1)
            tries_BTY = t_BT[..., None] + (digits << shift)
            reach = order_BTV[:, :, None] >= tries_BTY[..., None]
            weight_BTY = _sum(jnp.where(reach, weight_BTV[:, :, None], 0), axis_name)
            return t_BT + ((weight_BTY >= enough_BT[..., None]).sum(axis=-1) << shift)

        lowest_BT = jnp.full(order_BTV.shape[:2], -(2**31), jnp.int32)
        return jax.lax.fori_loop(0, 32 // digit_bits, find_digit, lowest_BT, unroll=unroll)

    # Elsewhere a pass has a fixed cost, and a loop would leave the device; a CPU pays for every
    # comparison.
    return jax.lax.platform_dependent(cpu=lambda: search(1, False), default=lambda: search(4, True))


def _order(x):
    """int32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_order(order):
    """The inverse of `_order`."""
    return jax.lax.bitcast_convert_type(
        jnp.where(order >= 0, order, order ^ 0x7FFFFFFF), jnp.float32
    )


def _sum(x, axis_name: AxisName):
    """Over the last axis, and over the shards of it."""
    total = x.sum(axis=-1)
    return jax.lax.psum(total, axis_name) if axis_name else total


def uniform(sampling: SamplingArrays, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """One uniform of [0, 1) per position, float32 `[B, T]`; it can be exactly 0, never 1."""
    return passes.uniform(keys(sampling, position_BT, stream))


def keys(sampling: SamplingArrays, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """A key per position, int32 `[B, T, 2]`. Distinct keys have independent noise (see
    `kernels.sampling.noise`), so that seed, position and stream make up the two words as they are."""
    low_BT = position_BT.astype(jnp.int32) * len(Stream) + int(stream)
    seed_B = jax.lax.bitcast_convert_type(sampling.seed_B, jnp.int32)
    return jnp.stack([jnp.broadcast_to(seed_B[:, None], low_BT.shape), low_BT], axis=-1)
