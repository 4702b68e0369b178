"""Laws against a step-by-step reference in float64, and the noise that draws from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import reference_law

from specjax import sampling as sampling_lib
from specjax.sampling import SHORTLIST, SamplingParams, Stream

PROBABILITIES = jax.jit(sampling_lib.probabilities)
DRAW = jax.jit(sampling_lib.draw, static_argnums=3)


def params(B, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    rows = lambda value, dtype: jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (B,)))  # noqa: E731
    return SamplingParams(rows(temperature, np.float32), rows(top_k, np.int32), rows(top_p, np.float32),
                          rows(min_p, np.float32), rows(seed, np.uint32))


def test_temperature_comes_before_top_p():
    """After it, a nucleus of 0.8 of the law at temperature 1 would hold two tokens, not three."""
    law_BTV = PROBABILITIES(jnp.array([[[3.0, 2.0, 1.0, 0.0]]]), params(1, temperature=2.0, top_p=0.8))
    np.testing.assert_allclose(law_BTV[0, 0], [0.507, 0.307, 0.186, 0], atol=6e-4)


FILTERS = [dict(), dict(top_k=1), dict(top_k=7), dict(top_k=SHORTLIST + 40), dict(top_k=10**6), dict(top_p=0.01),
           dict(top_p=0.5), dict(top_p=0.9999), dict(min_p=0.05), dict(min_p=1.0), dict(top_k=20, top_p=0.7),
           dict(top_k=20, top_p=0.7, min_p=0.2), dict(top_p=0.9, min_p=0.01)]


@pytest.mark.parametrize("V", [5, SHORTLIST, SHORTLIST + 344])
def test_every_row_gets_its_own_temperature_and_filters(V):
    """All combinations in one batch, on steep logits and on flat ones, which the short list does not suffice for."""
    rows = [dict(temperature=t, **filters) for filters in FILTERS for t in (0.0, 0.5, 1.0, 3.0)]
    logits_BTV = np.random.default_rng(V).standard_normal((len(rows), 2, V)).astype(np.float32) * [[[5.0], [0.2]]]
    logits_BTV = logits_BTV.astype(np.float32)
    columns = {name: [row.get(name, default) for row in rows]
               for name, default in dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).items()}
    law_BTV = np.asarray(PROBABILITIES(logits_BTV, params(len(rows), **columns)))
    np.testing.assert_allclose(law_BTV.sum(-1), 1, atol=1e-5)
    for b, row in enumerate(rows):
        for t in range(2):
            expected_V = reference_law(logits_BTV[b, t], **row)
            np.testing.assert_allclose(law_BTV[b, t], expected_V, atol=2e-6, err_msg=str(row))


def test_the_short_list_changes_nothing():
    """Rows for which it suffices get the same law alone as beside a row that needs the whole vocabulary."""
    logits_BTV = 4 * np.random.default_rng(0).standard_normal((2, 1, 3 * SHORTLIST)).astype(np.float32)
    logits_BTV[1] *= 0.01
    steep = PROBABILITIES(logits_BTV[[0, 0]], params(2, top_p=0.9))
    mixed = PROBABILITIES(logits_BTV, params(2, top_p=0.9))
    assert (mixed[1] > 0).sum() > SHORTLIST
    np.testing.assert_allclose(mixed[0], steep[0], atol=1e-7)


def test_tokens_that_tie_are_kept_together():
    law_BTV = PROBABILITIES(jnp.array([[[1.0, 1.0, 1.0, 0.0]]]), params(1, top_k=2))
    np.testing.assert_allclose(law_BTV[0, 0], [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)


def test_greedy_is_one_on_the_first_most_likely_token():
    logits_BTV = jnp.array([[[0.0, 2.0, 2.0, -1.0]], [[0.0, 2.0, 2.0, -1.0]]])
    for temperatures in ([0.0, 0.0], [0.0, 1.0]):
        law_BTV = PROBABILITIES(logits_BTV, params(2, temperature=temperatures, top_k=2, top_p=0.5))
        assert law_BTV[0, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-37, 1e-6, 1e6])
def test_extreme_temperatures_give_a_law(temperature):
    logits_BTV = jnp.array([[[40.0, -7.0, 39.0, 0.0]]])
    law_BTV = PROBABILITIES(logits_BTV, params(1, temperature=temperature))
    expected = [1, 0, 0, 0] if temperature < 1 else [0.25] * 4
    np.testing.assert_allclose(law_BTV[0, 0], expected, atol=1e-4)


def test_draws_follow_the_law_and_never_leave_it():
    """Also the laws that are not normalised, as residuals are. Six standard deviations, at a fixed seed."""
    law_V = np.float32([0.02, 0, 0.5, 0.3, 0, 0.08]) * 0.7
    B = 100_000
    tokens_B1 = DRAW(jnp.tile(law_V, (B, 1, 1)), params(B, seed=np.arange(B)), jnp.full((B, 1), 7), Stream.TARGET)
    share_V = np.bincount(np.asarray(tokens_B1)[:, 0], minlength=6) / B
    expected_V = law_V / law_V.sum()
    assert (np.abs(share_V - expected_V) <= 6 * np.sqrt(expected_V * (1 - expected_V) / B)).all()
    assert share_V[1] == share_V[4] == 0


def test_noise_depends_on_seed_position_and_stream_alone():
    """Not on the row, the neighbours, the column, or the number of columns."""
    V, rng = 64, np.random.default_rng(0)
    law_V = rng.dirichlet(np.ones(V)).astype(np.float32)
    seed_B, position_BT = np.array([5, 5, 9, 2**32 - 1], np.uint32), np.array([[3, 4], [4, 3], [3, 3], [3, 4]])
    laws = jnp.tile(law_V, (4, 2, 1))
    tokens_BT = np.asarray(DRAW(laws, params(4, seed=seed_B), position_BT, Stream.TARGET))
    assert tokens_BT[0].tolist() == tokens_BT[1, ::-1].tolist() and tokens_BT[2, 0] == tokens_BT[2, 1]
    for b in range(4):
        for t in range(2):
            alone = DRAW(laws[:1, :1], params(1, seed=seed_B[b]), position_BT[b : b + 1, t : t + 1], Stream.TARGET)
            assert alone[0, 0] == tokens_BT[b, t]
    mixed = params(4, seed=seed_B, temperature=[1.0, 0.0, 1.0, 1.0])
    drawn = np.asarray(DRAW(laws, mixed, position_BT, Stream.TARGET))
    np.testing.assert_array_equal(drawn[[0, 2, 3]], tokens_BT[[0, 2, 3]])


def test_seeds_positions_and_streams_have_independent_noise():
    """Of uniforms for 3 streams x 300 positions x 40 seeds no two are equal but by chance, and none correlate."""
    seed_B, position_BT = np.arange(40) * 7919, np.tile(np.arange(300), (40, 1))
    u = np.stack([sampling_lib.uniform(params(40, seed=seed_B), position_BT, stream) for stream in Stream])
    assert u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) > u.size * 0.99  # 24 bits: a birthday in a few hundred
    flat = u.reshape(3, -1)
    shifted = np.roll(u, 1, axis=2).reshape(3, -1)
    correlation = np.corrcoef(np.concatenate([flat, shifted])) - np.eye(6)
    assert np.abs(correlation).max() < 6 / np.sqrt(flat.shape[1])


def test_params_are_a_pytree_of_rows():
    assert [field.name for field in dataclasses.fields(SamplingParams)] == [
        "temperature_B", "top_k_B", "top_p_B", "min_p_B", "seed_B"]
    assert len(jax.tree.leaves(params(3))) == 5
