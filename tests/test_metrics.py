"""Acceptance statistics, compared with figures computed by hand."""

import math

import pytest

from specjax.engine import metrics
from specjax.engine.generate import Completion


def completion(*rounds: tuple[int, int, int], reason: str = "length") -> Completion:
    """From (drafted, accepted, emitted) of each round."""
    drafted, accepted, emitted = zip(*rounds, strict=True)
    return Completion((1,), (7,) * sum(emitted), None, reason, drafted, accepted, emitted)


def test_rounds_with_and_without_rejections():
    stats = metrics.acceptance(
        [completion((3, 3, 4), (3, 1, 2), (3, 0, 1)), completion((3, 2, 3))], 3
    )
    assert (stats.num_tokens, stats.num_rounds, stats.rounds_with_drafts) == (10, 4, 4)
    assert stats.tokens_per_round == stats.tokens_per_drafted_round == 10 / 4
    # Six drafts are accepted; every round but the first rejects one.
    assert stats.rate == 6 / 9
    assert stats.by_position == (3 / 4, 2 / 4, 1 / 4)


def test_drafts_after_the_end_do_not_count():
    """The second of four drafts ends the sequence: no draft is rejected, and no bonus token
    follows."""
    stats = metrics.acceptance([completion((4, 2, 2), reason="stop")], 4)
    assert (stats.num_tokens, stats.rate) == (2, 1.0)
    assert stats.by_position[:2] == (1.0, 1.0)
    assert all(map(math.isnan, stats.by_position[2:])), "drafts after the end do not count"


def test_an_end_by_the_recovered_token_is_a_rejection():
    assert metrics.acceptance([completion((4, 2, 3), reason="stop")], 4).rate == 2 / 3


def test_the_budget_shortens_the_last_round():
    """With four tokens left, three are drafted and one is the bonus token; with one left, none
    is."""
    stats = metrics.acceptance(
        [completion((7, 7, 8), (3, 3, 4)), completion((7, 7, 8), (0, 0, 1))], 7
    )
    assert stats.rate == 1.0
    assert stats.by_position == (1.0,) * 7
    assert (stats.num_rounds, stats.rounds_with_drafts, stats.tokens_per_round) == (4, 3, 21 / 4)
    assert stats.tokens_per_drafted_round == 20 / 3


def test_a_position_counts_the_rounds_that_drafted_it():
    stats = metrics.acceptance([completion((1, 0, 1), (2, 1, 2), (2, 2, 3))], 3)
    assert stats.by_position[:2] == (2 / 3, 1 / 2)
    assert math.isnan(stats.by_position[2])
    assert stats.rate == 3 / 5


def test_rounds_without_drafts():
    stats = metrics.acceptance([completion((0, 0, 1), (0, 0, 1))], 2)
    assert (
        stats.num_tokens,
        stats.num_rounds,
        stats.rounds_with_drafts,
        stats.tokens_per_round,
    ) == (2, 2, 0, 1.0)
    assert math.isnan(stats.rate)
    assert math.isnan(stats.tokens_per_drafted_round)
    assert len(stats.by_position) == 2
    assert all(map(math.isnan, stats.by_position))


def test_plain_decoding_has_no_positions():
    assert metrics.acceptance([completion((0, 0, 1))], 0).by_position == ()


def test_later_positions_are_accepted_less_often():
    rounds = [(5, n, n + 1) for n in (0, 3, 5, 1, 1, 2, 5, 0, 4)]
    stats = metrics.acceptance([completion(*rounds)], 5)
    assert list(stats.by_position) == sorted(stats.by_position, reverse=True)
    # Their sum over the positions is the number of accepted drafts per round.
    assert sum(stats.by_position) == pytest.approx(stats.tokens_per_round - 1)
    assert stats.by_position[0] == 7 / 9


@pytest.mark.parametrize("K", [0, 1, 3, 7])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.75, 0.999])
def test_expected_tokens_is_the_closed_formula(rate, K):
    assert metrics.expected_tokens(rate, K) == pytest.approx(
        (1 - rate ** (K + 1)) / (1 - rate), rel=1e-9
    )


def test_expected_tokens_at_the_ends():
    assert [metrics.expected_tokens(1.0, K) for K in (0, 1, 5)] == [1, 2, 6]
    assert [metrics.expected_tokens(0.0, K) for K in (0, 1, 5)] == [1, 1, 1]


def test_statistics_of_independent_drafts_agree_with_the_formula():
    """All outcomes for K = 3 and α = 1/2, by their probabilities."""
    rounds = [(3, 0, 1)] * 4 + [(3, 1, 2)] * 2 + [(3, 2, 3)] + [(3, 3, 4)]
    stats = metrics.acceptance([completion(*rounds)], 3)
    assert stats.rate == 0.5
    assert stats.by_position == (0.5, 0.25, 0.125)
    assert stats.tokens_per_round == metrics.expected_tokens(0.5, 3)
