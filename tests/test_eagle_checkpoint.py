"""Heads on disk: what was saved is loaded, and what cannot be used is refused by name."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints_convert import eagle as heads
from specjax.engine import generate as generation
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.train import init_head
from support.models import tiny

TARGET = tiny(6, num_layers=3)
MODEL = Model(TARGET.config, TARGET.params, None, (), "tiny")
CONFIG = init_head.config(TARGET.config, (0, 1, 2), num_draft_tokens=9)
IDS_U = jnp.arange(9, dtype=jnp.int32) * 3


@pytest.fixture
def folder(tmp_path):
    params = init_head.initial_params(CONFIG, TARGET.params, jax.random.key(0))
    heads.save(tmp_path / "head", CONFIG, params, IDS_U, dtype=jnp.float32)
    return tmp_path / "head"


def test_what_was_saved_is_loaded(folder):
    assert (folder / "head.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    head = heads.load(folder, MODEL)
    assert head.config == CONFIG
    expected = init_head.initial_params(CONFIG, TARGET.params, jax.random.key(0))
    for name in expected:
        jax.tree.map(np.testing.assert_array_equal, head.params[name], expected[name])
    np.testing.assert_array_equal(head.params["lm_head_UD"], TARGET.params["lm_head_VD"][IDS_U])


def test_a_head_is_drafted_with(folder):
    head = heads.load(folder, MODEL)
    for drafter in ("eagle", "ngram,eagle"):
        got = generation.generate(
            MODEL, drafter, [[1, 2, 3]], draft=head, max_new_tokens=12, num_speculative_tokens=2
        )
        plain = generation.generate(MODEL, "none", [[1, 2, 3]], max_new_tokens=12)
        assert got.completions[0].tokens == plain.completions[0].tokens


def test_the_head_that_comes_with_the_package_is_found_by_the_shape_of_the_target(
    folder, monkeypatch
):
    monkeypatch.setattr(heads, "SHIPPED", folder.parent)
    assert heads.load(None, MODEL).path == str(folder)
    other = tiny(6, num_layers=2)
    with pytest.raises(SpecJAXError, match="no head comes with SpecJAX for a model of this shape"):
        heads.load(None, Model(other.config, other.params, None, (), "other"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layers": 5}, "its number of layers is 5, the target's 3"),
        ({"aux_layers": [0, 0, 1]}, "rising layers"),
        ({"format": "specjax"}, "is not the folder of a head"),
        ({"num_draft_tokens": 8}, r"'draft_ids_U' has the shape \(9,\), and must have \(8,\)"),
        ({"num_draft_tokens": None}, "tensor 'draft_ids_U' is not one of a head"),
        ({"aux_layers": [2]}, "tensor 'fuse_DI' is not one of a head"),
        ({"colour": 1}, "config.json"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(folder, change, message):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    with pytest.raises(SpecJAXError, match=message):
        heads.load(folder, MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 5}, "its vocabulary is 32, the target's 5"),
        ({"hidden_size": 32}, "its width is 16, the target's 32"),
    ],
)
def test_a_head_for_another_target_says_so(folder, change, message):
    other = dataclasses.replace(MODEL, config=dataclasses.replace(TARGET.config, **change))
    with pytest.raises(SpecJAXError, match=f"{folder}: the head is for another target: {message}"):
        heads.load(folder, other)


def test_ids_that_are_no_tokens_and_missing_tensors_are_refused(folder):
    arrays = safetensors.numpy.load_file(folder / "head.safetensors")
    safetensors.numpy.save_file(
        {**arrays, "draft_ids_U": np.full(9, 32, np.int32)}, folder / "head.safetensors"
    )
    with pytest.raises(SpecJAXError, match="ids that are no tokens"):
        heads.load(folder, MODEL)
    for name, dtype in (("draft_ids_U", np.float32), ("join_DI", np.int32)):
        x = arrays[name].astype(dtype)
        safetensors.numpy.save_file({**arrays, name: x}, folder / "head.safetensors")
        with pytest.raises(SpecJAXError, match=f"tensor '{name}' has the dtype {x.dtype}"):
            heads.load(folder, MODEL)
    arrays.pop("join_DI")
    safetensors.numpy.save_file(arrays, folder / "head.safetensors")
    with pytest.raises(SpecJAXError, match="tensor 'join_DI' is missing"):
        heads.load(folder, MODEL)
    (folder / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(SpecJAXError, match=r"head\.safetensors"):
        heads.load(folder, MODEL)


def test_what_is_no_folder_of_a_head_is_refused(tmp_path):
    with pytest.raises(SpecJAXError, match=r"no config\.json: not the folder of a head"):
        heads.load(tmp_path, MODEL)
