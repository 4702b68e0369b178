"""Public functions of verification. The two passes over the vocabulary are in the implementations
beside this file; what is small, and what joins the shards of a vocabulary, is here, once for all of
them.

Bytes: `draw` reads each row of logits once. `reject` reads single logits, and then one row of the
target and one of the draft, for the token that follows the accepted drafts. Neither writes anything
of the vocabulary's size, and of that size nothing crosses from shard to shard: a few numbers per
row do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.kernels import dispatch
from specjax.kernels.sampling.partial import (
    MASKED,
    SoftmaxStats,
    finite,
    inverse,
    join_residuals,
    join_stats,
    usable,
)

NO_LIMIT = 2**31 - 1

AxisName = (
    str | tuple[str, ...] | None
)  # of the mesh; a shard's number counts its axes from the left


class Distribution(NamedTuple):
    """Distributions of tokens, without writing them out: exp((logit - largest) / temperature) / total where
    the logit reaches the threshold, and 0 elsewhere. It does not say which ids were valid: whoever
    made it does, to `reject`.

    Attributes:
      logits_BTV: float32, bfloat16 or float16; with shards, this one's.
      threshold_BT: float32, the least logit that may be drawn.
      largest_BT: float32, the largest logit of the whole vocabulary that may be drawn, see
        `usable`.
      total_BT: float32, sum over the whole vocabulary of exp((logit - largest) / temperature), from
        the threshold on; None without temperature.
    """

    logits_BTV: jax.Array
    threshold_BT: jax.Array
    largest_BT: jax.Array
    total_BT: jax.Array | None


def draw(
    logits_BTV: jax.Array,
    temperature_B: jax.Array | None,
    threshold_BT: jax.Array | None,
    key_BT2: jax.Array | None,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Distribution]:
    """Draws tokens from softmax(logits / temperature), restricted to the logits that reach a
    threshold.

    The noise of token i under a key is a function of the key and i alone (`noise.exponential`):
      distributions drawn with the
    same key agree as often as their shapes let them, however the vocabulary is split.

    Args:
      logits_BTV: `[B, T, V]`, V the size of the shard where `axis_name` is given.
      temperature_B: float32; 0 takes the first most likely token. None for 0 in all rows, which
        costs least.
      threshold_BT: float32; None lets every logit pass.
      key_BT2: int32, two words per token to draw; None takes the first most likely token whatever
        the temperature.
      num_valid: token ids at or above it are never drawn (static); None for all.
      axis_name: mesh axis, or axes, over which the vocabulary is split, inside `jax.shard_map`.
      implementation: see `dispatch.choose`.

    Returns:
      int32 `[B, T]`, and the distributions.

    Raises:
      ValueError: shapes that do not fit together, or an implementation that does not exist or
        cannot run here.
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
    noise = temperature_B is not None and key_BT2 is not None
    parts = _passes(implementation).scan(
        logits_BTV.reshape(B * T, V),
        temperature_R,
        threshold_BT.reshape(-1),
        key_BT2.reshape(-1, 2) if noise else None,
        _first_token(V, axis_name),
        _limit(num_valid),
    )
    scan = join_stats(parts, temperature_R, noise)
    if axis_name:
        scan = join_stats(_gather(scan, axis_name), temperature_R, noise)
    scan = SoftmaxStats(*(None if x_R is None else x_R.reshape(B, T) for x_R in scan))
    return scan.token, Distribution(logits_BTV, threshold_BT, scan.largest, scan.total)


def reject(
    distribution: Distribution,
    argmax_BT: jax.Array,
    draft_BM: jax.Array,
    count_B: jax.Array,
    draft_distribution: tuple[Distribution, ...] | None,
    temperature_B: jax.Array,
    u_BM: jax.Array,
    key_BT2: jax.Array,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Speculative rejection sampling (Leviathan et al. 2023, algorithm 1) of a chain of K >= 1
    drafts.

    Draft d is accepted if u q(d) < p(d) and q(d) is a positive finite number, which is false only
    for a draft that was not drawn from q, such as one of logits that are NaN. The first that is not
    is replaced by a draw from max(p - q, 0), or from p where its q is no such number; after the
    last, a token is drawn from the target's own distribution.

    Args:
      distribution: the target's distributions p after the pending token and after each draft, T = K + 1 of them, and
      argmax_BT: its most likely tokens, both from `draw` without keys.
      draft_BM: int32 drafts.
      count_B: int32, how many of them are real; the others are never accepted.
      draft_distribution: the K distributions q that they were drawn from, as `draw` returned them, but without the
        axis T: `[B, V]` and `[B]`; None for guesses that were not drawn (q is one on the guess).
      temperature_B: float32, the one of the distributions; at 0 both are one on their most likely token.
      u_BM: float32 uniforms of [0, 1).
      key_BT2: int32, keys of the noise that draws the token at each place.
      num_valid, axis_name, implementation: as for `draw`.

    Returns:
      The number of accepted drafts and the token that follows them, int32 `[B]` each.

    Raises:
      ValueError: shapes that do not fit together, or an implementation that does not exist or
        cannot run here.
    """
    B, T, V = distribution.logits_BTV.shape
    K = T - 1
    _check_shapes(
        draft_BM=(draft_BM, (B, K)),
        count_B=(count_B, (B,)),
        temperature_B=(temperature_B, (B,)),
        u_BM=(u_BM, (B, K)),
        argmax_BT=(argmax_BT, (B, T)),
        key_BT2=(key_BT2, (B, T, 2)),
        **{
            f"draft_distribution[{k}]": (q.logits_BTV, (B, V))
            for k, q in enumerate(draft_distribution or ())
        },
    )
    if draft_distribution is not None and len(draft_distribution) != K:
        raise ValueError(
            f"draft_distribution has {len(draft_distribution)} distributions for {K} drafts"
        )
    first_token, num_valid = _first_token(V, axis_name), _limit(num_valid)
    greedy_B = temperature_B == 0

    def probability(distribution, token_BM):
        return _probability(
            distribution, token_BM, temperature_B, first_token, num_valid, axis_name
        )

    chain = jax.tree.map(lambda x_BT: x_BT[:, :K], distribution)
    p_BM = jnp.where(greedy_B[:, None], draft_BM == argmax_BT[:, :K], probability(chain, draft_BM))
    q_BM, drawn_BM = jnp.ones(draft_BM.shape), True
    if draft_distribution is not None:
        q_BM = jnp.concatenate(
            [
                probability(jax.tree.map(lambda x: x[:, None], q), draft_BM[:, k : k + 1])
                for k, q in enumerate(draft_distribution)
            ],
            axis=1,
        )
        q_BM = jnp.where(greedy_B[:, None], 1, q_BM)
        drawn_BM = jnp.stack([usable(q.largest_BT) for q in draft_distribution], axis=1)
    # As a product, so that u = 0 accepts whatever the target can emit, and nothing else.
    drawn_BM &= (q_BM > 0) & (q_BM < jnp.inf)
    accepted_B = accepted_prefix(drawn_BM & (u_BM * q_BM < p_BM), count_B)

    def at(x_BTx, index_B):
        return jnp.take_along_axis(x_BTx, index_B.reshape(-1, *[1] * (x_BTx.ndim - 1)), axis=1)[
            :, 0
        ]

    rejected_B = jnp.minimum(accepted_B, K - 1)
    q = at(draft_BM, rejected_B) if draft_distribution is None else draft_distribution
    parts = _passes(implementation).residual(
        distribution,
        q,
        accepted_B,
        (accepted_B < count_B) & at(drawn_BM, rejected_B),
        temperature_B,
        at(key_BT2, accepted_B),
        first_token,
        num_valid,
    )
    race = join_residuals(parts)
    if axis_name:
        race = join_residuals(_gather(race, axis_name))
    # p = q but for rounding: nothing is left, and p itself is right.
    token_B = jnp.where(race.mass > 0, race.token, race.target_token)
    return accepted_B, jnp.where(greedy_B, at(argmax_BT, accepted_B), token_B)


def accepted_prefix(ok_BM: jax.Array, count_B: jax.Array) -> jax.Array:
    """Length of the accepted_prefix run of True among the first `count_B` entries of each row, int32 `[B]`."""
    ok_BM &= jnp.arange(ok_BM.shape[1]) < count_B[:, None]
    return jnp.cumprod(ok_BM.astype(jnp.int32), axis=1).sum(axis=1)


def _probability(
    distribution: Distribution, token_BM, temperature_B, first_token, num_valid: int, axis_name
):
    """Probability of one token under each distribution; 0 for an id that cannot be drawn."""
    V = distribution.logits_BTV.shape[2]
    index_BM = token_BM - first_token
    here_BM = (index_BM >= 0) & (index_BM < V) & (token_BM < num_valid)
    index_BM1 = jnp.clip(index_BM, 0, V - 1)[..., None]
    x_BM = finite(jnp.take_along_axis(distribution.logits_BTV, index_BM1, axis=-1)[..., 0])
    weight_BM = jnp.exp((x_BM - distribution.largest_BT) * inverse(temperature_B)[:, None])
    probability_BM = jnp.where(
        here_BM & (x_BM >= distribution.threshold_BT), weight_BM / distribution.total_BT, 0
    )
    return jax.lax.psum(probability_BM, axis_name) if axis_name else probability_BM


def _check_shapes(**arrays) -> None:
    for name, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has the shape {array.shape}, and here it must be {shape}")


def _passes(implementation: str | None):
    return dispatch.module(__package__, dispatch.choose(implementation))


def _limit(num_valid: int | None) -> int:
    return NO_LIMIT if num_valid is None else num_valid


def _first_token(V: int, axis_name: AxisName):
    return jax.lax.axis_index(axis_name) * V if axis_name else jnp.int32(0)


def _gather(parts, axis_name: AxisName):
    """The same of all shards, on a last axis, in one exchange."""
    leaves, treedef = jax.tree.flatten(parts)
    words_RN = jnp.stack([jax.lax.bitcast_convert_type(x_R, jnp.int32) for x_R in leaves], axis=1)
    words_RSN = jax.lax.all_gather(words_RN, axis_name, axis=1)
    return treedef.unflatten(
        jax.lax.bitcast_convert_type(words_RSN[..., i], x_R.dtype) for i, x_R in enumerate(leaves)
    )
