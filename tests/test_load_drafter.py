"""Paths of models and drafts, and whether a draft fits its target."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import pytest
import tokenizers

import specjax
from specjax import SpecJAXError, parallel
from specjax.checkpoints_convert import hf
from specjax.engine import load
from specjax.errors import SpecJAXWarning
from support import folders

CONFIG = {"num_hidden_layers": 1}


def write_model(path, *, arrays=None, tokenizer=None, eos_token_id=1, **tokenizer_config):
    """A Hugging Face folder with a changed tokenizer."""
    folders.write_folder(path, CONFIG | {"eos_token_id": eos_token_id}, arrays)
    folders.write_tokenizer(path, **tokenizer_config)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return specjax.load(write_model(tmp_path_factory.mktemp("target") / "model"))


class TestPaths:
    """`~` and dangling links, for everything that takes a path."""

    @pytest.fixture
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write_model(tmp_path / "model")
        return tmp_path

    def test_the_home_folder(self, home):
        model = specjax.load("~/model")
        assert model.path == str(home / "model")
        assert load.open_source("~/model").config == model.config
        load.convert("~/model", "~/ours")
        load.export("~/ours", "~/back")
        load.save("~/saved", model)
        assert {path.name for path in home.iterdir()} == {"model", "ours", "back", "saved"}
        draft = specjax.load_drafter("draft_model", "~/saved", model)
        assert draft.path == str(home / "saved")
        with pytest.raises(SpecJAXError, match=f"{home}/absent does not exist"):
            specjax.load("~/absent")
        with pytest.raises(SpecJAXError, match="exists"):
            load.convert("~/model", "~/ours")

    def test_the_home_folder_of_an_unknown_user(self):
        with pytest.raises(SpecJAXError, match="~no-such-user-here"):
            specjax.load("~no-such-user-here/model")

    @pytest.mark.parametrize("name", ["model", "config.json", "model.safetensors"])
    def test_a_dangling_link(self, home, name):
        link = home / "model" if name == "model" else home / "model" / name
        if name == "model":
            link.rename(home / "other")
        else:
            link.unlink()
        link.symlink_to("/gone/away")
        for action in (load.open_source, specjax.load, lambda path: load.convert(path, "~/out")):
            with pytest.raises(
                SpecJAXError, match=f"{link} is a link to /gone/away, which does not exist"
            ):
                action(home / "model")


class TestLoading:
    """`load_drafter`, and `check_drafter` before anything is read."""

    def test_a_draft_model_has_dtype_and_mesh_of_its_target(self, tmp_path):
        folder = write_model(tmp_path / "model")
        mesh = parallel.make_mesh(2, 1)
        target = specjax.load(folder, dtype="bfloat16", mesh=mesh)
        draft = specjax.load_drafter("draft_model", folder, target)
        assert (draft.mesh, draft.dtype) == (mesh, jnp.bfloat16)
        assert draft.is_placed("draft") and not draft.is_placed("target")

    def test_drafters_without_a_draft(self, target):
        for name in ("none", "ngram"):
            assert specjax.load_drafter(name, None, target) is None
            with pytest.raises(SpecJAXError, match=f"the drafter '{name}' uses no draft, got x"):
                specjax.load_drafter(name, "x", target)

    @pytest.mark.parametrize(
        ("name", "path", "message"),
        [
            ("draft_model", None, "the drafter 'draft_model' requires the path of a draft model"),
            ("draft_model,eagle", "x", "need different drafts; only one can be given"),
            ("foo", "x", "unknown drafter 'foo'; choose from none, "),
            ("draft_model", "/does/not/exist", "/does/not/exist does not exist"),
            ("eagle", None, "no EAGLE head is bundled for a model of this shape"),
        ],
    )
    def test_errors(self, target, name, path, message):
        for action in (specjax.load_drafter, load.check_drafter):
            with pytest.raises(SpecJAXError, match=message):
                action(name, path, target)

    def test_headers_are_checked_before_data_are_read(self, target, tmp_path, monkeypatch):
        other = folders.write_folder(tmp_path / "other", CONFIG | {"vocab_size": 300})
        whole = folders.write_folder(tmp_path / "whole", CONFIG | {"num_key_value_heads": 1})
        truncated = write_model(tmp_path / "truncated")
        path = truncated / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

        def read(*args):
            raise AssertionError("data are read")

        monkeypatch.setattr(hf.SafetensorsSource, "read", read)
        mesh = parallel.make_mesh(2, 2)
        opened = load.open_source(target.path)
        for folder, message in (
            (other, "different vocabularies"),
            (whole, "the draft cannot be split over 2 devices"),
            (truncated, r"model\.safetensors: truncated"),
        ):
            with pytest.raises(SpecJAXError, match=message):
                load.check_drafter("draft_model", folder, opened, mesh)
        load.check_drafter("draft_model", target.path, opened, mesh)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between draft model and target, and the warning about it."""

    warning: str
    tokenizer_config: dict = dataclasses.field(default_factory=dict)
    eos_token_id: int | list[int] = 1
    rename: dict[str, str] = dataclasses.field(default_factory=dict)
    special: tuple[str, ...] = ()


DIFFERENCES = {
    "chat template": Difference("chat template$", {"chat_template": "{{ messages }}"}),
    "no chat template": Difference(
        r"chat template \(the draft has none\)$", {"chat_template": None}
    ),
    "BOS": Difference(r"BOS \(id 0 and 2\)$", {"bos_token": "<|user|>"}),
    "no BOS": Difference(r"BOS \(id 0 and None\)$", {"bos_token": None}),
    "EOS": Difference(r"EOS \(ids 1 and 1, 3\)$", eos_token_id=[1, 3]),
    "a name": Difference(
        r"special tokens \(<\|human\|>, <\|user\|>\)$", rename={"<|user|>": "<|human|>"}
    ),
    "one more": Difference(r"special tokens \(<\|extra\|>\)$", special=("<|extra|>",)),
    "six more": Difference(
        r"special tokens \(<0>, <1>, <2>, <3> and 2 more\)$",
        special=tuple(f"<{i}>" for i in range(6)),
    ),
    "several": Difference(
        r"chat template; EOS \(ids 1 and 1, 3\)$", {"chat_template": "x"}, [1, 3]
    ),
}


def renamed_backend(names: dict[str, str], special=(), ordinary=()):
    """The tokenizer of `folders` with renamed and additional tokens."""
    state = json.loads(folders.backend().to_str())
    vocabulary = state["model"]["vocab"]
    state["model"]["vocab"] = {names.get(token, token): i for token, i in vocabulary.items()}
    for added in state["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(ordinary))
    return backend


class TestDifferences:
    """Between target and draft."""

    @pytest.mark.parametrize("difference", DIFFERENCES.values(), ids=DIFFERENCES)
    def test_differences_that_lower_acceptance_are_warnings(self, target, tmp_path, difference):
        folder = write_model(
            tmp_path / "draft",
            tokenizer=renamed_backend(difference.rename, difference.special),
            eos_token_id=difference.eos_token_id,
            **difference.tokenizer_config,
        )
        beginning = "^target and draft differ, so that fewer drafts may be accepted: "
        with pytest.warns(SpecJAXWarning, match=beginning + difference.warning):
            draft = specjax.load_drafter("draft_model", folder, target)
        options = {"draft": draft, "num_speculative_tokens": 2, "max_new_tokens": 6}
        with pytest.warns(SpecJAXWarning, match=beginning + difference.warning):
            result = specjax.generate(target, "draft_model", [[5, 9]], **options)
        plain = specjax.generate(target, "none", [[5, 9]], max_new_tokens=6)
        assert result.completions[0].tokens == plain.completions[0].tokens

    def test_equal_models_give_no_warning(self, target):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            specjax.load_drafter("draft_model", target.path, target)

    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            (
                renamed_backend({"<s>": "</s>", "</s>": "<s>"}),
                "'(<s>|</s>)' is [01] in the target and [01] in the draft",
            ),
            (renamed_backend({"z": "zz"}), "'(z|zz)' is .*absent"),
            (renamed_backend({}, ordinary=["extra"]), "'extra' is absent in the target and 267"),
            (
                renamed_backend({"<|user|>": "q", "q": "<|user|>"}),
                r"'(q|<\|user\|>)' is",
            ),
        ],
        ids=["exchanged", "an ordinary token", "one more", "special in one"],
    )
    def test_ids_with_different_tokens_are_an_error(self, target, tmp_path, backend, message):
        folder = write_model(tmp_path / "draft", tokenizer=backend)
        with pytest.raises(SpecJAXError, match=f"target and draft .*: {message}"):
            specjax.load_drafter("draft_model", folder, target)
