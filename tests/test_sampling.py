"""Distributions, compared with a step-by-step reference in float64, and noise."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as sampling_lib
from specjax.config import Runtime
from specjax.kernels.sampling import inverse
from specjax.sampling import SamplingArrays, Stream
from support.distributions import reference_distribution


@jax.jit
def PROBABILITIES(logits_BTV, sampling):
    """The probabilities of the distributions of `sample`, float32 `[B, T, V]`."""
    argmax_BT, distribution = sampling_lib.sample(Runtime(), logits_BTV, sampling, None, None)
    temperature_B11 = sampling.temperature_B[:, None, None]
    weight_BTV = jnp.exp(
        (logits_BTV - distribution.largest_BT[..., None]) * inverse(temperature_B11)
    )
    probs_BTV = (
        jnp.where(logits_BTV >= distribution.threshold_BT[..., None], weight_BTV, 0)
        / distribution.total_BT[..., None]
    )
    return jnp.where(
        temperature_B11 == 0, jax.nn.one_hot(argmax_BT, logits_BTV.shape[-1]), probs_BTV
    )


SAMPLE = jax.jit(sampling_lib.sample, static_argnums=(0, 4))
RUNTIME = Runtime()


def params(B, temperature=1.0, top_k=None, top_p=None, min_p=None, seed=0):
    def rows(value, dtype):
        return (
            None if value is None else jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (B,)))
        )

    return SamplingArrays(
        rows(seed, np.uint32),
        rows(temperature, np.float32),
        rows(top_k, np.int32),
        rows(top_p, np.float32),
        rows(min_p, np.float32),
    )


def test_temperature_comes_before_top_p():
    """In the other order, a nucleus of 0.8 would hold two tokens, not three."""
    probs_BTV = PROBABILITIES(
        jnp.array([[[3.0, 2.0, 1.0, 0.0]]]), params(1, temperature=2.0, top_p=0.8)
    )
    np.testing.assert_allclose(probs_BTV[0, 0], [0.507, 0.307, 0.186, 0], atol=6e-4)


FILTERS = [
    dict(),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=300),
    dict(top_k=10**6),
    dict(top_p=0.01),
    dict(top_p=0.5),
    dict(top_p=0.9999),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=20, top_p=0.7),
    dict(top_k=20, top_p=0.7, min_p=0.2),
    dict(top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("V", [5, 256, 600])
def test_temperature_and_filters_apply_per_row(V):
    """All combinations in one batch, with steep and with flat logits."""
    rows = [dict(temperature=t, **filters) for filters in FILTERS for t in (0.0, 0.5, 1.0, 3.0)]
    logits_BTV = np.random.default_rng(V).standard_normal((len(rows), 2, V)).astype(np.float32) * [
        [[5.0], [0.2]]
    ]
    logits_BTV = logits_BTV.astype(np.float32)
    columns = {
        name: [row.get(name, default) for row in rows]
        for name, default in dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0).items()
    }
    probs_BTV = np.asarray(PROBABILITIES(logits_BTV, params(len(rows), **columns)))
    np.testing.assert_allclose(probs_BTV.sum(-1), 1, atol=1e-5)
    for b, row in enumerate(rows):
        for t in range(2):
            expected_V = reference_distribution(logits_BTV[b, t], **row)
            np.testing.assert_allclose(probs_BTV[b, t], expected_V, atol=2e-6, err_msg=str(row))


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_that_are_off_in_all_rows_change_nothing(filters):
    """Filters that no row uses need not be arrays."""
    logits_BTV = 3 * np.random.default_rng(5).standard_normal((2, 2, 300)).astype(np.float32)
    off = dict(top_k=0, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(
        PROBABILITIES(logits_BTV, params(2, **filters)),
        PROBABILITIES(logits_BTV, params(2, **{**off, **filters})),
    )


def test_both_searches_find_the_same_threshold():
    """A CPU searches bit by bit, a GPU four bits at a time. Logits have many magnitudes and both
    signs."""
    rng = np.random.default_rng(6)
    logits_BTV = (
        rng.standard_normal((8, 2, 500)) * 10.0 ** rng.integers(-3, 2, (8, 2, 500))
    ).astype(np.float32)
    logits_BTV[..., ::7] = -np.inf
    sampling = params(
        8,
        temperature=20.0,
        top_k=[0, 1, 5, 50, 499, 7, 0, 3],
        top_p=[0.3, 1.0, 0.9, 0.5, 0.999, 0.1, 1.0, 0.7],
    )
    by_bits = jax.jit(sampling_lib.thresholds, static_argnums=0)(RUNTIME, logits_BTV, sampling)
    with mock.patch.object(jax.lax, "platform_dependent", lambda *, cpu, default: default()):
        by_digits = jax.jit(lambda *args: sampling_lib.thresholds(RUNTIME, *args))(
            logits_BTV, sampling
        )
    np.testing.assert_array_equal(by_bits, by_digits)
    assert len(np.unique(by_bits)) > 8


def test_top_k_keeps_all_tokens_that_tie():
    probs_BTV = PROBABILITIES(jnp.array([[[1.0, 1.0, 1.0, 0.0]]]), params(1, top_k=2))
    np.testing.assert_allclose(probs_BTV[0, 0], [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-6)


def test_greedy_is_one_hot_on_the_first_argmax():
    logits_BTV = jnp.array([[[0.0, 2.0, 2.0, -1.0]], [[0.0, 2.0, 2.0, -1.0]]])
    for temperatures in ([0.0, 0.0], [0.0, 1.0]):
        probs_BTV = PROBABILITIES(
            logits_BTV, params(2, temperature=temperatures, top_k=2, top_p=0.5)
        )
        assert probs_BTV[0, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-41, 1e-37, 1e-6, 1e6])
def test_extreme_temperatures_give_a_distribution(temperature):
    """Sampled tokens follow it, too."""
    logits_BTV = jnp.tile(jnp.array([40.0, -7.0, 39.0, 0.0]), (400, 1, 1))
    sampling = params(400, temperature=temperature, seed=np.arange(400))
    probs_BTV = PROBABILITIES(logits_BTV, sampling)
    expected = [1, 0, 0, 0] if temperature < 1 else [0.25] * 4
    np.testing.assert_allclose(probs_BTV[0, 0], expected, atol=1e-4)
    token_BT, _ = SAMPLE(
        RUNTIME, logits_BTV, sampling, jnp.zeros((400, 1), jnp.int32), Stream.TARGET
    )
    assert (np.bincount(np.asarray(token_BT)[:, 0], minlength=4) > 60).tolist() == [
        p > 0 for p in expected
    ]


def test_samples_follow_the_distribution():
    """Within six standard deviations, with fixed seeds; tokens of probability 0 never occur."""
    probs_V = np.float32([0.02, 0, 0.5, 0.3, 0, 0.18])
    B = 100_000
    with np.errstate(divide="ignore"):
        logits_BTV = jnp.tile(np.log(probs_V), (B, 1, 1))
    tokens_B1, _ = SAMPLE(
        RUNTIME, logits_BTV, params(B, seed=np.arange(B)), jnp.full((B, 1), 7), Stream.TARGET
    )
    share_V = np.bincount(np.asarray(tokens_B1)[:, 0], minlength=6) / B
    assert (np.abs(share_V - probs_V) <= 6 * np.sqrt(probs_V * (1 - probs_V) / B)).all()
    assert share_V[1] == share_V[4] == 0


def test_noise_depends_on_seed_position_and_stream_only():
    """Not on the row, other rows, the column or the number of columns."""
    V, rng = 64, np.random.default_rng(0)
    probs_V = rng.dirichlet(np.ones(V)).astype(np.float32)
    seed_B, position_BT = (
        np.array([5, 5, 9, 2**32 - 1], np.uint32),
        np.array([[3, 4], [4, 3], [3, 3], [3, 4]]),
    )
    distributions = jnp.tile(np.log(probs_V), (4, 2, 1))
    tokens_BT = np.asarray(
        SAMPLE(RUNTIME, distributions, params(4, seed=seed_B), position_BT, Stream.TARGET)[0]
    )
    assert (
        tokens_BT[0].tolist() == tokens_BT[1, ::-1].tolist() and tokens_BT[2, 0] == tokens_BT[2, 1]
    )
    for b in range(4):
        for t in range(2):
            alone, _ = SAMPLE(
                RUNTIME,
                distributions[:1, :1],
                params(1, seed=seed_B[b]),
                position_BT[b : b + 1, t : t + 1],
                Stream.TARGET,
            )
            assert alone[0, 0] == tokens_BT[b, t]
    mixed = params(4, seed=seed_B, temperature=[1.0, 0.0, 1.0, 1.0])
    mixed_BT = np.asarray(SAMPLE(RUNTIME, distributions, mixed, position_BT, Stream.TARGET)[0])
    np.testing.assert_array_equal(mixed_BT[[0, 2, 3]], tokens_BT[[0, 2, 3]])


def test_seeds_positions_and_streams_have_independent_noise():
    """The uniforms of 3 streams x 300 positions x 40 seeds rarely repeat and do not correlate."""
    seed_B, position_BT = np.arange(40) * 7919, np.tile(np.arange(300), (40, 1))
    u = np.stack(
        [sampling_lib.uniform(params(40, seed=seed_B), position_BT, stream) for stream in Stream]
    )
    assert u.min() >= 0 and u.max() < 1
    assert len(np.unique(u)) > u.size * 0.99  # with 24 bits, a few hundred coincide by chance
    flat = u.reshape(3, -1)
    shifted = np.roll(u, 1, axis=2).reshape(3, -1)
    correlation = np.corrcoef(np.concatenate([flat, shifted])) - np.eye(6)
    assert np.abs(correlation).max() < 6 / np.sqrt(flat.shape[1])


def test_params_are_a_pytree_of_rows():
    assert [field.name for field in dataclasses.fields(SamplingArrays)] == [
        "seed_B",
        "temperature_B",
        "top_k_B",
        "top_p_B",
        "min_p_B",
    ]
    assert len(jax.tree.leaves(params(3, top_p=0.5))) == 3
