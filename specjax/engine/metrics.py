"""What a generation says about speculation: acceptance, tokens per round, and what the standard
formulas predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.engine.generate import Completion


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Statistics over all rounds of some completions.

    Attributes:
      num_tokens: tokens emitted.
      num_rounds: rounds, counted per sequence.
      rounds_with_drafts: of those, rounds in which the target checked at least one draft.
      tokens_per_round: emitted tokens over rounds.
      tokens_per_drafted_round: the same over rounds with drafts only; NaN where there was none.
      rate: α, accepted drafts over drafts that were put to the test. Drafts behind a rejected one,
        or behind an end-of-sequence token, were not. NaN where there was none.
      by_position: for draft position 1 ... K, the share of the rounds that drafted so far in which
        the draft at that position was accepted; all before it then were, too. Drafts behind an
        end-of-sequence token do not count. NaN for positions that were never drafted.
    """

    num_tokens: int
    num_rounds: int
    rounds_with_drafts: int
    tokens_per_round: float
    tokens_per_drafted_round: float
    rate: float
    by_position: tuple[float, ...]


def acceptance(completions: Sequence[Completion], num_speculative_tokens: int) -> Acceptance:
    """Statistics of completions that were generated with K = `num_speculative_tokens` (0 without
    speculation)."""
    drafted, accepted, emitted = (
        np.array([n for c in completions for n in getattr(c, name)], np.int64)
        for name in ("drafted", "accepted", "emitted")
    )
    rejected = (accepted < drafted) & (
        emitted > accepted
    )  # not so where the last draft emitted ended the sequence
    reached = np.where(
        emitted > accepted, drafted, accepted
    )  # what lies behind an end of sequence counts nowhere
    has_drafts = drafted > 0
    position = np.arange(1, num_speculative_tokens + 1)[:, None]
    return Acceptance(
        num_tokens=int(emitted.sum()),
        num_rounds=len(emitted),
        rounds_with_drafts=int(has_drafts.sum()),
        tokens_per_round=_ratio(emitted.sum(), len(emitted)),
        tokens_per_drafted_round=_ratio(emitted[has_drafts].sum(), has_drafts.sum()),
        rate=_ratio(accepted.sum(), accepted.sum() + rejected.sum()),
        by_position=tuple(
            map(_ratio, (accepted >= position).sum(axis=1), (reached >= position).sum(axis=1))
        ),
    )


def expected_tokens(rate: float, num_speculative_tokens: int) -> float:
    """E = (1 - α^(K+1)) / (1 - α), tokens per round if each draft were accepted with probability α,
    independently of the others (Leviathan et al. 2023, equation 1)."""
    return float(sum(rate**i for i in range(num_speculative_tokens + 1)))


def _ratio(part, whole) -> float:
    return float(part / whole) if whole else float("nan")
