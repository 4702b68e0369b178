"""Accepting drafts so that what is emitted follows the target's distribution exactly.

`rejection` (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
algorithm 1; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative
Sampling", algorithm 2): a draft d is accepted with probability min(1, p(d) / q(d)); the first one
that is not is replaced by a draw from the residual max(p - q, 0). That is the coupling of p and q
that agrees most often.

`coupled`: the target's token is drawn as if there were no drafts, from its own distribution with the noise
of its position, and drafts are accepted for as long as they equal it. The drafter uses the same
noise. It agrees a little less often, but the text for a given seed is exactly that of plain
sampling, whatever the drafter.

Temperature 0 is a distribution that is one at a single token, in both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax.kernels import sampling as passes
from specjax.kernels.sampling import AxisName, Distribution
from specjax.sampling import SamplingArrays, Stream

MODES = ("rejection", "coupled")


class Verified(NamedTuple):
    """Outcome of a round.

    Attributes:
      tokens_BT: int32 `[B, T]`, accepted drafts, then one token of the target's own; what follows
        means nothing.
      accepted_B: int32 `[B]`, number of accepted drafts.
      usable_BT: bool `[B, T]`, whether the target's logits were numbers, of which a token can be
        drawn. Where they were not, the token means nothing.
    """

    tokens_BT: jax.Array
    accepted_B: jax.Array
    usable_BT: jax.Array


def verify(
    mode: str,
    logits_BTV: jax.Array,
    draft_BM: jax.Array,
    count_B: jax.Array,
    draft_distribution: tuple[Distribution, ...] | None,
    sampling: SamplingArrays,
    position_B: jax.Array,
    *,
    num_valid: int | None = None,
    axis_name: AxisName = None,
    implementation: str | None = None,
) -> Verified:
    """Verifies a chain of K drafts with the target's logits at T = K + 1 positions.

    Args:
      mode: one of `MODES` (static).
      logits_BTV: the target's, after the pending token and after each draft.
      draft_BM: int32 drafts. K may be 0.
      count_B: int32, how many of the K drafts are real in each row; the others are never accepted.
      draft_distribution: the K distributions that the drafts were drawn from, see `kernels.sampling.reject`; None for
        deterministic guesses (a distribution of one on the guess). Not used by `coupled`.
      sampling: temperatures, filters and seeds.
      position_B: int32 absolute position of the first token that this round emits.
      num_valid, axis_name, implementation: as for `sampling.draw`.
    """
    options = dict(num_valid=num_valid, axis_name=axis_name, implementation=implementation)
    T = logits_BTV.shape[1]
    position_BT = position_B[:, None] + jnp.arange(T)
    # Without drafts or temperature there is nothing that could be rejected by chance.
    if mode == "coupled" or T == 1 or sampling.temperature_B is None:
        tokens_BT, distribution = sampling_lib.draw(
            logits_BTV, sampling, position_BT, Stream.TARGET, **options
        )
        accepted_B = passes.accepted_prefix(tokens_BT[:, :-1] == draft_BM, count_B)
        return Verified(tokens_BT, accepted_B, passes.usable(distribution.largest_BT))
    argmax_BT, distribution = sampling_lib.draw(logits_BTV, sampling, None, None, **options)
    u_BM = sampling_lib.uniform(sampling, position_BT[:, :-1], Stream.ACCEPT)
    key_BT2 = sampling_lib.keys(sampling, position_BT, Stream.TARGET)
    accepted_B, own_B = passes.reject(
        distribution,
        argmax_BT,
        draft_BM,
        count_B,
        draft_distribution,
        sampling.temperature_B,
        u_BM,
        key_BT2,
        **options,
    )
    drafts_BT = jnp.pad(draft_BM, ((0, 0), (0, 1)))
    tokens_BT = jnp.where(jnp.arange(T) < accepted_B[:, None], drafts_BT, own_B[:, None])
    return Verified(tokens_BT, accepted_B, passes.usable(distribution.largest_BT))
