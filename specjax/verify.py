"""Verification: accepts drafts so that the output follows the target's distribution exactly.

Two methods, both lossless. p is the target's distribution and q the drafter's, after temperature
and filters:

  rejection  Accept a draft d with probability min(1, p(d) / q(d)). Replace the first rejected draft
             by a sample from the residual, proportional to max(p - q, 0) (Leviathan et al. 2023,
             algorithm 1; Chen et al. 2023, algorithm 2). This accepts the most drafts.
  coupled    Sample the target's token with the noise of its position, exactly as plain decoding
             would. Accept drafts for as long as they equal it. The drafter uses the same noise, so
             the text for a seed does not depend on the drafter.

At temperature 0 both distributions are one-hot, and both methods accept a draft if and only if it
is the target's argmax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import parallel, sampling
from specjax.config import Runtime
from specjax.drafters.base import Draft
from specjax.kernels import sampling as passes
from specjax.kernels.sampling import Distribution
from specjax.lax_utils import with_standard_promotion
from specjax.sampling import SamplingArrays, Stream

METHODS = ("rejection", "coupled")


class Verified(NamedTuple):
    """Outcome of verifying one block of T = M + 1 tokens.

    Attributes:
      tokens_BT: int32 `[B, T]`, the accepted drafts, then one token of the target: the recovered
        token after a rejection, else the bonus token. Later entries are undefined.
      accepted_B: int32 `[B]`, number of accepted drafts.
      usable_BT: bool `[B, T]`, whether a token can be sampled from the target's logits. Where they
        are NaN the token is undefined.
    """

    tokens_BT: jax.Array
    accepted_B: jax.Array
    usable_BT: jax.Array


@with_standard_promotion
def verify(
    method: str,
    runtime: Runtime,
    logits_BTV: jax.Array,
    draft: Draft,
    arrays: SamplingArrays,
    position_B: jax.Array,
) -> Verified:
    """Verifies a chain of M drafts with the target's logits at T = M + 1 positions.

    Args:
      method: one of `METHODS` (static).
      runtime: static.
      logits_BTV: the target's, after the pending token and after each draft. M may be 0.
      draft: with `count_B`, the number of real drafts per row; the others are never accepted.
      arrays: temperatures, filters and seeds.
      position_B: int32 absolute position of the first token that this round emits.
    """
    position_BT = position_B[:, None] + jnp.arange(logits_BTV.shape[1])
    has_drafts = logits_BTV.shape[1] > 1
    is_greedy = arrays.temperature_B is None
    # Without drafts, or at temperature 0, both methods give the same result.
    if method == "rejection" and has_drafts and not is_greedy:
        return _verify_rejection(runtime, logits_BTV, draft, arrays, position_BT)
    return _verify_coupled(runtime, logits_BTV, draft, arrays, position_BT)


def _verify_coupled(runtime, logits_BTV, draft: Draft, arrays, position_BT) -> Verified:
    axes = parallel.model_axes(runtime.mesh, "target")
    tokens_BT, target = sampling.sample(
        runtime, logits_BTV, arrays, position_BT, Stream.TARGET, axes
    )
    agrees_BM = tokens_BT[:, :-1] == draft.tokens_BM
    accepted_B = accepted_prefix(agrees_BM, draft.count_B)
    return Verified(tokens_BT, accepted_B, passes.usable(target.largest_BT))


def _verify_rejection(runtime, logits_BTV, draft: Draft, arrays, position_BT) -> Verified:
    M = draft.tokens_BM.shape[1]
    axes = parallel.model_axes(runtime.mesh, "target")
    argmax_BT, target = sampling.sample(runtime, logits_BTV, arrays, None, None, axes)
    u_BM = sampling.uniform(arrays, position_BT[:, :M], Stream.ACCEPT)
    key_BT2 = sampling.keys(arrays, position_BT, Stream.TARGET)
    accepted_B, recovered_B = reject(
        runtime, target, argmax_BT, draft, arrays.temperature_B, u_BM, key_BT2, axes
    )
    drafts_BT = jnp.pad(draft.tokens_BM, ((0, 0), (0, 1)))
    is_accepted_BT = jnp.arange(M + 1) < accepted_B[:, None]
    tokens_BT = jnp.where(is_accepted_BT, drafts_BT, recovered_B[:, None])
    return Verified(tokens_BT, accepted_B, passes.usable(target.largest_BT))


@with_standard_promotion
def reject(
    runtime: Runtime,
    target: Distribution,
    argmax_BT: jax.Array,
    draft: Draft,
    temperature_B: jax.Array,
    u_BM: jax.Array,
    key_BT2: jax.Array,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Speculative rejection sampling of a chain of M >= 1 drafts, with the noise given.

    Leviathan et al. 2023, algorithm 1.

    Args:
      runtime: static.
      target: distributions p after the pending token and after each draft, T = M + 1 of them.
      argmax_BT: int32 tokens of the largest logits of p.
      draft: with `count_B`.
      temperature_B: float32, of both distributions.
      u_BM: float32 acceptance uniforms in [0, 1).
      key_BT2: int32, keys of the noise that samples the token at each position.
      axes: mesh axes over which the target's vocabulary is split (static).

    Returns:
      The number of accepted drafts and the token that follows them, int32 `[B]` each.
    """
    M = draft.tokens_BM.shape[1]
    is_greedy_B = temperature_B == 0
    vocabulary = sampling.vocabulary(runtime, axes)
    before = jax.tree.map(lambda x_BT: x_BT[:, :M], target)
    p_BM = passes.probability(before, draft.tokens_BM, temperature_B, **vocabulary)
    p_BM = jnp.where(is_greedy_B[:, None], draft.tokens_BM == argmax_BT[:, :M], p_BM)
    q_BM = _draft_probability(draft, temperature_B, vocabulary)
    # A draft whose q is not a positive finite number was not sampled from q: the drafter's logits
    # are NaN. It is rejected, and nothing is subtracted from p.
    is_sampled_BM = (q_BM > 0) & (q_BM < jnp.inf)
    # As a product, so that u = 0 accepts exactly what the target can emit.
    accepted_B = accepted_prefix(is_sampled_BM & (u_BM * q_BM < p_BM), draft.count_B)

    is_rejection_B = accepted_B < draft.count_B
    subtract_B = is_rejection_B & _at(is_sampled_BM, jnp.minimum(accepted_B, M - 1))
    residual = passes.residual_pass(
        target,
        draft.tokens_BM,
        draft.distributions,
        draft.sampled_B,
        accepted_B,
        subtract_B,
        temperature_B,
        _at(key_BT2, accepted_B),
        implementation=runtime.implementation,
        **vocabulary,
    )
    # Where p = q up to rounding the residual is empty, and p itself is correct.
    recovered_B = jnp.where(residual.mass > 0, residual.token, residual.target_token)
    return accepted_B, jnp.where(is_greedy_B, _at(argmax_BT, accepted_B), recovered_B)


def _draft_probability(draft: Draft, temperature_B, vocabulary: dict):
    """Returns q of each draft, `[B, M]`: 0 where its logits are unusable, 1 where q is one-hot."""
    if draft.distributions is None:
        return jnp.ones(draft.tokens_BM.shape, jnp.float32)
    columns = []
    for m, q in enumerate(draft.distributions):
        one_row = jax.tree.map(lambda x: x[:, None], q)
        token_B1 = draft.tokens_BM[:, m : m + 1]
        q_B1 = passes.probability(one_row, token_B1, temperature_B, **vocabulary)
        q_B1 = jnp.where((temperature_B == 0)[:, None], 1, q_B1)
        columns.append(jnp.where(passes.usable(one_row.largest_BT), q_B1, 0))
    q_BM = jnp.concatenate(columns, axis=1)
    return q_BM if draft.sampled_B is None else jnp.where(draft.sampled_B[:, None], q_BM, 1)


def _at(x_BT, index_B):
    """Returns one entry of each row, along the second axis."""
    index = index_B.reshape(-1, *[1] * (x_BT.ndim - 1))
    return jnp.take_along_axis(x_BT, index, axis=1)[:, 0]


def accepted_prefix(ok_BM: jax.Array, count_B: jax.Array) -> jax.Array:
    """Returns how many of the first `count_B` entries of each row are True before a False."""
    is_real_BM = jnp.arange(ok_BM.shape[1]) < count_B[:, None]
    return jnp.cumprod((ok_BM & is_real_BM).astype(jnp.int32), axis=1).sum(axis=1)


@with_standard_promotion
def unusable_drafts(draft: Draft) -> jax.Array:
    """Returns how many drafts per row were sampled from unusable logits, int32 `[B]`.

    Their logits are NaN, or all -inf. `rejection` accepts none of them.
    """
    count_B = jnp.zeros_like(draft.count_B)
    for m, q in enumerate(draft.distributions or ()):
        count_B += (m < draft.count_B) & ~passes.usable(q.largest_BT)
    return count_B if draft.sampled_B is None else jnp.where(draft.sampled_B, count_B, 0)
