"""Verification methods, compared with plain sampling.

tests/kernels tests the emitted distribution and the passes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as sampling_lib
from specjax import verify
from specjax.config import Runtime
from specjax.drafters.base import Draft
from specjax.sampling import SamplingArrays, Stream

VERIFY = jax.jit(verify.verify, static_argnums=(0, 1))
SAMPLE = jax.jit(sampling_lib.sample, static_argnums=(0, 4))
RUNTIME = Runtime()


def sampling_of(seed_B, temperature=1.0):
    return SamplingArrays(np.uint32(seed_B), np.full(len(seed_B), temperature, np.float32))


def random_logits(seed, *shape):
    return np.log(
        np.random.default_rng(seed).dirichlet(np.full(shape[-1], 0.7), shape[:-1])
    ).astype(np.float32)


@pytest.mark.parametrize("mode", verify.METHODS)
def test_without_drafts_both_methods_sample_the_bonus_token(mode):
    logits_BTV = random_logits(1, 64, 1, 5)
    sampling, position_B = sampling_of(range(64)), jnp.arange(64)
    none_BM, count_B = jnp.zeros((64, 0), jnp.int32), jnp.zeros(64, jnp.int32)
    verified = VERIFY(mode, RUNTIME, logits_BTV, Draft(none_BM, count_B), sampling, position_B)
    expected_BT, _ = SAMPLE(RUNTIME, logits_BTV, sampling, position_B[:, None], Stream.TARGET)
    np.testing.assert_array_equal(verified.tokens_BT, expected_BT)
    assert len(np.unique(expected_BT)) == 5 and not verified.accepted_B.any()


def test_coupled_emits_the_tokens_of_plain_sampling_and_accepts_equal_drafts():
    B, K, V = 256, 3, 4
    rng = np.random.default_rng(2)
    logits_BTV = random_logits(2, B, K + 1, V)
    draft_BM, count_B = rng.integers(0, V, (B, K), np.int32), rng.integers(0, K + 1, B, np.int32)
    sampling, position_B = sampling_of(range(B)), jnp.asarray(rng.integers(1, 50, B))
    verified = VERIFY(
        "coupled", RUNTIME, logits_BTV, Draft(draft_BM, count_B), sampling, position_B
    )
    plain_BT = np.asarray(
        SAMPLE(
            RUNTIME, logits_BTV, sampling, position_B[:, None] + jnp.arange(K + 1), Stream.TARGET
        )[0]
    )
    for b in range(B):
        agree = [*(plain_BT[b, :K] == draft_BM[b])[: count_B[b]], False].index(False)
        assert verified.accepted_B[b] == agree
        np.testing.assert_array_equal(verified.tokens_BT[b, : agree + 1], plain_BT[b, : agree + 1])


@pytest.mark.parametrize("temperature", [0.0, None])
@pytest.mark.parametrize("mode", verify.METHODS)
def test_temperature_zero_accepts_the_leading_drafts_that_are_greedy_tokens(mode, temperature):
    """With temperature 0 per row, and without temperatures."""
    logits_BTV = np.random.default_rng(3).standard_normal((32, 4, 6)).astype(np.float32)
    sampling = sampling_of(range(32), 0.0)
    if temperature is None:
        sampling = sampling.replace(temperature_B=None)
    best_BT = logits_BTV.argmax(-1)
    draft_BM = best_BT[:, :3].astype(np.int32)
    wrong_B = np.arange(32) % 4
    for b in np.flatnonzero(wrong_B < 3):
        draft_BM[b, wrong_B[b]] = (draft_BM[b, wrong_B[b]] + 1) % 6
    verified = VERIFY(
        mode, RUNTIME, logits_BTV, Draft(draft_BM, jnp.full(32, 3)), sampling, jnp.arange(32)
    )
    np.testing.assert_array_equal(verified.accepted_B, wrong_B)
    for b in range(32):
        np.testing.assert_array_equal(
            verified.tokens_BT[b, : wrong_B[b] + 1], best_BT[b, : wrong_B[b] + 1]
        )


@pytest.mark.parametrize("mode", verify.METHODS)
def test_invalid_ids_are_neither_sampled_nor_accepted(mode):
    """The largest logit is that of a column that pads the embedding, and the draft is its id."""
    logits_BTV = random_logits(4, 128, 3, 6)
    logits_BTV[..., 5] = 9
    draft_BM = np.full((128, 2), 5, np.int32)
    for sampling in (sampling_of(range(128)), SamplingArrays(jnp.arange(128, dtype=jnp.uint32))):
        verified = VERIFY(
            mode,
            Runtime(num_valid_tokens=5),
            logits_BTV,
            Draft(draft_BM, jnp.full(128, 2)),
            sampling,
            jnp.arange(128),
        )
        assert not verified.accepted_B.any()
        assert set(np.unique(verified.tokens_BT[:, 0])) == set(range(5))
