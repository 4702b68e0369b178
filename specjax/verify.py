"""Accepting drafts so that what is emitted follows the target's law exactly.

`rejection` (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1; Chen et
al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", algorithm 2): a draft d is accepted
with probability min(1, p(d) / q(d)); the first one that is not is replaced by a draw from the residual max(p - q, 0).
That is the coupling of p and q that agrees most often.

`coupled`: the target's token is drawn as if there were no drafts, from its own law with the noise of its position, and
drafts are accepted for as long as they equal it. The drafter uses the same noise. It agrees a little less often, but
the text for a given seed is exactly that of plain sampling, whatever the drafter.

Temperature 0 is a law that is one at a single token, in both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.sampling import SamplingParams, Stream

MODES = ("rejection", "coupled")


class Verified(NamedTuple):
    """Outcome of a round.

    Attributes:
      tokens_BT: int32 `[B, T]`, accepted drafts, then one token of the target's own; what follows means nothing.
      accepted_B: int32 `[B]`, number of accepted drafts.
    """

    tokens_BT: jax.Array
    accepted_B: jax.Array


def verify(mode: str, law_BTV: jax.Array, draft_BK: jax.Array, count_B: jax.Array, draft_law_BKV: jax.Array | None,
           sampling: SamplingParams, position_B: jax.Array) -> Verified:
    """Verifies a chain of K drafts with the target's laws at T = K + 1 positions.

    Args:
      mode: one of `MODES` (static).
      law_BTV: the target's law after the pending token and after each draft, from `sampling.probabilities`.
      draft_BK: int32 drafts. K may be 0.
      count_B: int32, how many of the K drafts are real in each row; the others are never accepted.
      draft_law_BKV: law that each draft was drawn from; None for deterministic guesses (a law of one on the guess).
        Not used by `coupled`.
      sampling: seeds and temperatures.
      position_B: int32 absolute position of the first token that this round emits.
    """
    T = law_BTV.shape[1]
    position_BT = position_B[:, None] + jnp.arange(T)
    if mode == "coupled":
        tokens_BT = sampling_lib.draw(law_BTV, sampling, position_BT, Stream.TARGET)
        return Verified(tokens_BT, _leading(tokens_BT[:, :-1] == draft_BK, count_B))
    u_BK = sampling_lib.uniform(sampling, position_BT[:, :-1], Stream.ACCEPT)
    accepted_B, residual_BV = accept(law_BTV, draft_BK, count_B, draft_law_BKV, u_BK)
    own_B = sampling_lib.draw(residual_BV[:, None], sampling, (position_B + accepted_B)[:, None], Stream.TARGET)
    drafts_BT = jnp.pad(draft_BK, ((0, 0), (0, 1)))
    return Verified(jnp.where(jnp.arange(T) < accepted_B[:, None], drafts_BT, own_B), accepted_B)


def accept(law_BTV, draft_BK, count_B, draft_law_BKV, u_BK):
    """The deterministic part of `rejection`, given the acceptance uniforms `u_BK`.

    Returns:
      How many drafts are accepted, int32 `[B]`, and the (unnormalised) law of the token that follows them, `[B, V]`:
      the residual max(p - q, 0) after a rejection, and the target's own law where no draft was left to reject.
    """
    K = draft_BK.shape[1]
    p_BK = jnp.take_along_axis(law_BTV[:, :K], draft_BK[..., None], axis=-1)[..., 0]
    q_BK = 1.0 if draft_law_BKV is None else jnp.take_along_axis(draft_law_BKV, draft_BK[..., None], axis=-1)[..., 0]
    # As a product, so that u = 0 accepts whatever the target can emit, and nothing else.
    accepted_B = _leading(u_BK * q_BK < p_BK, count_B)

    p_BV = jnp.take_along_axis(law_BTV, accepted_B[:, None, None], axis=1)[:, 0]
    if K == 0:
        return accepted_B, p_BV
    rejected_B11 = jnp.minimum(accepted_B, K - 1)[:, None, None]
    if draft_law_BKV is None:
        q_BV = jax.nn.one_hot(jnp.take_along_axis(draft_BK, rejected_B11[..., 0], axis=1)[:, 0], p_BV.shape[-1])
    else:
        q_BV = jnp.take_along_axis(draft_law_BKV, rejected_B11, axis=1)[:, 0]
    residual_BV = jnp.maximum(p_BV - jnp.where(accepted_B < count_B, 1.0, 0.0)[:, None] * q_BV, 0)
    # p = q but for rounding: nothing is left, and p itself is right.
    empty_B1 = residual_BV.sum(axis=-1, keepdims=True) == 0
    return accepted_B, jnp.where(empty_B1, p_BV, residual_BV)


def _leading(ok_BK, count_B):
    """Length of the leading run of True among the first `count_B` entries of each row, int32 `[B]`."""
    ok_BK &= jnp.arange(ok_BK.shape[1]) < count_B[:, None]
    return jnp.cumprod(ok_BK.astype(jnp.int32), axis=1).sum(axis=1)
