"""Drawing and verifying: one class for every implementation of the passes over the vocabulary.

A kernel runs in the Mosaic GPU interpreter, in the place of the reference: everything around it is
the product's.
"""

import contextlib
import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec

from specjax import parallel, verify
from specjax import sampling as sampling_lib
from specjax.config import Runtime
from specjax.drafters.base import Draft
from specjax.kernels import dispatch
from specjax.kernels import sampling as kernels
from specjax.kernels.gpu import bench
from specjax.kernels.gpu.check import apart
from specjax.kernels.sampling import noise, xla
from specjax.kernels.sampling.partial import join_residuals, join_stats
from specjax.sampling import SamplingArrays, Stream
from specjax.verify import METHODS

LAST = np.nextafter(np.float32(1), np.float32(0))
# By how much, relatively, float32 logarithms of probabilities may move the quotient of two.
PRECISION = 4e-6
EXPONENTIAL = jax.jit(noise.exponential)


@functools.cache
def product(implementation: str) -> SimpleNamespace:
    """The product's functions, jitted, on one implementation of the passes; a kernel runs in the
    interpreter."""
    context = bench.interpreted if implementation == "mosaic_gpu" else contextlib.nullcontext

    def traced(function):
        def call(*args, **kwargs):
            with context():
                return function(*args, **kwargs)

        return jax.jit(call, static_argnames="num_valid")

    def passes():
        return dispatch.module(kernels.__name__, implementation)

    def reject(target, argmax_BT, draft_BM, count_B, distributions, *noise, num_valid=None):
        runtime = Runtime(implementation=implementation, num_valid_tokens=num_valid)
        draft = Draft(draft_BM, count_B, distributions=distributions)
        return verify.reject(runtime, target, argmax_BT, draft, *noise)

    def residual(target, q, *args, num_valid):
        """`q` is the drafts' distributions, or the token that it is one-hot on."""
        is_sampled = isinstance(q, tuple)
        draft_B = jnp.zeros_like(args[0]) if is_sampled else q
        parts = passes().residual_pass(
            target, q if is_sampled else None, draft_B, None, *args, num_valid
        )
        return join_residuals(parts)

    return SimpleNamespace(
        sample=traced(functools.partial(kernels.sample_pass, implementation=implementation)),
        reject=traced(reject),
        stats=traced(lambda *args, num_valid: passes().sample_pass(*args, num_valid)),
        residual=traced(residual),
    )


@pytest.fixture(params=["xla", "mosaic_gpu"])
def passes(request):
    if request.param == "mosaic_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip(f"the Mosaic GPU interpreter comes with jax 0.11, this is {jax.__version__}")
    return product(request.param)


def softmax(logits_V, temperature, threshold=-np.inf):
    """In float64; the distribution of one at the first most likely token at temperature 0."""
    logits_V = np.asarray(logits_V, np.float64)
    if temperature == 0:
        return np.eye(len(logits_V))[np.argmax(logits_V)]
    weight_V = np.where(
        logits_V >= threshold, np.exp((logits_V - logits_V.max()) / np.float64(temperature)), 0
    )
    return weight_V / weight_V.sum()


def winner(weight_V, key_2):
    """The token of the largest weight / noise in float64, and whether it is a clear winner."""
    noise_V = np.asarray(
        EXPONENTIAL(*map(jnp.int32, key_2), jnp.arange(len(weight_V), dtype=jnp.int32))
    )
    race_V = weight_V / noise_V.astype(np.float64)
    second, first = np.sort(race_V)[-2:]
    return int(np.argmax(race_V)), second < first * (1 - 1e-5)


class Round:
    """Random logits of a target and of a draft that resembles it, with rows of all kinds in one
    batch."""

    def __init__(
        self, passes, V, K=3, dtype=jnp.float32, draft_dtype=None, guess=False, valid=None, seed=0
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
        # Filters in some rows: about the upper half and the upper tenth of the logits.
        self.threshold_BT = np.full((B, K + 1), -np.inf, np.float32)
        self.threshold_BT[2], self.threshold_BT[5] = 0.0, 3.8 if V > 100 else 0.0
        self.threshold_BM = self.threshold_BT[:, :K]
        self.key_BT2 = rng.integers(-(2**31), 2**31, (B, K + 1, 2)).astype(np.int32)
        self.draft_key_BM2 = rng.integers(-(2**31), 2**31, (B, K, 2)).astype(np.int32)
        self.u_BM = rng.random((B, K)).astype(np.float32)
        self.u_BM[4] = 0  # accepts all
        self.count_B = np.int32([K, K, K, K - 1, K, K, K, 0])
        self.guess, self.passes = guess, passes
        self.shape = B, K, V

    def distribution(self, b, t, draft=False):
        logits_V = np.asarray(self.draft_logits_BMV if draft else self.logits_BTV, np.float32)[b, t]
        logits_V = np.where(np.arange(len(logits_V)) < self.valid, logits_V, -np.inf)
        return softmax(logits_V, self.temperature_B[b], self.threshold_BT[b, t])

    def draw(self, draft=False, keys=True):
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
        if (
            self.guess
        ):  # what prompt lookup does: likely tokens, and now and then one that cannot come
            draft_BM, draft_distribution = self.draw(draft=True, keys=False)[0], None
            draft_BM = draft_BM.at[0, 0].set(self.valid)
        else:
            draft_BM, distribution = self.draw(draft=True)
            draft_distribution = apart(distribution)
        argmax_BT, distribution = self.draw(keys=False)
        accepted_B, own_B = self.passes.reject(
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
        return np.asarray(draft_BM), np.asarray(accepted_B), np.asarray(own_B)

    def check_draws(self):
        drawn_BT, distribution = self.draw()
        B, K, _ = self.shape
        clear = 0
        for b, t in itertools.product(range(B), range(K + 1)):
            probs_V = self.distribution(b, t)
            token, sure = (
                winner(probs_V, self.key_BT2[b, t])
                if self.temperature_B[b]
                else (np.argmax(probs_V), True)
            )
            assert not sure or drawn_BT[b, t] == token
            assert probs_V[drawn_BT[b, t]] > 0
            clear += sure
            if self.temperature_B[b]:  # the distribution as it is handed on
                logit = np.float64(self.logits_BTV[b, t, token])
                weight = np.exp(
                    (logit - np.float64(distribution.largest_BT[b, t])) / self.temperature_B[b]
                )
                np.testing.assert_allclose(
                    weight / np.float64(distribution.total_BT[b, t]), probs_V[token], rtol=2e-6
                )
        assert clear >= B * (K + 1) - 1
        assert len(np.unique(drawn_BT)) > 3

    def check_rejection(self):
        """Decisions and tokens are the reference's, but for uniforms and races within rounding of a
        tie."""
        draft_BM, accepted_B, own_B = self.reject()
        B, K, V = self.shape
        for b in range(B):
            p = [self.distribution(b, t) for t in range(K + 1)]
            q = [
                np.eye(V + 1)[min(draft_BM[b, t], V)][:V]
                if self.guess
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
            assert sure and own_B[b] == token
        assert len(np.unique(accepted_B)) > 2


class TestPasses:
    # Smaller than a tile, of exactly one, of several that do not fill the last one, with rows that
    # are not aligned.
    @pytest.mark.parametrize(
        ("V", "dtype", "valid"),
        [(2048, jnp.bfloat16, None), (3000, jnp.float32, 2991), (301, jnp.float16, None)],
    )
    def test_draws(self, passes, V, dtype, valid):
        Round(passes, V, dtype=dtype, valid=valid).check_draws()

    @pytest.mark.parametrize(
        ("V", "dtype", "draft_dtype", "guess", "seed"),
        [
            (2048, jnp.bfloat16, None, True, 1),
            (4999, jnp.float32, jnp.bfloat16, False, 2),
            (40, jnp.float32, None, False, 3),
        ],
    )
    def test_rejection(self, passes, V, dtype, draft_dtype, guess, seed):
        Round(
            passes, V, dtype=dtype, draft_dtype=draft_dtype, guess=guess, valid=V - 3, seed=seed
        ).check_rejection()

    def test_infinite_logits_come_first_and_last(self, passes):
        """+inf as well: several of them share all of the probability."""
        logits_BTV = np.zeros((64, 1, 300), np.float32)
        logits_BTV[:, :, ::2] = -np.inf
        logits_BTV[32:, :, [5, 77]] = np.inf
        keys_BT2 = np.arange(128, dtype=np.int32).reshape(64, 1, 2)
        token_BT, _ = passes.sample(logits_BTV, np.ones(64, np.float32), None, keys_BT2)
        assert (token_BT[:32] % 2 == 1).all() and set(np.asarray(token_BT[32:, 0])) == {5, 77}
        greedy_BT, _ = passes.sample(logits_BTV, None, None, None)
        assert set(np.asarray(greedy_BT[:32, 0])) == {1} and set(np.asarray(greedy_BT[32:, 0])) == {
            5
        }

    def test_without_temperature_the_first_of_the_largest_is_drawn(self, passes):
        logits_BTV = np.zeros((2, 2, 4500), np.float32)
        logits_BTV[0, 0, [7, 8, 3000]] = logits_BTV[0, 1, [2100, 2300]] = 5
        logits_BTV[1, 0, 4400:] = logits_BTV[1, 1, 2047:2049] = 2
        token_BT, distribution = passes.sample(logits_BTV, None, None, None)
        assert token_BT.tolist() == [[7, 2100], [4400, 2047]]
        assert distribution.total_BT is None

    def test_shards_of_a_vocabulary_give_what_the_whole_gives(self, passes):
        """Each shard on its own, joined as a mesh joins them."""
        case = Round(passes, 3000)
        logits_RV, threshold_R = (
            case.logits_BTV.reshape(32, -1),
            jnp.asarray(case.threshold_BT).reshape(-1),
        )
        temperature_R, key_R2 = (
            jnp.repeat(case.temperature_B, 4),
            jnp.asarray(case.key_BT2).reshape(-1, 2),
        )
        shards = [
            join_stats(
                passes.stats(
                    logits_RV[:, first : first + 1000],
                    temperature_R,
                    threshold_R,
                    key_R2,
                    jnp.int32(first),
                    num_valid=2990,
                ),
                temperature_R,
                True,
            )
            for first in (0, 1000, 2000)
        ]
        joined = join_stats(
            jax.tree.map(lambda *x: jnp.stack(x, axis=-1), *shards), temperature_R, True
        )
        whole = product("xla").stats(
            logits_RV, temperature_R, threshold_R, key_R2, jnp.int32(0), num_valid=2990
        )
        whole = join_stats(whole, temperature_R, True)
        np.testing.assert_array_equal(joined.token, whole.token)
        np.testing.assert_array_equal(joined.largest, whole.largest)
        np.testing.assert_allclose(joined.total, whole.total, rtol=2e-6)

    def test_nothing_left_of_the_residual_draws_from_the_target(self, passes):
        """p = q in exact arithmetic; u = 1 - 2^-24 rejects the draft only through rounding, and the
        distribution stays p."""
        logits_BTV = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 300)), jnp.float32)
        temperature_B, key_BT2 = jnp.ones(4), jnp.arange(16, dtype=jnp.int32).reshape(4, 2, 2)
        distribution = passes.sample(logits_BTV, temperature_B, None, None)[1]
        race = passes.residual(
            distribution,
            apart(distribution),
            jnp.zeros(4, jnp.int32),
            jnp.ones(4, bool),
            temperature_B,
            key_BT2[:, 0],
            jnp.int32(0),
            num_valid=300,
        )
        assert not race.mass.any()
        own_B1, _ = passes.sample(logits_BTV[:, :1], temperature_B, None, key_BT2[:, :1])
        np.testing.assert_array_equal(race.target_token, own_B1[:, 0])


COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def largest_collective(text: str) -> int:
    """The most numbers in one result of a collective of a compiled program."""
    results = [
        shape
        for line in text.splitlines()
        if (match := COLLECTIVE.search(line))
        for shape in re.findall(r"\w+\[([\d,]*)\]", match[1])
    ]
    return max(np.prod([int(n) for n in shape.split(",") if n], dtype=int) for shape in results)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("mode", METHODS)
def test_a_mesh_gives_what_one_device_gives(shards, mode):
    """The ways of verifying under `shard_map`, with filters; nothing of the vocabulary's size is in
    any collective."""
    case = Round(product("xla"), 1200)
    B, K, V = case.shape
    sampling = SamplingArrays(
        jnp.arange(B, dtype=jnp.uint32),
        jnp.asarray(case.temperature_B),
        jnp.int32([0, 0, 40, 7, 900, 0, 3, 0]),
        jnp.float32([1, 0.9, 0.8, 1, 0.95, 1, 1, 0.99]),
        jnp.float32([0, 0, 0, 0, 0, 0.02, 0, 0]),
    )
    position_B = jnp.arange(B) + 5

    mesh = parallel.make_mesh(shards, devices=jax.devices()[:shards])
    vocabulary_axes = parallel.model_axes(mesh, "target")

    def verify_round(logits_BTV, draft_logits_BMV, mesh=None):
        runtime = Runtime(num_valid_tokens=V - 7, mesh=mesh)
        axes = parallel.model_axes(mesh, "target")
        stream = Stream.DRAFT if mode == "rejection" else Stream.TARGET
        position_BM = position_B[:, None] + jnp.arange(K)
        draft_BM, q = sampling_lib.sample(
            runtime, draft_logits_BMV, sampling, position_BM, stream, axes
        )
        draft = Draft(draft_BM, case.count_B, distributions=apart(q))
        verified = verify.verify(mode, runtime, logits_BTV, draft, sampling, position_B)
        return draft_BM, *verified

    def on_mesh(function):
        split = PartitionSpec(None, None, vocabulary_axes)
        return jax.jit(
            jax.shard_map(
                functools.partial(function, mesh=mesh),
                mesh=mesh,
                in_specs=(split, split),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
        )

    arrays = case.logits_BTV, case.draft_logits_BMV
    sharded = on_mesh(verify_round).lower(*arrays).compile()
    for got, expected in zip(sharded(*arrays), jax.jit(verify_round)(*arrays), strict=True):
        np.testing.assert_array_equal(got, expected)
    bound = B * (K + 1) * shards * 4  # what `partial.SoftmaxStats` holds
    assert 0 < largest_collective(sharded.as_text()) <= bound < B * V // shards

    def gathers(logits_BTV, draft_logits_BMV, mesh):
        everything = jax.lax.all_gather(logits_BTV, vocabulary_axes)
        return verify_round(logits_BTV + everything.max() * 0, draft_logits_BMV, mesh)

    assert largest_collective(on_mesh(gathers).lower(*arrays).compile().as_text()) > bound


@pytest.mark.parametrize("wrong", ["draft_logits", "temperature", "keys"])
def test_shapes_that_do_not_fit_are_refused(wrong):
    """In a kernel they would read what lies elsewhere."""
    case = Round(product("xla"), 64)
    B = case.shape[0]
    _, target = case.draw(keys=False)
    draft_BM, q = case.draw(draft=True)
    distributions, temperature_B, key_B2 = apart(q), case.temperature_B, case.key_BT2[:, 0]
    if wrong == "draft_logits":
        last = distributions[-1]
        short = last._replace(logits_BTV=last.logits_BTV[..., :-1])
        distributions = (*distributions[:-1], short)
    elif wrong == "temperature":
        temperature_B = temperature_B[:-1]
    else:
        key_B2 = key_B2[:-1]
    row_B, subtract_B = jnp.zeros(B, jnp.int32), jnp.ones(B, bool)
    arguments = row_B, subtract_B, temperature_B, key_B2
    with pytest.raises(ValueError, match=r"has the shape .*, expected"):
        kernels.residual_pass(
            target, draft_BM, distributions, None, *arguments, implementation="xla"
        )


# ---- The distribution of what rejection emits, added up exactly over every draft and every way of


def random_distribution(rng, V):
    return rng.dirichlet(np.full(V, 0.7)).astype(np.float32)


def with_zeros(rng, V):
    distribution = random_distribution(rng, V)
    distribution[rng.permutation(V)[: rng.integers(1, V)]] = 0
    return distribution / distribution.sum()


def one_hot(rng, V):
    return np.eye(V, dtype=np.float32)[rng.integers(V)]


# How the target's distribution p and the drafter's q of a context are made. Without q, the
# drafter's guess is certain.
KINDS = {
    "random": (random_distribution, random_distribution),
    "q has zeros": (random_distribution, with_zeros),
    "p has zeros": (with_zeros, random_distribution),
    "both have zeros": (with_zeros, with_zeros),
    "equal": (random_distribution, None),
    "p one-hot": (one_hot, random_distribution),
    "q one-hot": (random_distribution, one_hot),
    "both one-hot": (one_hot, one_hot),
    "guess": (random_distribution, "guess"),
    "guess, p one-hot": (one_hot, "guess"),
    "guess, p has zeros": (with_zeros, "guess"),
}


class Acceptance:
    """`reject` for given distributions p `[D, T, V]` and q `[D, K, V]` (or None), at temperature 1,
    on the given passes."""

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
        """From the distributions' statistics, which come from the passes; the residual's pass,
        which has no part in it, is left to the reference."""
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
        """The distribution that the next token is drawn from after n accepted drafts, `[D, V]`: one
        shard per token, whose mass is the weight that the pass gave to that token."""
        n_D = jnp.asarray(n_D)
        guess_D = jnp.take_along_axis(self.draft_DM, jnp.minimum(n_D, self.T - 2)[:, None], axis=1)[
            :, 0
        ]

        def shard(distribution, v):
            return distribution._replace(logits_BTV=distribution.logits_BTV[..., v : v + 1])

        races = []
        for v in range(self.V):
            q = (
                guess_D
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
        own_DV = np.stack([race.target_best for race in races], axis=1) * np.asarray(
            EXPONENTIAL(jnp.int32(0), jnp.int32(0), jnp.arange(self.V, dtype=jnp.int32))
        )
        return np.where(mass_DV.sum(1, keepdims=True) > 0, mass_DV, own_DV)

    def probabilities(self):
        """Probability that draft i is accepted if those before it are, float64 `[D, K]`.

        Draft i is accepted where its uniform is below a threshold, which should be min(1, p / q).
        The product runs with a uniform just below that and with one just above it, those before it
        being 0: it must accept at the first and reject at the second.
        """
        D, K = self.draft_DM.shape
        ratio_DM = self.ratios()
        reached_D = np.ones(D, bool)  # drafts that cannot come are rejected even at 0
        for i in range(K):
            ratio_D = ratio_DM[:, i]
            reached_D &= i < np.asarray(self.count_D)
            below_DM, above_DM = np.zeros((2, D, K), np.float32)
            below_DM[:, i] = np.minimum(ratio_D * (1 - PRECISION), 1 - PRECISION)
            above_DM[:, i] = np.minimum(ratio_D * (1 + PRECISION), LAST)
            accepted_below_D = self.accepted(below_DM) > i
            accepted_above_D = self.accepted(above_DM) > i
            np.testing.assert_array_equal(accepted_below_D, reached_D & (ratio_D > 0))
            # No uniform is above a threshold of 1. Where p and q are equal, rounding decides at
            # LAST.
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
    """Joint distribution of the K + 1 tokens that follow a context, where the first come from one
    round and the rest from p."""
    contexts = [context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)]
    if q == "guess":
        guess = {context: (7 * sum(context) + len(context) + 1) % V for context in contexts}
        drafts = [()]
        for _ in range(K):
            drafts = [(*draft, guess[draft]) for draft in drafts]
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
            own_V = residual_DV[d] / residual_DV[d].sum()
            for rest in itertools.product(range(V), repeat=K + 1 - n):
                text = draft[:n] + rest
                follow = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(n + 1, K + 1)])
                distribution[text] += weight * own_V[rest[0]] * follow
    return distribution


def check_emitted_distribution(passes, V, K, kind, seeds, counts):
    """Exact to 1e-6: the distributions are float32 inputs here, and what is done with them in
    float32 rounds at 6e-8 a step."""
    make_p, make_q = KINDS[kind]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        contexts = [
            context for n in range(K + 1) for context in itertools.product(range(V), repeat=n)
        ]
        p = {context: make_p(rng, V) for context in contexts}
        q = (
            make_q
            if make_q == "guess"
            else {context: make_q(rng, V) if make_q else p[context] for context in contexts}
        )
        target = np.zeros((V,) * (K + 1))
        for text in itertools.product(range(V), repeat=K + 1):
            target[text] = np.prod([np.float64(p[text[:i]][text[i]]) for i in range(K + 1)])
        for count in counts:
            np.testing.assert_allclose(
                emitted_distribution(passes, p, q, V, K, count), target, atol=1e-6, rtol=0
            )


class TestDistribution:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("V", "K"), [(6, 1), (4, 2), (3, 3)])
    def test_the_emitted_distribution_is_the_targets(self, V, K, kind):
        check_emitted_distribution(product("xla"), V, K, kind, seeds=range(3), counts=range(K + 1))

    @pytest.mark.parametrize("kind", ["random", "both have zeros", "guess, p has zeros"])
    def test_through_the_kernel(self, passes, kind):
        check_emitted_distribution(passes, 3, 2, kind, seeds=[0], counts=[2])

    def test_nothing_agrees_more_often(self):
        """The acceptance of the first draft is the overlap of the distributions, the most that any
        coupling can have."""
        rng = np.random.default_rng(0)
        V = 6
        p_V, q_V = random_distribution(rng, V), random_distribution(rng, V)
        threshold_D1 = Acceptance(
            product("xla"),
            np.tile(p_V, (V, 2, 1)),
            np.arange(V, dtype=np.int32)[:, None],
            np.ones(V, np.int32),
            np.tile(q_V, (V, 1, 1)),
        ).probabilities()
        np.testing.assert_allclose(threshold_D1[:, 0] @ q_V, np.minimum(p_V, q_V).sum(), atol=1e-6)

    def test_both_ends_of_the_uniform(self):
        """u = 0 accepts whatever both can emit and nothing else."""
        probs_BTV = np.tile(np.float32([0, 1e-30, 0.25, 0.75]), (4, 2, 1))
        q_BMV = np.tile(np.float32([0.5, 0.5, 0, 0]), (4, 1, 1))
        draft_BM, count_B = np.array([[0], [1], [2], [3]], np.int32), np.ones(4, np.int32)
        for q, u, accepted in [
            (q_BMV, 0.0, [0, 1, 0, 0]),
            (None, 0.0, [0, 1, 1, 1]),
            (q_BMV, LAST, [0, 0, 0, 0]),
            (None, LAST, [0, 0, 0, 0]),
        ]:
            case = Acceptance(product("xla"), probs_BTV, draft_BM, count_B, q)
            assert case.accepted(np.full((4, 1), u, np.float32)).tolist() == accepted
        certain_BTV = np.tile(np.eye(4, dtype=np.float32)[2], (1, 2, 1))
        certain = Acceptance(product("xla"), certain_BTV, np.array([[2]]), np.array([1]), None)
        assert certain.accepted(np.full((1, 1), LAST)).tolist() == [1]

    @pytest.mark.parametrize(
        "q_V", [[np.nan] * 4, [0, 0, 0, 0], [0.5, 0.5, np.nan, 0], [np.inf, 0.1, 0.1, 0.1]]
    )
    def test_a_draft_that_has_no_probability_is_rejected_and_leaves_the_targets_distribution(
        self, passes, q_V
    ):
        """Whatever the drafter's logits are: those of token 3 make no probability, and so the
        target's distribution must come."""
        p_V = np.float32([0.1, 0.2, 0.3, 0.4])
        case = Acceptance(
            passes,
            np.tile(p_V, (1, 2, 1)),
            np.array([[3]], np.int32),
            np.array([1], np.int32),
            np.float32([[q_V]]),
        )
        if q_V[0] == np.inf:  # in logits one token is certain
            assert float(case.q[0].total_BT[0]) == 1
        for u in (0.0, 0.5, LAST):
            assert case.accepted(np.full((1, 1), u, np.float32)).tolist() == [0]
        # Which of these distributions is subtracted is decided in `reject`: what it emits is
        # counted.
        key_DT2 = np.arange(2 * 4096, dtype=np.int32).reshape(4096, 1, 2).repeat(2, axis=1)

        def tiled(distribution):
            return jax.tree.map(lambda x: jnp.repeat(x, 4096, axis=0), distribution)

        _, token_D = passes.reject(
            tiled(case.p),
            tiled(case.argmax_DT),
            jnp.full((4096, 1), 3, jnp.int32),
            jnp.ones(4096, jnp.int32),
            tiled(case.q),
            jnp.ones(4096),
            jnp.zeros((4096, 1)),
            key_DT2,
        )
        own_D1, _ = passes.sample(
            jnp.log(jnp.tile(p_V, (4096, 1, 1))), jnp.ones(4096), None, key_DT2[:, :1]
        )
        np.testing.assert_array_equal(token_D, own_D1[:, 0])

    def test_a_guess_outside_the_vocabulary_is_rejected_and_leaves_the_targets_distribution(self):
        """A prompt may hold ids that the target must not emit, and prompt lookup repeats them."""
        probs_BTV = np.tile(np.float32([0.2, 0.3, 0.5]), (1, 2, 1))
        case = Acceptance(product("xla"), probs_BTV, np.array([[3]]), np.array([1]), None)
        for u in (0.0, 0.5):
            assert case.accepted(np.full((1, 1), u, np.float32)).tolist() == [0]
        np.testing.assert_allclose(case.residual([0])[0], probs_BTV[0, 0], rtol=1e-6)


class TestNoise:
    def test_random_words_are_those_of_jax(self):
        key, count = np.uint32([123, 4_000_000_456]), np.arange(64, dtype=np.uint32)
        expected = np.asarray(threefry_2x32(jnp.asarray(key), jnp.asarray(count))).view(np.int32)
        words = noise.threefry2x32(*key.view(np.int32), *count.view(np.int32).reshape(2, 32))
        np.testing.assert_array_equal(np.concatenate(words), expected)

    def test_exponentials_follow_their_distribution_down_to_the_smallest(self):
        """Kolmogorov-Smirnov on -log E would not see the tail that unlikely tokens live on: counts
        there are compared as well, each within six standard deviations, at fixed keys."""
        N = 1 << 22
        sample = np.sort(
            np.asarray(EXPONENTIAL(jnp.int32(3), jnp.int32(-5), jnp.arange(N))), axis=None
        )
        assert (
            sample[0] > 0 and sample[-1] < 17 and len(np.unique(sample[: N // 1000])) == N // 1000
        )
        cdf = -np.expm1(-sample.astype(np.float64))
        assert np.abs(cdf - (np.arange(N) + 0.5) / N).max() < 2.0 / np.sqrt(N)
        for x in 2.0 ** -np.arange(0, 18):
            p = -np.expm1(-x)
            assert abs((sample <= x).sum() - N * p) < 6 * np.sqrt(N * p * (1 - p))

    def test_small_exponentials_are_precise(self):
        """Their series against float64, on both sides of where it ends."""
        words = jnp.arange(1 << 16, dtype=jnp.int32)
        sample = np.asarray(EXPONENTIAL(jnp.int32(1), jnp.int32(2), words), np.float64)
        high, low = (
            np.asarray(x).view(np.uint32) >> 8
            for x in noise.threefry2x32(*map(jnp.int32, (1, 2)), words, jnp.int32(0))
        )
        expected = -np.log1p(-(high + (low + 0.5) / 2**24) / 2**24)
        np.testing.assert_allclose(sample[expected < 0.06], expected[expected < 0.06], rtol=4e-7)
        # v is rounded by up to 2^-25, which counts 1 / (1 - v) < e times as much; the logarithm by
        # up to 2^-24.
        np.testing.assert_allclose(
            sample[expected < 1], expected[expected < 1], rtol=0, atol=2**-25 * np.e + 2**-24
        )
        np.testing.assert_allclose(
            np.exp(-sample), np.exp(-expected), atol=2**-23
        )  # what 24 bits of v leave of it


def test_on_a_cpu_noise_is_worked_out_once():
    """And kept: were it worked out in each of the reductions that find the winner, it might be
    rounded differently."""

    def draw(logits_RV, key_R2):
        return xla.sample_pass(
            logits_RV, jnp.ones(8), jnp.full(8, -jnp.inf), key_R2, jnp.int32(0), 4096
        ).token

    arguments = (
        jax.ShapeDtypeStruct((8, 4096), jnp.float32),
        jax.ShapeDtypeStruct((8, 2), jnp.int32),
    )
    text = jax.jit(draw).lower(*arguments).compile().as_text()
    computations = [
        part for part in text.split("\n\n") if " shift-left(" in part and "[8,4096]" in part
    ]
    assert len(computations) == 1
    assert " reduce(" not in computations[0]
