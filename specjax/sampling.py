"""From logits to a law, and from a law to a token: the one place for temperature, filters and randomness.

Drafts, verified tokens and bonus tokens all go through `probabilities`, so a filter can never hold for one and not for
another. Every random number comes from a key made of (sequence seed, absolute position, stream), so a sequence's text
depends neither on its neighbours or its row in the batch nor on how the loop is cut into calls.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct

# Filters look at this many most likely tokens first, and sort the whole vocabulary only where those do not suffice.
SHORTLIST = 256


class Stream(enum.IntEnum):
    """Purposes of random numbers. Those that must be independent have different streams."""

    TARGET = 0  # tokens of the target: plain, correction and bonus; `coupled` drafts share it on purpose
    DRAFT = 1  # tokens of the drafter under `rejection`
    ACCEPT = 2  # acceptance uniforms under `rejection`


@struct.dataclass
class SamplingParams:
    """How each sequence is sampled.

    Attributes:
      temperature_B: float32, at least 0; 0 is greedy (the law is one on the first most likely token).
      top_k_B: int32; only tokens at least as likely as the k-th may come; 0 is off.
      top_p_B: float32 in (0, 1]; the fewest most likely tokens with at least this mass (after top-k); 1 is off.
      min_p_B: float32 in [0, 1]; only tokens with at least this share of the largest probability; 0 is off.
      seed_B: uint32.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B: jax.Array


def probabilities(logits_BTV: jax.Array, sampling: SamplingParams) -> jax.Array:
    """The law of the next token, float32 `[B, T, V]`: temperature first, then top-k, top-p and min-p.

    Every filter keeps the tokens whose logit reaches a threshold, so tokens that tie are kept or dropped together.
    """

    def greedy():
        return jax.nn.one_hot(jnp.argmax(logits_BTV, axis=-1), logits_BTV.shape[-1])

    def mixed():
        greedy_B11 = sampling.temperature_B[:, None, None] == 0
        largest_BT1 = logits_BTV.max(axis=-1, keepdims=True)

        def weigh(logits_BTx):
            """Share of a token in terms of the most likely one."""
            return jnp.exp((logits_BTx - largest_BT1) / jnp.where(greedy_B11, 1, sampling.temperature_B[:, None, None]))

        filtered_B = (sampling.top_k_B > 0) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)
        threshold_BT = jax.lax.cond(
            jnp.any(filtered_B & (sampling.temperature_B > 0)),
            lambda: _threshold(logits_BTV, largest_BT1[..., 0], weigh, sampling),
            lambda: jnp.full(logits_BTV.shape[:2], -jnp.inf),
        )
        weight_BTV = jnp.where(logits_BTV >= threshold_BT[..., None], weigh(logits_BTV), 0)
        law_BTV = weight_BTV / weight_BTV.sum(axis=-1, keepdims=True)
        return jnp.where(greedy_B11, greedy(), law_BTV)

    # Where no row samples, which is most of use, nothing needs to be exponentiated.
    return jax.lax.cond(jnp.any(sampling.temperature_B > 0), mixed, greedy)


def _threshold(logits_BTV, largest_BT, weigh, sampling: SamplingParams):
    """Least logit that passes all filters, `[B, T]`.

    It is one of the logits as they came: a scaled one may be rounded differently each time that the compiler computes
    it, and would then not reach itself.
    """
    V = logits_BTV.shape[-1]
    k_B1 = jnp.where(sampling.top_k_B > 0, jnp.minimum(sampling.top_k_B, V), V)[:, None]
    p_B1 = sampling.top_p_B[:, None]

    def from_most_likely(n: int):
        """Thresholds of top-k and top-p from the n most likely tokens, and whether n sufficed for every row."""
        top_BTn = jax.lax.top_k(logits_BTV, n)[0]
        kth_BT = jnp.take_along_axis(top_BTn, jnp.minimum(k_B1, n)[..., None] - 1, axis=-1)[..., 0]
        kth_BT = jnp.where(k_B1 < V, kth_BT, -jnp.inf)
        mass_BT = jnp.where(logits_BTV >= kth_BT[..., None], weigh(logits_BTV), 0).sum(axis=-1)
        cumulative_BTn = jnp.cumsum(weigh(top_BTn), axis=-1)
        before_BTn = jnp.pad(cumulative_BTn, ((0, 0), (0, 0), (1, 0)))[..., :-1]
        kept_BT = (before_BTn < (p_B1 * mass_BT)[..., None]).sum(axis=-1)
        kept_BT = jnp.maximum(kept_BT, 1)  # the most likely token always is, even where p times the mass underflows
        nucleus_BT = jnp.take_along_axis(top_BTn, kept_BT[..., None] - 1, axis=-1)[..., 0]
        nucleus_BT = jnp.where(p_B1 < 1, nucleus_BT, -jnp.inf)
        enough = ((k_B1 <= n) | (k_B1 == V)) & ((p_B1 == 1) | (cumulative_BTn[..., -1] >= p_B1 * mass_BT))
        return jnp.maximum(kth_BT, nucleus_BT), jnp.all(enough)

    threshold_BT, enough = from_most_likely(min(SHORTLIST, V))
    if V > SHORTLIST:
        threshold_BT = jax.lax.cond(enough, lambda: threshold_BT, lambda: from_most_likely(V)[0])
    min_p_B1 = sampling.min_p_B[:, None]
    floor_BT = largest_BT + sampling.temperature_B[:, None] * jnp.log(jnp.maximum(min_p_B1, 1e-30))
    return jnp.maximum(threshold_BT, jnp.where(min_p_B1 > 0, floor_BT, -jnp.inf))


def draw(law_BTV: jax.Array, sampling: SamplingParams, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """Draws a token from each law by the Gumbel-max trick: argmax of log law + noise.

    The noise is a function of (seed, position, stream) alone, so two laws drawn with the same three agree as often as
    their shapes let them. A token of probability 0 is never drawn. The law need not add up to 1.

    Args:
      law_BTV: non-negative, `[B, T, V]`.
      sampling: only the seeds and temperatures are used.
      position_BT: int32 absolute position of the token to be drawn.
      stream: purpose of the draw.

    Returns:
      int32 `[B, T]`.
    """

    def noisy():
        V = law_BTV.shape[-1]
        keys_BT = _keys(sampling.seed_B, position_BT, stream)
        noise_BTV = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (V,), mode="high")))(keys_BT)
        return jnp.argmax(jnp.log(law_BTV) + noise_BTV, axis=-1)

    greedy = lambda: jnp.argmax(law_BTV, axis=-1)  # noqa: E731
    return jax.lax.cond(jnp.any(sampling.temperature_B > 0), noisy, greedy).astype(jnp.int32)


def uniform(sampling: SamplingParams, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """One uniform of [0, 1) per position, float32 `[B, T]`; it can be exactly 0, never 1."""
    keys_BT = _keys(sampling.seed_B, position_BT, stream)
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key)))(keys_BT)


def _keys(seed_B, position_BT, stream: Stream):
    """A generator key per position. Threefry (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") gives
    independent streams for distinct keys, so seed, position and stream make up the key's two words as they are."""
    low_BT = position_BT.astype(jnp.uint32) * len(Stream) + int(stream)
    words_BT2 = jnp.stack([jnp.broadcast_to(seed_B[:, None], low_BT.shape), low_BT], axis=-1)
    return jax.random.wrap_key_data(words_BT2, impl="threefry2x32")
