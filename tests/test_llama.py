"""The model against Hugging Face's: golden logits that are checked in, and live where transformers
is installed."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kv_cache, llama
from specjax.config import LlamaConfig, RopeConfig, Runtime
from specjax.engine import load as checkpoint
from support.models import Model, full_logits, tiny

GOLDEN = pathlib.Path(__file__).parent / "golden" / "llama"
CASES = sorted(path.name for path in GOLDEN.iterdir())
FORWARD = jax.jit(llama.forward, static_argnums=(1, 2), static_argnames="aux_layers")


@pytest.mark.parametrize("case", CASES)
def test_golden_logits(case):
    """The logits spread over several units, and a term left out moves them by far more than the
    tolerance."""
    golden = np.load(GOLDEN / case / "golden.npz")
    model = checkpoint.load(GOLDEN / case, dtype="float32")
    np.testing.assert_allclose(
        full_logits(model, golden["tokens_BT"]), golden["logits_BTV"], atol=1e-4, rtol=1e-4
    )


def test_the_goldens_cover_what_llamas_differ_in():
    configs = [checkpoint.load(GOLDEN / case).config for case in CASES]
    assert {config.rope.rope_type for config in configs} == {"default", "linear", "llama3"}
    for varies in (
        lambda c: c.num_kv_heads == c.num_heads,
        lambda c: c.tie_word_embeddings,
        lambda c: c.attention_bias,
        lambda c: c.mlp_bias,
        lambda c: c.head_dim * c.num_heads == c.hidden_size,
        lambda c: c.rms_norm_eps > 1e-4,
    ):
        assert {varies(config) for config in configs} == {True, False}


@pytest.mark.parametrize("case", CASES)
def test_live_logits_of_transformers(case):
    """On other text than the golden one, and from whichever version is installed."""
    torch = pytest.importorskip(
        "torch", reason="the live comparison needs torch, which is not installed"
    )
    transformers = pytest.importorskip(
        "transformers", reason="the live comparison needs transformers, which is not installed"
    )
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        GOLDEN / case, dtype=torch.float32
    ).eval()
    model = checkpoint.load(GOLDEN / case, dtype="float32")
    tokens_BT = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 40))
    with torch.no_grad():
        expected_BTV = theirs(torch.from_numpy(tokens_BT)).logits.numpy()
    np.testing.assert_allclose(full_logits(model, tokens_BT), expected_BTV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("piece", [1, 3, 8])
def test_reading_in_pieces_equals_reading_at_once(piece):
    model = tiny(0, num_layers=2)
    tokens_BT = np.random.default_rng(1).integers(0, 32, (3, 24))
    expected_BTV = full_logits(model, tokens_BT)
    table_BX = kv_cache.in_order(3, 24, 5)
    cache = kv_cache.init(model.config, table_BX.size, page_size=5)
    for start in range(0, 24, piece):
        output = FORWARD(
            model.params,
            model.config,
            Runtime(page_size=5),
            tokens_BT[:, start : start + piece],
            jnp.full(3, start),
            table_BX,
            cache,
        )
        cache = output.cache
        logits_BTV = llama.logits(model.params, output.hidden_BTD)
        np.testing.assert_allclose(logits_BTV, expected_BTV[:, start : start + piece], atol=2e-5)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_ramps_between():
    rope = RopeConfig(
        theta=500000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    shape = dict(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=128,
    )
    plain = llama.rope_frequencies(LlamaConfig(**shape, rope=RopeConfig(theta=500000.0)))
    ratio = plain / llama.rope_frequencies(LlamaConfig(**shape, rope=rope))
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8, rtol=1e-6)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert (
        len(between)
        and (np.diff(between) > 0).all()
        and (between > 1).all()
        and (between < 8).all()
    )


def test_bfloat16_stays_near_float32():
    model = tiny(2)
    tokens_BT = np.random.default_rng(3).integers(0, 32, (2, 16))
    low = Model(model.config, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    expected_BTV, logits_BTV = full_logits(model, tokens_BT), full_logits(low, tokens_BT)
    assert logits_BTV.dtype == np.float32
    assert np.abs(logits_BTV - expected_BTV).max() < 0.1 * np.abs(expected_BTV).max()


def test_init_has_the_declared_shapes():
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=6,
        intermediate_size=5,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    params = llama.init(jax.random.key(0), config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), llama.abstract_params(config)
    )
    assert "lm_head_VD" not in params and (params["final_norm_D"] == 1).all()
