"""The law of what verification emits, added up exactly over every draft and every way of accepting it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling as sampling_lib
from specjax import verify
from specjax.sampling import SamplingParams, Stream

ACCEPT = jax.jit(verify.accept)


def random_law(rng, V):
    return rng.dirichlet(np.full(V, 0.7)).astype(np.float32)


def with_zeros(rng, V):
    law = random_law(rng, V)
    law[rng.permutation(V)[: rng.integers(1, V)]] = 0
    return law / law.sum()


def one_hot(rng, V):
    return np.eye(V, dtype=np.float32)[rng.integers(V)]


# How the target's law p and the drafter's q of a context are made. Without q, the drafter's guess is certain.
KINDS = {
    "random": (random_law, random_law),
    "q has zeros": (random_law, with_zeros),
    "p has zeros": (with_zeros, random_law),
    "both have zeros": (with_zeros, with_zeros),
    "equal": (random_law, None),
    "p one-hot": (one_hot, random_law),
    "q one-hot": (random_law, one_hot),
    "both one-hot": (one_hot, one_hot),
    "guess": (random_law, "guess"),
    "guess, p one-hot": (one_hot, "guess"),
    "guess, p has zeros": (with_zeros, "guess"),
}


def acceptance_probabilities(law_DTV, draft_DK, count_D, q_DKV):
    """P(draft i is accepted | those before it are), from the product's answers alone, float64 `[D, K]`.

    Acceptance is monotone in its uniform, so the threshold is found by bisection, with the uniforms before it at 0.
    """
    D, K = draft_DK.shape
    threshold_DK = np.zeros((D, K))
    for i in range(K):
        low_D, high_D = np.zeros(D, np.float32), np.ones(D, np.float32)
        for _ in range(30):
            u_DK = np.zeros((D, K), np.float32)
            u_DK[:, i] = (low_D + high_D) / 2
            accepted_D = np.asarray(ACCEPT(law_DTV, draft_DK, count_D, q_DKV, u_DK)[0])
            low_D, high_D = np.where(accepted_D > i, u_DK[:, i], low_D), np.where(accepted_D > i, high_D, u_DK[:, i])
        threshold_DK[:, i] = high_D  # 1 where every uniform is accepted
        threshold_DK[low_D == 0, i] = 0  # where none is
    return threshold_DK


def emitted_law(p, q, V, K, count):
    """Joint law of the K + 1 tokens that follow a context, where the first come from one round and the rest from p."""
    contexts = [context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)]
    if q == "guess":
        guess = {context: (7 * sum(context) + len(context) + 1) % V for context in contexts}
        drafts = [()]
        for _ in range(K):
            drafts = [(*draft, guess[draft]) for draft in drafts]
        weight_D, q_DKV = np.ones(1), None
    else:
        drafts = list(itertools.product(range(V), repeat=K))
        weight_D = np.array([np.prod([np.float64(q[d[:i]][d[i]]) for i in range(K)]) for d in drafts])
        q_DKV = np.array([[q[draft[:i]] for i in range(K)] for draft in drafts])
    draft_DK = np.array(drafts, np.int32)
    law_DTV = np.array([[p[draft[:i]] for i in range(K + 1)] for draft in drafts])
    count_D = np.full(len(drafts), count, np.int32)
    threshold_DK = acceptance_probabilities(law_DTV, draft_DK, count_D, q_DKV)

    law = np.zeros((V,) * (K + 1))
    for n in range(count + 1):
        # The first n are accepted; the uniform after them is the largest there is, which rejects if anything does.
        u_DK = np.zeros(draft_DK.shape, np.float32)
        u_DK[:, n:] = np.nextafter(np.float32(1), np.float32(0))
        residual_DV = np.asarray(ACCEPT(law_DTV, draft_DK, count_D, q_DKV, u_DK)[1], np.float64)
        for d, draft in enumerate(drafts):
            weight = weight_D[d] * threshold_DK[d, :n].prod() * (1 - threshold_DK[d, n] if n < count else 1)
            if weight < 1e-12:
                continue
            own_V = residual_DV[d] / residual_DV[d].sum()
            for rest in itertools.product(range(V), repeat=K + 1 - n):
                text = draft[:n] + rest
                follow = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(n + 1, K + 1)])
                law[text] += weight * own_V[rest[0]] * follow
    return law


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("V", "K"), [(6, 1), (4, 2), (3, 3)])
def test_the_emitted_law_is_the_targets(V, K, kind):
    """Exact to 1e-6: the laws are float32 inputs here, and what is done with them in float32 rounds at 6e-8 a step."""
    make_p, make_q = KINDS[kind]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        contexts = [context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)]
        p = {context: make_p(rng, V) for context in contexts}
        q = make_q if make_q == "guess" else {context: make_q(rng, V) if make_q else p[context] for context in contexts}
        target = np.zeros((V,) * (K + 1))
        for text in itertools.product(range(V), repeat=K + 1):
            target[text] = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(K + 1)])
        for count in range(K + 1):
            np.testing.assert_allclose(emitted_law(p, q, V, K, count), target, atol=1e-6, rtol=0)


def test_nothing_agrees_more_often():
    """The acceptance of the first draft is the overlap of the laws, the most that any coupling can have."""
    rng = np.random.default_rng(0)
    V = 6
    p_V, q_V = random_law(rng, V), random_law(rng, V)
    threshold_D1 = acceptance_probabilities(np.tile(p_V, (V, 2, 1)), np.arange(V, dtype=np.int32)[:, None],
                                            np.ones(V, np.int32), np.tile(q_V, (V, 1, 1)))
    np.testing.assert_allclose(threshold_D1[:, 0] @ q_V, np.minimum(p_V, q_V).sum(), atol=1e-6)


def test_both_ends_of_the_uniform():
    """u = 0 accepts whatever the target can emit and nothing else; no u that occurs rejects where p exceeds q."""
    law_BTV = np.tile(np.float32([0, 1e-30, 0.25, 0.75]), (4, 2, 1))
    q_BKV = np.tile(np.float32([0.5, 0.5, 0, 0]), (4, 1, 1))
    draft_BK, count_B = np.array([[0], [1], [2], [3]], np.int32), np.ones(4, np.int32)
    last = np.nextafter(np.float32(1), np.float32(0))
    for q, u, accepted in [(q_BKV, 0.0, [0, 1, 1, 1]), (None, 0.0, [0, 1, 1, 1]), (q_BKV, last, [0, 0, 1, 1]),
                           (None, last, [0, 0, 0, 0])]:
        u_BK = np.full((4, 1), u, np.float32)
        assert ACCEPT(law_BTV, draft_BK, count_B, q, u_BK)[0].tolist() == accepted
    certain_BTV = np.tile(np.eye(4, dtype=np.float32)[2], (1, 2, 1))
    assert ACCEPT(certain_BTV, np.array([[2]]), np.array([1]), None, np.full((1, 1), last))[0].tolist() == [1]


def sampling_of(seed_B, temperature=1.0):
    B = len(seed_B)
    return SamplingParams(jnp.full(B, temperature), jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.zeros(B),
                          jnp.asarray(seed_B, jnp.uint32))


@pytest.mark.parametrize("mode", verify.MODES)
def test_without_drafts_both_modes_draw_the_targets_own_token(mode):
    rng = np.random.default_rng(1)
    law_BTV = np.array([[random_law(rng, 5)] for _ in range(64)])
    sampling, position_B = sampling_of(range(64)), jnp.arange(64)
    none_BK, count_B = jnp.zeros((64, 0), jnp.int32), jnp.zeros(64, jnp.int32)
    verified = verify.verify(mode, law_BTV, none_BK, count_B, None, sampling, position_B)
    expected_BT = sampling_lib.draw(law_BTV, sampling, position_B[:, None], Stream.TARGET)
    np.testing.assert_array_equal(verified.tokens_BT, expected_BT)
    assert len(np.unique(expected_BT)) == 5 and not verified.accepted_B.any()


def test_coupled_emits_what_plain_sampling_would_draw_and_accepts_what_equals_it():
    rng = np.random.default_rng(2)
    B, K, V = 256, 3, 4
    law_BTV = np.array([[random_law(rng, V) for _ in range(K + 1)] for _ in range(B)])
    draft_BK, count_B = rng.integers(0, V, (B, K), np.int32), rng.integers(0, K + 1, B, np.int32)
    sampling, position_B = sampling_of(range(B)), jnp.asarray(rng.integers(1, 50, B))
    verified = verify.verify("coupled", law_BTV, draft_BK, count_B, None, sampling, position_B)
    own_BT = np.asarray(sampling_lib.draw(law_BTV, sampling, position_B[:, None] + jnp.arange(K + 1), Stream.TARGET))
    for b in range(B):
        agree = [*(own_BT[b, :K] == draft_BK[b])[: count_B[b]], False].index(False)
        assert verified.accepted_B[b] == agree
        np.testing.assert_array_equal(verified.tokens_BT[b, : agree + 1], own_BT[b, : agree + 1])


@pytest.mark.parametrize("mode", verify.MODES)
def test_temperature_zero_accepts_the_leading_drafts_that_are_the_most_likely_token(mode):
    logits_BTV = np.random.default_rng(3).standard_normal((32, 4, 6)).astype(np.float32)
    sampling = sampling_of(range(32), 0.0)
    best_BT = logits_BTV.argmax(-1)
    draft_BK = best_BT[:, :3].astype(np.int32)
    wrong_B = np.arange(32) % 4
    for b in np.flatnonzero(wrong_B < 3):
        draft_BK[b, wrong_B[b]] = (draft_BK[b, wrong_B[b]] + 1) % 6
    law_BTV = sampling_lib.probabilities(logits_BTV, sampling)
    verified = verify.verify(mode, law_BTV, draft_BK, jnp.full(32, 3), None, sampling, jnp.arange(32))
    np.testing.assert_array_equal(verified.accepted_B, wrong_B)
    for b in range(32):
        np.testing.assert_array_equal(verified.tokens_BT[b, : wrong_B[b] + 1], best_BT[b, : wrong_B[b] + 1])


def test_a_guess_outside_the_vocabulary_is_rejected_and_leaves_the_targets_law():
    """A prompt may hold ids that the target must not emit, and prompt lookup repeats them."""
    law_BTV = np.tile(np.float32([0.2, 0.3, 0.5]), (1, 2, 1))
    for u in (0.0, 0.5):
        accepted_B, residual_BV = ACCEPT(law_BTV, np.array([[3]]), np.array([1]), None, np.full((1, 1), u, np.float32))
        assert accepted_B.tolist() == [0]
        np.testing.assert_array_equal(residual_BV, law_BTV[:, 0])
