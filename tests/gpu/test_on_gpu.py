"""The kernels, and whole generations with them, on a GPU.

Run JAX_PLATFORMS=cuda pytest -m gpu tests/gpu.
"""

import functools
import os

if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
    # Flags that speed up compilation on a CPU would make programs slow on a GPU. No backend exists
    # yet.
    OURS = (
        "--xla_force_host_platform",
        "--xla_backend_optimization",
        "--xla_llvm_disable",
        "--xla_cpu",
    )
    os.environ["XLA_FLAGS"] = " ".join(
        x for x in os.environ.get("XLA_FLAGS", "").split() if not x.startswith(OURS)
    )

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import llama, sampling
from specjax.config import LlamaConfig
from specjax.engine import generate as generation
from specjax.engine.load import Model
from specjax.kernels import dispatch
from specjax.kernels.gpu import bench
from specjax.kernels.paged_attention import mosaic_gpu as attention_kernel
from specjax.kernels.sampling.noise import exponential
from specjax.sampling import SamplingArrays, Stream
from support import attention, passes
from support.loop import compilations
from support.models import full_logits

pytestmark = pytest.mark.gpu

IMPLEMENTATION = "mosaic_gpu"


@pytest.fixture(autouse=True, scope="session")
def gpu():
    """Fails if there is no GPU: a selected test that cannot run must not pass."""
    if reason := dispatch.missing_gpu():
        pytest.fail(
            f"tests marked gpu cannot run: {reason}. Run JAX_PLATFORMS=cuda pytest -m gpu tests/gpu"
        )


class TestAttention:
    @pytest.mark.parametrize("name", attention.CASES)
    def test_case(self, name):
        case = attention.CASES[name]
        arrays, ancestors_BT2 = case.arguments()
        out_BTNH = attention.ATTENTION(
            *arrays, ancestors_BT2=ancestors_BT2, implementation=IMPLEMENTATION
        )
        assert not case.wrong(np.asarray(out_BTNH, np.float64)).any()

    @pytest.mark.parametrize("splits", [1, 2, 3, 7])
    def test_splits(self, splits):
        case = attention.Case([-1, 3, 150, 390], 6, G=4, K=2, H=128, Z=64, X=7, dtype="bfloat16")
        out_BTNH = jax.jit(functools.partial(attention_kernel.paged_attention, num_splits=splits))(
            *case.arguments()[0]
        )
        assert not case.wrong(np.asarray(out_BTNH, np.float64)).any()

    def test_it_is_deterministic(self):
        """A race would show as different outputs."""
        case = attention.Case(
            [100, 2000, 777, -1], 6, G=4, K=8, H=128, Z=64, X=32, dtype="bfloat16"
        )
        arrays, _ = case.arguments()
        first = np.asarray(
            attention.ATTENTION(*arrays, implementation=IMPLEMENTATION).astype(jnp.float32)
        )
        for _ in range(50):
            again = attention.ATTENTION(*arrays, implementation=IMPLEMENTATION)
            np.testing.assert_array_equal(np.asarray(again.astype(jnp.float32)), first)


class TestPasses:
    @pytest.mark.parametrize(
        ("V", "dtype", "valid"),
        [(2048, jnp.bfloat16, None), (3000, jnp.float32, 2991), (301, jnp.float16, None)],
    )
    def test_samples(self, V, dtype, valid):
        passes.Round(passes.product(IMPLEMENTATION), V, dtype=dtype, valid=valid).check_samples()

    @pytest.mark.parametrize(
        ("V", "dtype", "one_hot", "seed"),
        [(2048, jnp.bfloat16, True, 1), (4999, jnp.float32, False, 2), (40, jnp.float32, False, 3)],
    )
    def test_rejection(self, V, dtype, one_hot, seed):
        passes.Round(
            passes.product(IMPLEMENTATION), V, dtype=dtype, one_hot=one_hot, valid=V - 3, seed=seed
        ).check_rejection()

    @pytest.mark.parametrize("kind", ["random", "both have zeros", "one-hot drafts, p has zeros"])
    def test_the_emitted_distribution_is_the_targets(self, kind):
        passes.check_emitted_distribution(
            passes.product(IMPLEMENTATION), 3, 2, kind, seeds=[0], counts=[2]
        )


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_checks_of_the_benchmark(page_size):
    found = {name: check() for name, check in bench.checks(bench.FULL, page_size)}
    assert not {name: problems for name, problems in found.items() if problems}


@functools.cache
def model(dtype, seed: int = 0, noise: float = 0.0) -> Model:
    """A random Llama that the kernels support.

    Its weights have a large scale, so that its distributions are far from flat.
    """
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=512,
    )
    params = llama.init(jax.random.key(seed), config, scale=0.12)
    if noise:
        other = llama.init(jax.random.key(seed + 1), config, scale=0.12)
        params = jax.tree.map(lambda a, b: a + noise * b, params, other)
    # The same numbers in both dtypes.
    return Model(
        config,
        jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), params),
        None,
        (),
        "random",
    )


PROMPTS = [
    np.random.default_rng(i).integers(0, 1000, length).tolist()
    for i, length in enumerate((5, 70, 33, 128, 1, 64))
]
NEW = 48


def generate(drafter, **options):
    """Returns texts of the bfloat16 model, generated with the kernels."""
    options = dict(verify="coupled", max_new_tokens=NEW, implementation=IMPLEMENTATION) | options
    if drafter == "draft_model":
        options |= dict(draft=model(jnp.bfloat16, noise=0.1))
    made = generation.generate(model(jnp.bfloat16), drafter, PROMPTS, **options)
    return [list(completion.tokens) for completion in made.completions]


def on_xla(dtype, tokens_BS):
    """Returns `full_logits` of the reference, whose page is as long as the text."""
    return jnp.asarray(full_logits(model(dtype), tokens_BS), jnp.float32)


class Judge:
    """Decides which token is right after a text, by float32 logits of the `xla` implementation.

    Logits in bfloat16 are off. The largest difference of the bfloat16 and float32 logits of `xla`
    on the same texts is what either of two compared logits of a kernel may be off by, and as much
    again is left for the kernel's own order of rounding. Two tokens within four times it are a near
    tie.
    """

    def __init__(self, texts):
        tokens_BS = np.zeros((len(texts), 256), np.int32)
        for row, prompt, text in zip(tokens_BS, PROMPTS, texts, strict=True):
            row[: len(prompt) + len(text)] = prompt + text
        with jax.default_matmul_precision("highest"):
            self.logits_BSV = on_xla(jnp.float32, tokens_BS)
        off_BSV = abs(on_xla(jnp.bfloat16, tokens_BS) - self.logits_BSV)
        lengths = [len(prompt) + len(text) for prompt, text in zip(PROMPTS, texts, strict=True)]
        written_BS = np.arange(256) < np.array(lengths)[:, None]
        self.margin = 4 * float(off_BSV.max(-1)[written_BS].max())
        self.texts = texts
        # With a larger margin, most wrong tokens would pass.
        assert self.margin < 0.5 * float(self.logits_BSV.std(-1)[written_BS].mean())

    def values(self, b: int, i: int, temperature: float, seed: int):
        """Returns the values of which the i-th new token is the largest, as logits."""
        position = len(PROMPTS[b]) + i
        logits_V = np.asarray(self.logits_BSV[b, position - 1], np.float64)
        if temperature == 0:
            return logits_V
        params = SamplingArrays(jnp.uint32([seed]))
        key_2 = sampling.keys(params, jnp.int32([[position]]), Stream.TARGET)[0, 0]
        noise_V = exponential(*key_2, jnp.arange(len(logits_V), dtype=jnp.int32))
        return logits_V - temperature * np.log(np.asarray(noise_V, np.float64))

    def check(self, temperature: float = 0.0, seed: int = 0):
        """Checks that every token has the largest value after the text before it, up to near
        ties."""
        behind = []
        for b, text in enumerate(self.texts):
            for i, token in enumerate(text):
                value_V = self.values(b, i, temperature, seed)
                behind.append(value_V.max() - value_V[token])
        assert max(behind) <= self.margin
        assert np.mean(np.array(behind) == 0) > 0.9, "far more near ties than bfloat16 makes"


class TestGeneration:
    @pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_every_token_is_right_after_the_text_before_it(self, drafter, temperature):
        texts = generate(drafter, temperature=temperature, seed=7)
        assert all(len(text) == NEW for text in texts)
        Judge(texts).check(temperature, seed=7)

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_speculation_changes_a_text_at_near_ties_only(self, temperature):
        """Only the first difference is checked: later tokens follow another text."""
        plain, coupled = (
            generate(name, temperature=temperature, seed=7) for name in ("none", "draft_model")
        )
        judge = Judge(plain)
        for b, (one, other) in enumerate(zip(plain, coupled, strict=True)):
            i = next((i for i in range(NEW) if one[i] != other[i]), None)
            if i is not None:
                value_V = judge.values(b, i, temperature, 7)
                assert abs(value_V[one[i]] - value_V[other[i]]) <= judge.margin
        assert (
            sum(one == other for one, other in zip(plain, coupled, strict=True))
            >= len(PROMPTS) // 2
        )

    def test_rejection_sampling_emits_as_many_tokens(self):
        texts = generate("draft_model", verify="rejection", temperature=0.8)
        assert [len(text) for text in texts] == [NEW] * len(PROMPTS)

    def test_the_kernels_are_the_default(self):
        assert dispatch.choose(None) == IMPLEMENTATION
        assert generate("ngram", implementation=None) == generate("ngram")

    def test_nothing_is_compiled_for_a_second_call(self):
        generate("draft_model", temperature=0.8, seed=1)
        with compilations() as compiled:
            generate("draft_model", temperature=0.8, seed=2)
        assert not compiled
