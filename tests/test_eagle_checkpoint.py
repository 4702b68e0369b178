"""EAGLE heads on disk: round trips, and errors that name the file."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.checkpoints_convert import eagle as heads
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.train import eagle as eagle_training
from support.models import tiny

TARGET = tiny(6, num_layers=3)
MODEL = Model(TARGET.config, TARGET.params, None, (), "tiny")
CONFIG = eagle_training.make_config(TARGET.config, (0, 1, 2), num_draft_tokens=9)
IDS_U = jnp.arange(9, dtype=jnp.int32) * 3


def load(path, target=MODEL):
    return specjax.load_drafter("eagle", path, target)


@pytest.fixture
def folder(tmp_path):
    params = eagle_training.initial_params(CONFIG, TARGET.params, jax.random.key(0))
    heads.save(tmp_path / "head", CONFIG, params, IDS_U, dtype=jnp.float32)
    return tmp_path / "head"


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(folder):
    assert (folder / "head.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    head = load(folder)
    assert isinstance(head, specjax.EagleHead)
    assert (head.config, head.path, head.mesh) == (CONFIG, str(folder), None)
    expected = eagle_training.initial_params(CONFIG, TARGET.params, jax.random.key(0))
    for name in expected:
        jax.tree.map(np.testing.assert_array_equal, head.params[name], expected[name])
    np.testing.assert_array_equal(head.params["lm_head_UD"], TARGET.params["lm_head_VD"][IDS_U])


def test_the_names_on_disk_do_not_change(folder):
    """Published heads must stay readable."""
    fields = json.loads((folder / "config.json").read_text())
    assert set(fields) == {"format", "layer", "aux_layers", "target_layers", "num_draft_tokens"}
    assert fields["format"] == "specjax_head"
    assert set(safetensors.numpy.load_file(folder / "head.safetensors")) == {
        "draft_ids_U",
        "embed_norm_D",
        "feature_norm_D",
        "final_norm_D",
        "fuse_DI",
        "join_DI",
        "layers.0.attention.norm_D",
        "layers.0.attention.out_DKGH",
        "layers.0.attention.qkv_KGHD",
        "layers.0.mlp.down_DF",
        "layers.0.mlp.gate_up_2FD",
        "layers.0.mlp.norm_D",
        "tap_norms_ID",
    }


def test_the_old_name_of_the_layers_is_read(folder):
    fields = json.loads((folder / "config.json").read_text())
    fields["taps"] = fields.pop("aux_layers")
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).config == CONFIG


def test_a_head_has_the_dtype_of_its_target(folder):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TARGET.params)
    head = load(folder, dataclasses.replace(MODEL, params=params))
    ids_U = head.params.pop("draft_ids_U")
    assert {x.dtype for x in jax.tree.leaves(head.params)} == {jnp.dtype(jnp.bfloat16)}
    assert ids_U.dtype == jnp.int32


def test_generation_with_a_loaded_head(folder):
    head = load(folder)
    plain = specjax.generate(MODEL, "none", [[1, 2, 3]], max_new_tokens=12)
    for drafter in ("eagle", "ngram,eagle"):
        result = specjax.generate(
            MODEL, drafter, [[1, 2, 3]], draft=head, max_new_tokens=12, num_speculative_tokens=2
        )
        assert result.completions[0].tokens == plain.completions[0].tokens


def test_the_bundled_head_is_found_by_the_shape_of_the_target(folder, monkeypatch):
    monkeypatch.setattr(heads, "BUNDLED", folder.parent)
    assert load(None).path == str(folder)
    other = tiny(6, num_layers=2)
    with pytest.raises(SpecJAXError, match="no EAGLE head is bundled for a model of this shape"):
        load(None, Model(other.config, other.params, None, (), "other"))


def test_a_broken_bundled_head_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(heads, "BUNDLED", folder.parent)
    (folder / "head.safetensors").unlink()
    with pytest.raises(SpecJAXError, match=r"head/head\.safetensors does not exist"):
        load(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layers": 5}, "its number of layers is 5, the target's 3"),
        ({"aux_layers": [0, 0, 1]}, "rising layers"),
        ({"aux_layers": [0.0, 1.0, 2.0]}, r"config\.json: .*0\.0 must be an integer"),
        ({"aux_layers": 3}, r"config\.json: "),
        ({"target_layers": "3"}, r"config\.json: .*'3' must be an integer"),
        ({"num_draft_tokens": True}, r"config\.json: .*True must be an integer"),
        ({"num_draft_tokens": 10**12}, r"config\.json: .*num_draft_tokens must be in 1 to 32"),
        ({"layer": 3}, r"config\.json: "),
        ({"layer": {}}, r"config\.json: "),
        ({"format": "specjax"}, "is not the folder of an EAGLE head"),
        ({"colour": 1}, r"config\.json: "),
        ({"num_draft_tokens": 8}, r"'draft_ids_U' has shape \[9\], the configuration .*\[8\]"),
        ({"num_draft_tokens": None}, "tensor 'draft_ids_U' is not part of this head"),
        ({"aux_layers": [2]}, "tensor 'fuse_DI' is not part of this head"),
    ],
)
def test_invalid_configurations(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(SpecJAXError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_missing_fields(folder):
    fields = json.loads((folder / "config.json").read_text())
    del fields["layer"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(SpecJAXError, match=r"config\.json: field 'layer' is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 5}, "its vocabulary is 32, the target's 5"),
        ({"hidden_size": 32}, "its width is 16, the target's 32"),
    ],
)
def test_a_head_for_another_target_is_rejected(folder, changes, message):
    other = dataclasses.replace(MODEL, config=dataclasses.replace(TARGET.config, **changes))
    with pytest.raises(
        SpecJAXError, match=f"{folder}: the EAGLE head is for another target: {message}"
    ):
        load(folder, other)


@dataclasses.dataclass(frozen=True)
class Damage:
    """A fault of head.safetensors.

    Attributes:
      change: changes the tensors by name before they are written again; or the file at a path.
      message: the error after the path of the file.
      is_seen_in_header: whether the header alone shows the fault.
    """

    change: object
    message: str
    is_seen_in_header: bool = True


def truncate(path: pathlib.Path):
    path.write_bytes(path.read_bytes()[:-1])


def dangle(path: pathlib.Path):
    path.unlink()
    path.symlink_to("nowhere/head.safetensors")


def replace_by_folder(path: pathlib.Path):
    path.unlink()
    path.mkdir()


BROKEN = ": truncated or not a safetensors file: "
FILE_DAMAGES = {
    "missing": Damage(pathlib.Path.unlink, " does not exist"),
    "empty": Damage(lambda path: path.write_bytes(b""), BROKEN),
    "text": Damage(lambda path: path.write_bytes(b"nothing at all"), BROKEN),
    "truncated": Damage(truncate, BROKEN),
    "dangling link": Damage(dangle, r" is a link to nowhere/head\.safetensors, which does not"),
    "folder": Damage(replace_by_folder, BROKEN),
}
TENSOR_DAMAGES = {
    "no join": Damage({"join_DI": None}, ": tensor 'join_DI' is missing"),
    "surplus": Damage({"more_D": np.zeros(3)}, ": tensor 'more_D' is not part of this head"),
    "shape": Damage({"join_DI": np.zeros((2, 3))}, r": tensor 'join_DI' has shape \[2, 3\]"),
    "float ids": Damage(
        {"draft_ids_U": np.zeros(9, np.float32)}, ": tensor 'draft_ids_U' has dtype F32, .* I32"
    ),
    "integer weights": Damage(
        {"join_DI": np.zeros((16, 32), np.int32)}, ": tensor 'join_DI' has dtype I32, requires F32"
    ),
    "large id": Damage(
        {"draft_ids_U": np.full(9, 32, np.int32)},
        ": 'draft_ids_U' must have ids from 0 to 31",
        False,
    ),
    "negative id": Damage(
        {"draft_ids_U": np.full(9, -1, np.int32)}, ": 'draft_ids_U' must have ids from 0", False
    ),
}


def check_damage(folder, damage):
    """Checks that the error names the file and the fault, if possible from the header alone."""
    message = str(folder / "head.safetensors") + damage.message
    with pytest.raises(SpecJAXError, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    if damage.is_seen_in_header:
        with pytest.raises(SpecJAXError, match=message):
            heads.check(folder, TARGET.config)


@pytest.mark.parametrize("damage", FILE_DAMAGES.values(), ids=FILE_DAMAGES)
def test_a_broken_file(folder, damage):
    damage.change(folder / "head.safetensors")
    check_damage(folder, damage)


@pytest.mark.parametrize("damage", TENSOR_DAMAGES.values(), ids=TENSOR_DAMAGES)
def test_broken_tensors(folder, damage):
    path = folder / "head.safetensors"
    arrays = safetensors.numpy.load_file(path) | damage.change
    arrays = {name: x for name, x in arrays.items() if x is not None}
    safetensors.numpy.save_file(arrays, path)
    check_damage(folder, damage)


def test_the_header_is_read_before_the_data(folder, monkeypatch):
    """Also for a valid head."""
    monkeypatch.setattr(heads, "read", None)
    assert heads.check(folder, TARGET.config) == CONFIG


def test_folders_that_hold_no_head(folder, tmp_path):
    with pytest.raises(SpecJAXError, match=r"no config\.json; not the folder of an EAGLE head"):
        load(tmp_path)
    with pytest.raises(SpecJAXError, match="absent does not exist"):
        load(tmp_path / "absent")
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "INCOMPLETE").touch()
    with pytest.raises(SpecJAXError, match="copy is incomplete"):
        load(tmp_path / "copy")
