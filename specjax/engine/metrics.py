"""Statistics of speculation: acceptance, and tokens per round as measured and as predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.engine.request import Completion


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Statistics over all rounds of some completions.

    A draft is tested if all drafts before it were accepted and none of them ended the sequence.

    Attributes:
      num_tokens: emitted tokens.
      num_rounds: rounds, counted per sequence.
      rounds_with_drafts: rounds in which the target verified at least one draft.
      tokens_per_round: emitted tokens over rounds.
      tokens_per_drafted_round: the same over rounds with drafts only; NaN if there was none.
      rate: α, accepted drafts over tested drafts; NaN if none was tested.
      by_position: for draft position 1 to K, how often the draft at that position and all before it
        were accepted, over the rounds with a draft there. Drafts after an end-of-sequence token do
        not count. NaN for positions without drafts.
    """

    num_tokens: int
    num_rounds: int
    rounds_with_drafts: int
    tokens_per_round: float
    tokens_per_drafted_round: float
    rate: float
    by_position: tuple[float, ...]


def acceptance(completions: Sequence[Completion], num_speculative_tokens: int) -> Acceptance:
    """Returns statistics of completions.

    Args:
      completions: results of one or more calls of `specjax.generate`.
      num_speculative_tokens: K of these calls; 0 without speculation.
    """
    drafted = _all_rounds(completions, "drafted")
    accepted = _all_rounds(completions, "accepted")
    emitted = _all_rounds(completions, "emitted")
    has_drafts = drafted > 0
    # If every emitted token was a draft, the last one ended the sequence: no draft was rejected,
    # and those after it were not tested.
    is_ended = emitted == accepted
    is_rejected = (accepted < drafted) & ~is_ended
    reached = np.where(is_ended, accepted, drafted)
    num_accepted = accepted.sum()
    by_position = []
    for position in range(1, num_speculative_tokens + 1):
        num_so_far = (accepted >= position).sum()
        by_position.append(_ratio(num_so_far, (reached >= position).sum()))
    return Acceptance(
        num_tokens=int(emitted.sum()),
        num_rounds=len(emitted),
        rounds_with_drafts=int(has_drafts.sum()),
        tokens_per_round=_ratio(emitted.sum(), len(emitted)),
        tokens_per_drafted_round=_ratio(emitted[has_drafts].sum(), has_drafts.sum()),
        rate=_ratio(num_accepted, num_accepted + is_rejected.sum()),
        by_position=tuple(by_position),
    )


def _all_rounds(completions: Sequence[Completion], name: str) -> np.ndarray:
    numbers = []
    for completion in completions:
        numbers += getattr(completion, name)
    return np.array(numbers, np.int64)


def expected_tokens(rate: float, num_speculative_tokens: int) -> float:
    """Returns E = (1 - α^(K+1)) / (1 - α), the expected number of tokens per round.

    It holds if each draft is accepted with probability α = `rate`, independently of the others
    (Leviathan et al. 2023, equation 1).
    """
    return float(sum(rate**i for i in range(num_speculative_tokens + 1)))


def _ratio(part, whole) -> float:
    return float(part / whole) if whole else float("nan")
