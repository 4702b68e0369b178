"""Sampling and verification with every implementation of the passes over the vocabulary.

The kernels run in the Mosaic GPU interpreter.
"""

import functools
import re

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
from specjax.kernels.gpu.check import apart
from specjax.kernels.sampling import noise, xla
from specjax.kernels.sampling.partial import join_stats
from specjax.sampling import SamplingArrays, Stream
from specjax.verify import METHODS
from support.passes import (
    EXPONENTIAL,
    KINDS,
    LAST,
    Acceptance,
    Round,
    check_emitted_distribution,
    product,
    random_distribution,
)


@pytest.fixture(params=["xla", "interpret"])
def passes(request):
    if request.param == "interpret" and (reason := dispatch.missing_interpreter()):
        pytest.skip(reason)
    return product(request.param)


class TestPasses:
    # Vocabularies of one tile, of less, and of several with a partial last one; rows that are not
    # aligned.
    @pytest.mark.parametrize(
        ("V", "dtype", "valid"),
        [(2048, jnp.bfloat16, None), (3000, jnp.float32, 2991), (301, jnp.float16, None)],
    )
    def test_samples(self, passes, V, dtype, valid):
        Round(passes, V, dtype=dtype, valid=valid).check_samples()

    @pytest.mark.parametrize(
        ("V", "dtype", "draft_dtype", "one_hot", "seed"),
        [
            (2048, jnp.bfloat16, None, True, 1),
            (4999, jnp.float32, jnp.bfloat16, False, 2),
            (40, jnp.float32, None, False, 3),
        ],
    )
    def test_rejection(self, passes, V, dtype, draft_dtype, one_hot, seed):
        Round(
            passes, V, dtype=dtype, draft_dtype=draft_dtype, one_hot=one_hot, valid=V - 3, seed=seed
        ).check_rejection()

    def test_sampled_and_one_hot_drafts_may_be_mixed(self, passes):
        """Each row has the result of a batch of only its kind, and the kinds differ."""
        case = Round(passes, 700, valid=690)
        draft_BM, q = case.sample(draft=True)
        argmax_BT, target = case.sample(keys=False)
        noise = case.temperature_B, case.u_BM, case.key_BT2

        def rejected(distributions, sampled_B=None):
            accepted_B, token_B = passes.reject(
                target,
                argmax_BT,
                draft_BM,
                case.count_B,
                distributions,
                *noise,
                num_valid=case.valid,
                sampled_B=sampled_B,
            )
            return np.stack([accepted_B, token_B])

        sampled, one_hot = rejected(apart(q)), rejected(None)
        assert (sampled != one_hot).any(axis=0).sum() > 2
        for start in (0, 1):
            sampled_B = np.arange(len(case.count_B)) % 2 == start
            mixed = rejected(apart(q), sampled_B)
            np.testing.assert_array_equal(mixed, np.where(sampled_B, sampled, one_hot))

    def test_infinite_logits(self, passes):
        """-inf has probability 0; several +inf share all of the probability."""
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

    def test_without_temperatures_the_first_argmax_is_taken(self, passes):
        logits_BTV = np.zeros((2, 2, 4500), np.float32)
        logits_BTV[0, 0, [7, 8, 3000]] = logits_BTV[0, 1, [2100, 2300]] = 5
        logits_BTV[1, 0, 4400:] = logits_BTV[1, 1, 2047:2049] = 2
        token_BT, distribution = passes.sample(logits_BTV, None, None, None)
        assert token_BT.tolist() == [[7, 2100], [4400, 2047]]
        assert distribution.total_BT is None

    def test_joined_shards_equal_the_whole_vocabulary(self, passes):
        """A pass over each shard; their results are joined as on a mesh."""
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

    def test_an_empty_residual_samples_the_target(self, passes):
        """With p = q, only rounding can reject a draft (at u = 1 - 2^-24); then p is sampled."""
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
        recovered_B1, _ = passes.sample(logits_BTV[:, :1], temperature_B, None, key_BT2[:, :1])
        np.testing.assert_array_equal(race.target_token, recovered_B1[:, 0])


COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def largest_collective(text: str) -> int:
    """The largest number of elements in a result of a collective of a compiled program."""
    results = [
        shape
        for line in text.splitlines()
        if (match := COLLECTIVE.search(line))
        for shape in re.findall(r"\w+\[([\d,]*)\]", match[1])
    ]
    return max(np.prod([int(n) for n in shape.split(",") if n], dtype=int) for shape in results)


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("mode", METHODS)
def test_a_mesh_gives_the_result_of_one_device(shards, mode):
    """Verification under `shard_map`, with filters; no collective has the vocabulary's size."""
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
    bound = B * (K + 1) * shards * 4  # the size of `partial.SoftmaxStats`
    assert 0 < largest_collective(sharded.as_text()) <= bound < B * V // shards

    def gathers(logits_BTV, draft_logits_BMV, mesh):
        everything = jax.lax.all_gather(logits_BTV, vocabulary_axes)
        return verify_round(logits_BTV + everything.max() * 0, draft_logits_BMV, mesh)

    assert largest_collective(on_mesh(gathers).lower(*arrays).compile().as_text()) > bound


@pytest.mark.parametrize("wrong", ["draft_logits", "temperature", "keys"])
def test_inconsistent_shapes_are_rejected(wrong):
    """In a kernel they would read other memory."""
    case = Round(product("xla"), 64)
    B = case.shape[0]
    _, target = case.sample(keys=False)
    draft_BM, q = case.sample(draft=True)
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


class TestDistribution:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("V", "K"), [(6, 1), (4, 2), (3, 3)])
    def test_the_emitted_distribution_is_the_targets(self, V, K, kind):
        check_emitted_distribution(product("xla"), V, K, kind, seeds=range(3), counts=range(K + 1))

    @pytest.mark.parametrize("kind", ["random", "both have zeros", "one-hot drafts, p has zeros"])
    def test_every_implementation_of_the_passes(self, passes, kind):
        check_emitted_distribution(passes, 3, 2, kind, seeds=[0], counts=[2])

    def test_acceptance_is_the_most_that_a_coupling_can_have(self):
        """The acceptance of the first draft is the overlap of the two distributions."""
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

    def test_the_smallest_and_the_largest_uniform(self):
        """u = 0 accepts exactly the drafts that both distributions can emit."""
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
        one_hot_BTV = np.tile(np.eye(4, dtype=np.float32)[2], (1, 2, 1))
        one_hot = Acceptance(product("xla"), one_hot_BTV, np.array([[2]]), np.array([1]), None)
        assert one_hot.accepted(np.full((1, 1), LAST)).tolist() == [1]

    @pytest.mark.parametrize(
        "q_V", [[np.nan] * 4, [0, 0, 0, 0], [0.5, 0.5, np.nan, 0], [np.inf, 0.1, 0.1, 0.1]]
    )
    def test_a_draft_of_probability_0_is_rejected_and_the_target_is_sampled(self, passes, q_V):
        """For any logits of the drafter that give its token 3 no probability."""
        p_V = np.float32([0.1, 0.2, 0.3, 0.4])
        case = Acceptance(
            passes,
            np.tile(p_V, (1, 2, 1)),
            np.array([[3]], np.int32),
            np.array([1], np.int32),
            np.float32([[q_V]]),
        )
        if q_V[0] == np.inf:  # infinite logits are one-hot
            assert float(case.q[0].total_BT[0]) == 1
        for u in (0.0, 0.5, LAST):
            assert case.accepted(np.full((1, 1), u, np.float32)).tolist() == [0]
        # `reject` decides which distribution is subtracted, so its emitted tokens are compared.
        rows = 128  # the interpreter takes minutes for thousands
        key_DT2 = np.arange(2 * rows, dtype=np.int32).reshape(rows, 1, 2).repeat(2, axis=1)

        def tiled(distribution):
            return jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), distribution)

        _, token_D = passes.reject(
            tiled(case.p),
            tiled(case.argmax_DT),
            jnp.full((rows, 1), 3, jnp.int32),
            jnp.ones(rows, jnp.int32),
            tiled(case.q),
            jnp.ones(rows),
            jnp.zeros((rows, 1)),
            key_DT2,
        )
        recovered_D1, _ = passes.sample(
            jnp.log(jnp.tile(p_V, (rows, 1, 1))), jnp.ones(rows), None, key_DT2[:, :1]
        )
        np.testing.assert_array_equal(token_D, recovered_D1[:, 0])

    def test_a_draft_outside_the_vocabulary_is_rejected_and_the_target_is_sampled(self):
        """A prompt may contain ids that the target must not emit, and prompt lookup repeats
        them."""
        probs_BTV = np.tile(np.float32([0.2, 0.3, 0.5]), (1, 2, 1))
        case = Acceptance(product("xla"), probs_BTV, np.array([[3]]), np.array([1]), None)
        for u in (0.0, 0.5):
            assert case.accepted(np.full((1, 1), u, np.float32)).tolist() == [0]
        np.testing.assert_allclose(case.residual([0])[0], probs_BTV[0, 0], rtol=1e-6)


class TestNoise:
    def test_random_words_equal_those_of_jax(self):
        key, count = np.uint32([123, 4_000_000_456]), np.arange(64, dtype=np.uint32)
        expected = np.asarray(threefry_2x32(jnp.asarray(key), jnp.asarray(count))).view(np.int32)
        words = noise.threefry2x32(*key.view(np.int32), *count.view(np.int32).reshape(2, 32))
        np.testing.assert_array_equal(np.concatenate(words), expected)

    def test_exponentials_follow_their_distribution_down_to_the_smallest(self):
        """A Kolmogorov-Smirnov test, and counts in the tail that decides about improbable tokens.

        Counts are within six standard deviations, with fixed keys.
        """
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
        """Compared with float64, on both sides of the bound up to which a series is used."""
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
        np.testing.assert_allclose(np.exp(-sample), np.exp(-expected), atol=2**-23)  # v has 24 bits


def test_on_a_cpu_noise_is_computed_once():
    """If each of the reductions that find the winner computed it, roundings might differ."""

    def sample(logits_RV, key_R2):
        return xla.sample_pass(
            logits_RV, jnp.ones(8), jnp.full(8, -jnp.inf), key_R2, jnp.int32(0), 4096
        ).token

    arguments = (
        jax.ShapeDtypeStruct((8, 4096), jnp.float32),
        jax.ShapeDtypeStruct((8, 2), jnp.int32),
    )
    text = jax.jit(sample).lower(*arguments).compile().as_text()
    computations = [
        part for part in text.split("\n\n") if " shift-left(" in part and "[8,4096]" in part
    ]
    assert len(computations) == 1
    assert " reduce(" not in computations[0]
