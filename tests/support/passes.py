"""Cases of the passes over a vocabulary, for every implementation."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verify
from specjax.config import Runtime
from specjax.drafters.base import Draft
from specjax.kernels import dispatch
from specjax.kernels import sampling as kernels
from specjax.kernels.gpu.check import apart
from specjax.kernels.sampling import noise
from specjax.kernels.sampling.partial import join_residuals

LAST = np.nextafter(np.float32(1), np.float32(0))


# Relative error of the ratio of two probabilities whose logarithms are float32.
PRECISION = 4e-6


EXPONENTIAL = jax.jit(noise.exponential)


@functools.cache
def product(implementation: str) -> SimpleNamespace:
    """The jitted functions of the product with one implementation of the passes."""
    jit = functools.partial(jax.jit, static_argnames="num_valid")

    def stats(*args, num_valid):
        return dispatch.function(kernels.__name__, "sample_pass", implementation)(*args, num_valid)

    def reject(
        target,
        argmax_BT,
        draft_BM,
        count_B,
        distributions,
        *noise,
        num_valid=None,
        sampled_B=None,
    ):
        runtime = Runtime(implementation=implementation, num_valid_tokens=num_valid)
        draft = Draft(draft_BM, count_B, sampled_B, distributions)
        return verify.reject(runtime, target, argmax_BT, draft, *noise)

    def residual(target, q, *args, num_valid):
        """`q`: distributions of the drafts, or the tokens of one-hot ones."""
        is_sampled = isinstance(q, tuple)
        draft_B = jnp.zeros_like(args[0]) if is_sampled else q
        residual_pass = dispatch.function(kernels.__name__, "residual_pass", implementation)
        parts = residual_pass(target, q if is_sampled else None, draft_B, None, *args, num_valid)
        return join_residuals(parts)

    return SimpleNamespace(
        sample=jit(functools.partial(kernels.sample_pass, implementation=implementation)),
        reject=jit(reject),
        stats=jit(stats),
        residual=jit(residual),
    )


def softmax(logits_V, temperature, threshold=-np.inf):
    """Probabilities in float64; one-hot on the first argmax at temperature 0."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        return np.eye(len(logits_V))[np.argmax(logits_V)]
    weight_V = np.where(
        logits_V >= threshold, np.exp((logits_V - logits_V.max()) / np.float64(temperature)), 0
    )
    return weight_V / weight_V.sum()


def winner(weight_V, key_2):
    """The token with the largest weight / noise in float64, and whether it wins clearly."""
    noise_V = np.asarray(
        EXPONENTIAL(*map(jnp.int32, key_2), jnp.arange(len(weight_V), dtype=jnp.int32))
    )
    race_V = weight_V / noise_V.astype(np.float64)
    second, first = np.sort(race_V)[-2:]
    return int(np.argmax(race_V)), second < first * (1 - 1e-5)


class Round:
    """Random logits of a target and of a similar draft, in a batch of different rows."""

    def __init__(
        self, passes, V, K=3, dtype=jnp.float32, draft_dtype=None, one_hot=False, valid=None, seed=0
    ):
        rng = np.random.default_rng(seed)
        self.temperature_B = np.float32([1.0, 0.0, 0.6, 1.7, 1.0, 0.9, 0.0, 3.0])
        B = len(self.temperature_B)
        self.valid = V if valid is None else valid
        self.logits_BTV = jnp.asarray(3 * rng.standard_normal((B, K + 1, V)), dtype)
        near_BMV = np.asarray(self.logits_BTV[:, :K], np.float32) + 0.4 * rng.standard_normal(
            (B, K, V)
        )
        self.draft_logits_BMV = jnp.asarray(near_BMV, draft_dtype or dtype)
        # Some rows have filters: about the upper half and the upper tenth of the logits.
        self.threshold_BT = np.full((B, K + 1), -np.inf, np.float32)
        self.threshold_BT[2], self.threshold_BT[5] = 0.0, 3.8 if V > 100 else 0.0
        self.threshold_BM = self.threshold_BT[:, :K]
        self.key_BT2 = rng.integers(-(2**31), 2**31, (B, K + 1, 2)).astype(np.int32)
        self.draft_key_BM2 = rng.integers(-(2**31), 2**31, (B, K, 2)).astype(np.int32)
        self.u_BM = rng.random((B, K)).astype(np.float32)
        self.u_BM[4] = 0  # accepts all
        self.count_B = np.int32([K, K, K, K - 1, K, K, K, 0])
        self.one_hot, self.passes = one_hot, passes
        self.shape = B, K, V

    def distribution(self, b, t, draft=False):
        logits_V = np.asarray(self.draft_logits_BMV if draft else self.logits_BTV, np.float32)[b, t]
        logits_V = np.where(np.arange(len(logits_V)) < self.valid, logits_V, -np.inf)
        return softmax(logits_V, self.temperature_B[b], self.threshold_BT[b, t])

    def sample(self, draft=False, keys=True):
        arrays = (
            (self.draft_logits_BMV, self.threshold_BM, self.draft_key_BM2)
            if draft
            else (self.logits_BTV, self.threshold_BT, self.key_BT2)
        )
        logits, threshold, key = map(jnp.asarray, arrays)
        return self.passes.sample(
            logits, self.temperature_B, threshold, key if keys else None, num_valid=self.valid
        )

    def reject(self):
        if self.one_hot:  # as prompt lookup: probable tokens, and one that cannot be emitted
            draft_BM, draft_distribution = self.sample(draft=True, keys=False)[0], None
            draft_BM = draft_BM.at[0, 0].set(self.valid)
        else:
            draft_BM, distribution = self.sample(draft=True)
            draft_distribution = apart(distribution)
        argmax_BT, distribution = self.sample(keys=False)
        accepted_B, recovered_B = self.passes.reject(
            distribution,
            argmax_BT,
            draft_BM,
            self.count_B,
            draft_distribution,
            self.temperature_B,
            self.u_BM,
            self.key_BT2,
            num_valid=self.valid,
        )
        return np.asarray(draft_BM), np.asarray(accepted_B), np.asarray(recovered_B)

    def check_samples(self):
        sampled_BT, distribution = self.sample()
        B, K, _ = self.shape
        clear = 0
        for b, t in itertools.product(range(B), range(K + 1)):
            probs_V = self.distribution(b, t)
            token, sure = (
                winner(probs_V, self.key_BT2[b, t])
                if self.temperature_B[b]
                else (np.argmax(probs_V), True)
            )
            assert not sure or sampled_BT[b, t] == token
            assert probs_V[sampled_BT[b, t]] > 0
            clear += sure
            if self.temperature_B[b]:  # the distribution for verification
                logit = np.float64(self.logits_BTV[b, t, token])
                weight = np.exp(
                    (logit - np.float64(distribution.largest_BT[b, t])) / self.temperature_B[b]
                )
                np.testing.assert_allclose(
                    weight / np.float64(distribution.total_BT[b, t]), probs_V[token], rtol=2e-6
                )
        assert clear >= B * (K + 1) - 1
        assert len(np.unique(sampled_BT)) > 3

    def check_rejection(self):
        """Decisions and tokens equal the reference's; no uniform or race is close to a tie."""
        draft_BM, accepted_B, recovered_B = self.reject()
        B, K, V = self.shape
        for b in range(B):
            p = [self.distribution(b, t) for t in range(K + 1)]
            q = [
                np.eye(V + 1)[min(draft_BM[b, t], V)][:V]
                if self.one_hot
                else self.distribution(b, t, draft=True)
                for t in range(K)
            ]
            ratio_K = [
                p[t][d] / q[t][d] if d < V and q[t][d] else 0 for t, d in enumerate(draft_BM[b])
            ]
            ok = [
                (p[t][d] > 0)
                if self.temperature_B[b] == 0 and d < V
                else self.u_BM[b, t] < ratio_K[t]
                for t, d in enumerate(draft_BM[b])
            ]
            assert all(
                abs(self.u_BM[b, t] - ratio_K[t]) > 1e-5 or self.u_BM[b, t] == 0 for t in range(K)
            )
            n = [*ok[: self.count_B[b]], False].index(False)
            assert accepted_B[b] == n
            rest_V = np.maximum(p[n] - q[n], 0) if n < self.count_B[b] else p[n]
            token, sure = (
                winner(rest_V, self.key_BT2[b, n])
                if self.temperature_B[b]
                else (np.argmax(p[n]), True)
            )
            assert sure and recovered_B[b] == token
        assert len(np.unique(accepted_B)) > 2


def random_distribution(rng, V):
    return rng.dirichlet(np.full(V, 0.7)).astype(np.float32)


def with_zeros(rng, V):
    distribution = random_distribution(rng, V)
    distribution[rng.permutation(V)[: rng.integers(1, V)]] = 0
    return distribution / distribution.sum()


def one_hot(rng, V):
    return np.eye(V, dtype=np.float32)[rng.integers(V)]


ONE_HOT_DRAFTS = "one-hot drafts"
# How the target's distribution p and the drafter's q are made. Without q, drafts are one-hot.
KINDS = {
    "random": (random_distribution, random_distribution),
    "q has zeros": (random_distribution, with_zeros),
    "p has zeros": (with_zeros, random_distribution),
    "both have zeros": (with_zeros, with_zeros),
    "equal": (random_distribution, None),
    "p one-hot": (one_hot, random_distribution),
    "q one-hot": (random_distribution, one_hot),
    "both one-hot": (one_hot, one_hot),
    "one-hot drafts": (random_distribution, ONE_HOT_DRAFTS),
    "one-hot drafts, p one-hot": (one_hot, ONE_HOT_DRAFTS),
    "one-hot drafts, p has zeros": (with_zeros, ONE_HOT_DRAFTS),
}


class Acceptance:
    """`reject` for distributions p `[D, T, V]` and q `[D, K, V]` (or None), at temperature 1."""

    def __init__(self, passes, probs_DTV, draft_DM, count_D, q_DMV):
        self.passes, self.draft_DM, self.count_D = (
            passes,
            jnp.asarray(draft_DM),
            jnp.asarray(count_D),
        )
        self.probs_DTV = np.asarray(probs_DTV, np.float64)
        self.q_DMV = None if q_DMV is None else np.asarray(q_DMV, np.float64)
        D, self.T, self.V = probs_DTV.shape
        self.temperature_D = jnp.ones(D)
        self.argmax_DT, self.p = self._distribution(probs_DTV)
        self.q = None if q_DMV is None else apart(self._distribution(q_DMV)[1])

    def _distribution(self, distribution):
        with np.errstate(divide="ignore"):
            return self.passes.sample(np.log(distribution), self.temperature_D, None, None)

    def accepted(self, u_DM):
        """The number of accepted drafts, from the statistics of the passes.

        The pass over the residual does not matter here and is that of `xla`.
        """
        key_DT2 = np.zeros((*self.argmax_DT.shape, 2), np.int32)
        return np.asarray(
            product("xla").reject(
                self.p,
                self.argmax_DT,
                self.draft_DM,
                self.count_D,
                self.q,
                self.temperature_D,
                u_DM,
                key_DT2,
            )[0]
        )

    def residual(self, n_D):
        """Returns the distribution of the token after n accepted drafts, `[D, V]`.

        Each token is a shard, whose mass is the weight that the pass gave to the token.
        """
        n_D = jnp.asarray(n_D)
        last_D1 = jnp.minimum(n_D, self.T - 2)[:, None]
        draft_D = jnp.take_along_axis(self.draft_DM, last_D1, axis=1)[:, 0]

        def shard(distribution, v):
            return distribution._replace(logits_BTV=distribution.logits_BTV[..., v : v + 1])

        races = []
        for v in range(self.V):
            q = (
                draft_D
                if self.q is None
                else tuple(shard(distribution, v) for distribution in self.q)
            )
            races.append(
                self.passes.residual(
                    shard(self.p, v),
                    q,
                    n_D,
                    n_D < self.count_D,
                    self.temperature_D,
                    np.zeros((len(n_D), 2), np.int32),
                    np.int32(v),
                    num_valid=self.V,
                )
            )
        mass_DV = np.stack([np.asarray(race.mass, np.float64) for race in races], axis=1)
        recovered_DV = np.stack([race.target_best for race in races], axis=1) * np.asarray(
            EXPONENTIAL(jnp.int32(0), jnp.int32(0), jnp.arange(self.V, dtype=jnp.int32))
        )
        return np.where(mass_DV.sum(1, keepdims=True) > 0, mass_DV, recovered_DV)

    def probabilities(self):
        """Probability that draft i is accepted if those before it are, float64 `[D, K]`.

        Draft i is accepted where its uniform is below a threshold, which should be min(1, p / q).
        The product runs with a uniform just below that and with one just above it, those before it
        being 0: it must accept at the first and reject at the second.
        """
        D, K = self.draft_DM.shape
        ratio_DM = self.ratios()
        reached_D = np.ones(D, bool)  # drafts of probability 0 are rejected even at 0
        for i in range(K):
            ratio_D = ratio_DM[:, i]
            reached_D &= i < np.asarray(self.count_D)
            below_DM, above_DM = np.zeros((2, D, K), np.float32)
            below_DM[:, i] = np.minimum(ratio_D * (1 - PRECISION), 1 - PRECISION)
            above_DM[:, i] = np.minimum(ratio_D * (1 + PRECISION), LAST)
            accepted_below_D = self.accepted(below_DM) > i
            accepted_above_D = self.accepted(above_DM) > i
            np.testing.assert_array_equal(accepted_below_D, reached_D & (ratio_D > 0))
            # No uniform is above a threshold of 1. For equal p and q, rounding decides at LAST.
            sure_D = abs(ratio_D - 1) > 2 * PRECISION
            expected_D = reached_D & (ratio_D > 1)
            np.testing.assert_array_equal(accepted_above_D[sure_D], expected_D[sure_D])
            reached_D &= ratio_D > 0
        return np.minimum(ratio_DM, 1)

    def ratios(self):
        """p / q of every draft from the distributions themselves, 0 where q is 0, in float64."""
        draft_DM1 = np.asarray(self.draft_DM)[..., None]
        p_DM = np.take_along_axis(self.probs_DTV[:, :-1], draft_DM1, axis=2)[..., 0]
        q_DM = np.ones_like(p_DM)
        if self.q_DMV is not None:
            q_DM = np.take_along_axis(self.q_DMV, draft_DM1, axis=2)[..., 0]
        return np.divide(p_DM, q_DM, out=np.zeros_like(p_DM), where=q_DM > 0)


def emitted_distribution(passes, p, q, V, K, count):
    """Joint distribution of the K + 1 tokens after a context: those of a round, the rest by p."""
    contexts = [context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)]
    if q == ONE_HOT_DRAFTS:
        draft_after = {context: (7 * sum(context) + len(context) + 1) % V for context in contexts}
        drafts = [()]
        for _ in range(K):
            drafts = [(*draft, draft_after[draft]) for draft in drafts]
        weight_D, q_DMV = np.ones(1), None
    else:
        drafts = list(itertools.product(range(V), repeat=K))
        weight_D = np.array(
            [np.prod([np.float64(q[d[:i]][d[i]]) for i in range(K)]) for d in drafts]
        )
        q_DMV = np.array([[q[draft[:i]] for i in range(K)] for draft in drafts])
    draft_DM = np.array(drafts, np.int32)
    probs_DTV = np.array([[p[draft[:i]] for i in range(K + 1)] for draft in drafts])
    acceptance = Acceptance(
        passes, probs_DTV, draft_DM, np.full(len(drafts), count, np.int32), q_DMV
    )
    threshold_DM = acceptance.probabilities()

    distribution = np.zeros((V,) * (K + 1))
    for n in range(count + 1):
        residual_DV = acceptance.residual(np.full(len(drafts), n, np.int32))
        for d, draft in enumerate(drafts):
            weight = (
                weight_D[d]
                * threshold_DM[d, :n].prod()
                * (1 - threshold_DM[d, n] if n < count else 1)
            )
            if weight < 1e-12:
                continue
            recovered_V = residual_DV[d] / residual_DV[d].sum()
            for rest in itertools.product(range(V), repeat=K + 1 - n):
                text = draft[:n] + rest
                follow = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(n + 1, K + 1)])
                distribution[text] += weight * recovered_V[rest[0]] * follow
    return distribution


def check_emitted_distribution(passes, V, K, kind, seeds, counts):
    """Checks it to 1e-6: inputs are float32, and each float32 operation rounds at 6e-8."""
    make_p, make_q = KINDS[kind]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        contexts = [
            context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)
        ]
        p = {context: make_p(rng, V) for context in contexts}
        q = (
            make_q
            if make_q == ONE_HOT_DRAFTS
            else {context: make_q(rng, V) if make_q else p[context] for context in contexts}
        )
        target = np.zeros((V,) * (K + 1))
        for text in itertools.product(range(V), repeat=K + 1):
            target[text] = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(K + 1)])
        for count in counts:
            np.testing.assert_allclose(
                emitted_distribution(passes, p, q, V, K, count), target, atol=1e-6, rtol=0
            )
