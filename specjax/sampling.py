"""From logits to distributions and tokens: temperature, filters and randomness, all in one module.

Drafts, verified tokens and bonus tokens all go through `sample`, so a filter holds for all of them
or for none. Every random number comes from a key made of (sequence seed, absolute position,
stream). The text of a sequence therefore depends neither on its neighbours or its row in the
batch nor on how the loop is split into calls.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct

from specjax import parallel
from specjax.config import Runtime
from specjax.kernels import sampling as passes
from specjax.kernels.sampling import Distribution, finite, inverse
from specjax.lax_utils import with_standard_promotion


class Stream(enum.IntEnum):
    """Purposes of random numbers. Numbers that must be independent have different streams."""

    TARGET = 0  # tokens of the target; drafts under `coupled` share it on purpose
    DRAFT = 1  # tokens of the drafter under `rejection`
    ACCEPT = 2  # acceptance uniforms under `rejection`


@struct.dataclass
class SamplingArrays:
    """How each sequence is sampled.

    A field that is None is off in all rows, and nothing is compiled for it.

    Attributes:
      seed_B: uint32.
      temperature_B: float32, at least 0; 0 is greedy: the first token of the largest logit. None:
        all rows are greedy.
      top_k_B: int32; only tokens at least as likely as the k-th are sampled; 0 is off.
      top_p_B: float32 in (0, 1]; only the fewest most likely tokens with at least this mass are
        sampled (after top-k); 1 is off.
      min_p_B: float32 in [0, 1]; only tokens with at least this share of the largest probability
        are sampled; 0 is off.
    """

    seed_B: jax.Array
    temperature_B: jax.Array | None = None
    top_k_B: jax.Array | None = None
    top_p_B: jax.Array | None = None
    min_p_B: jax.Array | None = None


def arrays(seed_B, temperature_B, top_k_B, top_p_B, min_p_B) -> SamplingArrays:
    """Returns `SamplingArrays` of host arrays, with None for options that are off in all rows."""
    values_and_off = dict(
        temperature_B=(temperature_B, 0),
        top_k_B=(top_k_B, 0),
        top_p_B=(top_p_B, 1),
        min_p_B=(min_p_B, 0),
    )
    used = {name: x_B for name, (x_B, off) in values_and_off.items() if (x_B != off).any()}
    return SamplingArrays(seed_B, **used)


@with_standard_promotion
def sample(
    runtime: Runtime,
    logits_BTV: jax.Array,
    arrays: SamplingArrays,
    position_BT: jax.Array | None,
    stream: Stream | None,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, Distribution]:
    """Samples a token from each row of logits: temperature first, then top-k, top-p and min-p.

    The noise is a function of (seed, position, stream) alone. Two distributions sampled with the
    same three agree as often as their shapes allow. A token of probability 0 is never sampled.

    Args:
      runtime: valid tokens and implementation (static).
      logits_BTV: `[B, T, V]`.
      arrays: temperatures, filters and seeds.
      position_BT: int32 absolute position of each token to be sampled.
      stream: purpose of the sample; None for the argmax instead.
      axes: mesh axes over which the vocabulary is split, inside `jax.shard_map`; V is then that of
        a shard (static).

    Returns:
      Tokens, int32 `[B, T]`, and their distributions.
    """
    key_BT2 = None if stream is None else keys(arrays, position_BT, stream)
    return passes.sample_pass(
        logits_BTV,
        arrays.temperature_B,
        thresholds(runtime, logits_BTV, arrays, axes),
        key_BT2,
        implementation=runtime.implementation,
        **vocabulary(runtime, axes),
    )


@with_standard_promotion
def sample_draft(
    runtime: Runtime,
    vocab_size: int,
    logits_BV: jax.Array,
    arrays: SamplingArrays,
    position_B: jax.Array,
    stream: Stream,
) -> tuple[jax.Array, Distribution]:
    """Samples a draft token for each row, which is the same on all devices of a mesh.

    Args:
      runtime: static.
      vocab_size: V of the target's whole vocabulary (static).
      logits_BV: the drafter's; see `parallel.logits_axes` for the number of columns.
      arrays: temperatures, filters and seeds.
      position_B: int32 absolute position of the token.
      stream: purpose of the sample.

    Returns:
      Tokens, int32 `[B]`, and their distributions without the axis T, over this device's part of
      the target's vocabulary: verification compares the two on the device.
    """
    mesh = runtime.mesh
    axes = parallel.logits_axes(logits_BV.shape[1], vocab_size, mesh)
    token_B1, distribution = sample(
        runtime, logits_BV[:, None], arrays, position_B[:, None], stream, axes
    )
    distribution = jax.tree.map(lambda x: x[:, 0], distribution)
    shard_BV = parallel.target_shard(distribution.logits_BTV, vocab_size, mesh, axes)
    token_B = parallel.agree(token_B1[:, 0], mesh, axes)
    return token_B, distribution._replace(logits_BTV=shard_BV)


@struct.dataclass
class Logprobs:
    """Log-probabilities of tokens, and of the most likely tokens in their place.

    Attributes:
      token_BS: float32, log-probability of each token.
      rank_BS: int32, how many tokens have at least its logit, the token included; 1 for the most
        likely one, unless others tie with it (vLLM's rank).
      top_ids_BSJ: int32, the J most likely tokens; those that tie in the order of their ids.
      top_BSJ: float32, their log-probabilities; -inf where there are fewer than J valid tokens.
    """

    token_BS: jax.Array
    rank_BS: jax.Array
    top_ids_BSJ: jax.Array
    top_BSJ: jax.Array


def empty_logprobs(num_rows: int, num_columns: int, num_top: int) -> Logprobs:
    """Returns zeros for S = `num_columns` tokens of each row, with J = `num_top`."""
    return Logprobs(
        token_BS=jnp.zeros((num_rows, num_columns), jnp.float32),
        rank_BS=jnp.zeros((num_rows, num_columns), jnp.int32),
        top_ids_BSJ=jnp.zeros((num_rows, num_columns, num_top), jnp.int32),
        top_BSJ=jnp.zeros((num_rows, num_columns, num_top), jnp.float32),
    )


@with_standard_promotion
def logprobs(
    runtime: Runtime,
    logits_BTV: jax.Array,
    token_BT: jax.Array,
    num_top: int,
    axes: tuple[str, ...] = (),
) -> Logprobs:
    """Returns log softmax(logits) of one token of each row, and of the most likely ones.

    Ids that are not valid have no part in the softmax. Nothing is sorted where J is 0.

    Args:
      runtime: static.
      logits_BTV: `[B, T, V]`; those of a shard where the vocabulary is split.
      token_BT: int32.
      num_top: J (static).
      axes: mesh axes over which the vocabulary is split (static).

    Returns:
      Logprobs of T tokens of each row.
    """
    one_B = jnp.ones(logits_BTV.shape[0], jnp.float32)
    _, distribution = passes.sample_pass(
        logits_BTV,
        one_B,
        None,
        None,
        implementation=runtime.implementation,
        **vocabulary(runtime, axes),
    )
    V = logits_BTV.shape[-1]
    first_token = jax.lax.axis_index(axes) * V if axes else 0
    x_BTV = finite(logits_BTV)
    if runtime.num_valid_tokens is not None:
        is_valid_V = jnp.arange(V) + first_token < runtime.num_valid_tokens
        x_BTV = jnp.where(is_valid_V, x_BTV, -jnp.inf)
    # Logits are compared, since log-probabilities are rounded: others would tie, and some that tie
    # would not.
    token_x_BT = passes.logit(distribution, token_BT, **vocabulary(runtime, axes))
    rank_BT = _sum((x_BTV >= token_x_BT[..., None]).astype(jnp.int32), axes)
    top_x_BTJ, top_ids_BTJ = _largest(x_BTV, num_top, first_token, axes)
    largest_BT, log_total_BT = distribution.largest_BT, jnp.log(distribution.total_BT)
    token_logprob_BT = token_x_BT - largest_BT - log_total_BT
    top_BTJ = top_x_BTJ - largest_BT[..., None] - log_total_BT[..., None]
    return Logprobs(token_logprob_BT, rank_BT, top_ids_BTJ, top_BTJ)


def _largest(x_BTV, num_top: int, first_token, axes: tuple[str, ...]):
    """Returns the J largest logits of each row and their ids; -inf and 0 beyond the vocabulary."""
    B, T, V = x_BTV.shape
    if num_top == 0:
        return jnp.zeros((B, T, 0), jnp.float32), jnp.zeros((B, T, 0), jnp.int32)
    top_BTJ, ids_BTJ = jax.lax.top_k(x_BTV, min(num_top, V))
    ids_BTJ += first_token
    if axes:
        # Shards come in the order of their ids, so that tokens that tie do, too.
        top_BTJ = jax.lax.all_gather(top_BTJ, axes, axis=2, tiled=True)
        ids_BTJ = jax.lax.all_gather(ids_BTJ, axes, axis=2, tiled=True)
        top_BTJ, index_BTJ = jax.lax.top_k(top_BTJ, min(num_top, top_BTJ.shape[2]))
        ids_BTJ = jnp.take_along_axis(ids_BTJ, index_BTJ, axis=2)
    padding = ((0, 0), (0, 0), (0, num_top - top_BTJ.shape[2]))
    top_BTJ = jnp.pad(top_BTJ, padding, constant_values=-jnp.inf)
    return top_BTJ, jnp.pad(ids_BTJ, padding)


def vocabulary(runtime: Runtime, axes: tuple[str, ...]) -> dict:
    """Returns the keyword arguments of the passes that describe the vocabulary."""
    return dict(num_valid=runtime.num_valid_tokens, axis_name=axes or None)


@with_standard_promotion
def thresholds(
    runtime: Runtime, logits_BTV: jax.Array, arrays: SamplingArrays, axes: tuple[str, ...] = ()
) -> jax.Array | None:
    """Returns the smallest logit that passes all filters, float32 `[B, T]`; None without filters.

    Every filter keeps the tokens whose logit reaches a threshold, so tokens that tie are kept or
    dropped together. The threshold is compared with unscaled logits: a scaled one may be rounded
    differently each time that the compiler computes it, and could then be below itself. Only counts
    and masses leave a shard. Arguments as for `sample`.
    """
    filters = arrays.top_k_B, arrays.top_p_B, arrays.min_p_B
    if arrays.temperature_B is None or filters == (None, None, None):
        return None
    V = logits_BTV.shape[-1]
    first_token = jax.lax.axis_index(axes) * V if axes else 0
    logits_BTV = finite(logits_BTV)
    if runtime.num_valid_tokens is not None:
        is_valid_V = jnp.arange(V) + first_token < runtime.num_valid_tokens
        logits_BTV = jnp.where(is_valid_V, logits_BTV, -jnp.inf)
    largest_BT = logits_BTV.max(axis=-1)
    if axes:
        largest_BT = jax.lax.pmax(largest_BT, axes)

    order_BTV = _order(logits_BTV)
    lowest = _order(jnp.float32(-jnp.inf))
    threshold_BT = jnp.broadcast_to(lowest, logits_BTV.shape[:2])
    if arrays.top_k_B is not None:
        threshold_BT = _top_k(order_BTV, arrays.top_k_B, axes)
    if arrays.top_p_B is not None:
        nucleus_BT = _top_p(logits_BTV, largest_BT, order_BTV, threshold_BT, arrays, axes)
        is_on_B1 = arrays.top_p_B[:, None] < 1
        threshold_BT = jnp.where(is_on_B1, jnp.maximum(threshold_BT, nucleus_BT), threshold_BT)
    threshold_BT = _from_order(threshold_BT)
    if arrays.min_p_B is not None:
        min_p_B1 = arrays.min_p_B[:, None]
        distance_B1 = arrays.temperature_B[:, None] * jnp.log(jnp.maximum(min_p_B1, 1e-30))
        lowest_BT = jnp.where(min_p_B1 > 0, largest_BT + distance_B1, -jnp.inf)
        threshold_BT = jnp.maximum(threshold_BT, lowest_BT)
    return threshold_BT


def _top_k(order_BTV, top_k_B, axes: tuple[str, ...]):
    V = order_BTV.shape[-1] * (jax.lax.axis_size(axes) if axes else 1)
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, V), V)
    return _largest_threshold(order_BTV, jnp.ones_like(order_BTV), k_B[:, None], axes)


def _top_p(logits_BTV, largest_BT, order_BTV, threshold_BT, arrays, axes: tuple[str, ...]):
    scale_B11 = inverse(arrays.temperature_B)[:, None, None]
    weight_BTV = jnp.exp((logits_BTV - largest_BT[..., None]) * scale_B11)
    weight_BTV = jnp.where(order_BTV >= threshold_BT[..., None], weight_BTV, 0)
    mass_BT = _sum(weight_BTV, axes)
    # The most likely token always passes, even where p times the mass underflows.
    enough_BT = jnp.maximum(arrays.top_p_B[:, None] * mass_BT, 1e-37)
    return _largest_threshold(order_BTV, weight_BTV, enough_BT, axes)


def _largest_threshold(order_BTV, weight_BTV, enough_BT, axes: tuple[str, ...]):
    """Returns the largest t such that the tokens of order t and above weigh enough.

    It is exact, found by search over the digits of t. Nothing is sorted. Every pass reads the
    vocabulary once, and finds one digit.
    """

    def search(digit_bits: int, unroll: bool):
        digits = jnp.arange(1, 1 << digit_bits)

        def find_digit(i, t_BT):
            shift = 32 - digit_bits * (i + 1)
            tries = t_BT[..., None] + (digits << shift)
            reaches = order_BTV[:, :, None] >= tries[..., None]
            weights = _sum(jnp.where(reaches, weight_BTV[:, :, None], 0), axes)
            num_enough_BT = (weights >= enough_BT[..., None]).sum(axis=-1)
            return t_BT + (num_enough_BT << shift)

        lowest_BT = jnp.full(order_BTV.shape[:2], -(2**31), jnp.int32)
        return jax.lax.fori_loop(0, 32 // digit_bits, find_digit, lowest_BT, unroll=unroll)

    # Elsewhere a pass has a fixed cost, and a loop would leave the device; a CPU pays for every
    # comparison.
    return jax.lax.platform_dependent(cpu=lambda: search(1, False), default=lambda: search(4, True))


def _order(x):
    """Returns int32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _from_order(order):
    """The inverse of `_order`."""
    bits = jnp.where(order >= 0, order, order ^ 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sum(x, axes: tuple[str, ...]):
    """Returns the sum over the last axis, and over the shards of it."""
    total = x.sum(axis=-1)
    return jax.lax.psum(total, axes) if axes else total


@with_standard_promotion
def uniform(arrays: SamplingArrays, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """Returns one uniform in [0, 1) per position, float32 `[B, T]`; it can be exactly 0."""
    return passes.uniform(keys(arrays, position_BT, stream))


@with_standard_promotion
def keys(arrays: SamplingArrays, position_BT: jax.Array, stream: Stream) -> jax.Array:
    """Returns a key per position, int32 `[B, T, 2]`.

    Distinct keys have independent noise (see `kernels.sampling.noise`), so seed, position and
    stream directly form the two words.
    """
    low_BT = position_BT.astype(jnp.int32) * len(Stream) + int(stream)
    seed_B = jax.lax.bitcast_convert_type(arrays.seed_B, jnp.int32)
    high_BT = jnp.broadcast_to(seed_B[:, None], low_BT.shape)
    return jnp.stack([high_BT, low_BT], axis=-1)
