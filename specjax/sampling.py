"""From logits to a law, and from a law to a token: the one place for temperature, filters and randomness.

Drafts, verified tokens and bonus tokens all go through `draw`, so a filter can never hold for one and not for another.
Every random number comes from a key made of (sequence seed, absolute position, stream), so a sequence's text depends
neither on its neighbours or its row in the batch nor on how the loop is cut into calls.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct

from specjax.kernels import verify as kernels
from specjax.kernels.verify import Law

EVERY_LOGIT = -2139095041  # `_order` of -inf


class Stream(enum.IntEnum):
    """Purposes of random numbers. Those that must be independent have different streams."""

    TARGET = 0  # tokens of the target: plain, correction and bonus; `coupled` drafts share it on purpose
    DRAFT = 1  # tokens of the drafter under `rejection`
    ACCEPT = 2  # acceptance uniforms under `rejection`


@struct.dataclass
class SamplingParams:
    """How each sequence is sampled.

    A field that is None is off in all rows, and what it would need is not even compiled.

    Attributes:
      seed_B: uint32.
      temperature_B: float32, at least 0; 0 is greedy: the first most likely token. None: all rows are.
      top_k_B: int32; only tokens at least as likely as the k-th may come; 0 is off.
      top_p_B: float32 in (0, 1]; the fewest most likely tokens with at least this mass (after top-k); 1 is off.
      min_p_B: float32 in [0, 1]; only tokens with at least this share of the largest probability; 0 is off.
    """

    seed_B: jax.Array
    temperature_B: jax.Array | None = None
    top_k_B: jax.Array | None = None
    top_p_B: jax.Array | None = None
    min_p_B: jax.Array | None = None


def draw(logits_BTV: jax.Array, sampling: SamplingParams, position_BT: jax.Array | None, stream: Stream | None, *,
         num_valid: int | None = None, implementation: str | None = None) -> tuple[jax.Array, Law]:
    """Draws a token from the law of each row of logits: temperature first, then top-k, top-p and min-p.

    The noise is a function of (seed, position, stream) alone, so two laws drawn with the same three agree as often as
    their shapes let them. A token of probability 0 is never drawn.

    Args:
      logits_BTV: `[B, T, V]`.
      sampling: see `SamplingParams`.
      position_BT: int32 absolute position of each token to be drawn.
      stream: purpose of the draw; None for the most likely token instead.
      num_valid: token ids at or above it have probability 0 (static); None for none.
      implementation: of the pass over the vocabulary, see `kernels.dispatch.choose` (static).

    Returns:
      int32 `[B, T]`, and the laws.
    """
    key_BT2 = None if stream is None else keys(sampling, position_BT, stream)
    return kernels.draw(logits_BTV, sampling.temperature_B, thresholds(logits_BTV[..., :num_valid], sampling), key_BT2,
                        num_valid=num_valid, implementation=implementation)  # fmt: skip


def probabilities(logits_BTV: jax.Array, sampling: SamplingParams) -> jax.Array:
    """The law that `draw` draws from, written out: float32 `[B, T, V]`."""
    likeliest_BT, law = draw(logits_BTV, sampling, None, None, implementation="xla")
    greedy_BTV = jax.nn.one_hot(likeliest_BT, logits_BTV.shape[-1])
    if sampling.temperature_B is None:
        return greedy_BTV
    greedy_B11 = sampling.temperature_B[:, None, None] == 0
    weight_BTV = _weight(logits_BTV, law.largest_BT, sampling)
    law_BTV = jnp.where(logits_BTV >= law.threshold_BT[..., None], weight_BTV, 0) / law.total_BT[..., None]
    return jnp.where(greedy_B11, greedy_BTV, law_BTV)


def thresholds(logits_BTV: jax.Array, sampling: SamplingParams) -> jax.Array | None:
    """Least logit that passes all filters, float32 `[B, T]`; None where there are no filters.

    Every filter keeps the tokens whose logit reaches a threshold, so tokens that tie are kept or dropped together. It
    is compared with logits as they came: a scaled one may be rounded differently each time that the compiler computes
    it, and would then not reach itself.
    """
    if sampling.temperature_B is None or (sampling.top_k_B, sampling.top_p_B, sampling.min_p_B) == (None, None, None):
        return None
    order_BTV, V = _order(logits_BTV), logits_BTV.shape[-1]
    largest_BT = logits_BTV.max(axis=-1).astype(jnp.float32)
    threshold_BT = jnp.full(logits_BTV.shape[:2], EVERY_LOGIT)
    if sampling.top_k_B is not None:
        k_B1 = jnp.where(sampling.top_k_B > 0, jnp.minimum(sampling.top_k_B, V), V)[:, None]
        threshold_BT = _largest_threshold(order_BTV, jnp.ones_like(order_BTV), k_B1)
    if sampling.top_p_B is not None:
        weight_BTV = jnp.where(order_BTV >= threshold_BT[..., None], _weight(logits_BTV, largest_BT, sampling), 0)
        # The most likely token always passes, even where p times the mass underflows.
        enough_BT = jnp.maximum(sampling.top_p_B[:, None] * weight_BTV.sum(axis=-1), 1e-37)
        nucleus_BT = _largest_threshold(order_BTV, weight_BTV, enough_BT)
        threshold_BT = jnp.where(sampling.top_p_B[:, None] < 1, jnp.maximum(threshold_BT, nucleus_BT), threshold_BT)
    threshold_BT = _from_order(threshold_BT)
    if sampling.min_p_B is not None:
        min_p_B1 = sampling.min_p_B[:, None]
        floor_BT = largest_BT + sampling.temperature_B[:, None] * jnp.log(jnp.maximum(min_p_B1, 1e-30))
        threshold_BT = jnp.maximum(threshold_BT, jnp.where(min_p_B1 > 0, floor_BT, -jnp.inf))
    return threshold_BT


def _largest_threshold(order_BTV, weight_BTV, enough_BT):
    """The largest t such that the tokens of order t and above weigh enough: exact, by search over the digits of t.

    Nothing is sorted. Every pass reads the vocabulary once, and finds one digit.
    """

    def search(digit_bits: int, unroll: bool):
        digits = jnp.arange(1, 1 << digit_bits)

        def find_digit(i, t_BT):
            shift = 32 - digit_bits * (i + 1)
            tries_BTC = t_BT[..., None] + (digits << shift)
            reach = order_BTV[:, :, None] >= tries_BTC[..., None]
            weight_BTC = jnp.where(reach, weight_BTV[:, :, None], 0).sum(axis=-1)
            return t_BT + ((weight_BTC >= enough_BT[..., None]).sum(axis=-1) << shift)

        lowest_BT = jnp.full(order_BTV.shape[:2], -(2**31), jnp.int32)
        return jax.lax.fori_loop(0, 32 // digit_bits, find_digit, lowest_BT, unroll=unroll)

    # Elsewhere a pass has a fixed cost, and a loop would leave the device; a CPU pays for every comparison.
    return jax.lax.platform_dependent(cpu=lambda: search(1, False), default=lambda: search(4, True))


def _order(x):
    """int32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_order(order):
    """The inverse of `_order`."""
    return jax.lax.bitcast_convert_type(jnp.where(order >= 0, order, order ^ 0x7FFFFFFF), jnp.float32)


def _weight(logits_BTV, largest_BT, sampling: SamplingParams):
    """Share of a token in terms of the most likely one. Rows of temperature 0 mean nothing."""
    temperature_B11 = jnp.where(sampling.temperature_B == 0, 1, sampling.temperature_B)[:, None, None]
    return jnp.exp((logits_BTV.astype(jnp.float32) - largest_BT[..., None]) / temperature_B11)


def uniform(sampling: SamplingParams, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """One uniform of [0, 1) per position, float32 `[B, T]`; it can be exactly 0, never 1."""
    return kernels.uniform(keys(sampling, position_BT, stream))


def keys(sampling: SamplingParams, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """A key per position, int32 `[B, T, 2]`. Distinct keys have independent noise (see `kernels.verify.noise`), so
    that seed, position and stream make up the two words as they are."""
    low_BT = position_BT.astype(jnp.int32) * len(Stream) + int(stream)
    seed_B = jax.lax.bitcast_convert_type(sampling.seed_B, jnp.int32)
    return jnp.stack([jnp.broadcast_to(seed_B[:, None], low_BT.shape), low_BT], axis=-1)
