"""From the name of a model to its folder, with caches made by hand; nothing is downloaded."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import huggingface_hub
import jax
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

import specjax
from specjax.checkpoints_convert import eagle as eagle_format
from specjax.engine import hub, load
from specjax.errors import SpecJAXError
from specjax.train import eagle as eagle_training
from support import folders
from support.cli import check_refused

NAME = "some-org/Tiny.Llama-1B"
COMMIT, OTHER_COMMIT = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An empty home folder, and no variables of Hugging Face."""
    names = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def downloads(monkeypatch):
    """Calls of `snapshot_download`, which raises the last element of `outcomes`, or returns it."""
    calls, outcomes = [], []

    def snapshot_download(*arguments, **options):
        calls.append((arguments, options))
        outcome = outcomes[-1]
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls, outcomes


def write_cache(cache: pathlib.Path, revision="main", commit=COMMIT, **options) -> pathlib.Path:
    """A repository as `snapshot_download` leaves it: a reference, and links to blobs."""
    repository = cache / "models--some-org--Tiny.Llama-1B"
    reference = repository / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    blobs = folders.write_folder(repository / "blobs" / commit, **options)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    return snapshot


def test_a_path_that_exists_is_itself(tmp_path, downloads):
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    assert hub.resolve(folder) == folder
    assert hub.resolve("org/model") == pathlib.Path("org/model")
    (tmp_path / "home" / "model").mkdir(parents=True)
    assert hub.resolve("~/model") == tmp_path / "home" / "model"
    with pytest.raises(SpecJAXError, match="revision 'v1' is for a repository of Hugging Face"):
        hub.resolve("org/model", revision="v1")
    assert not downloads[0]


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}, "hf/hub"),
        ({"HF_HOME": "$HOME/hf"}, "home/hf/hub"),
        ({"HF_HUB_CACHE": "cache", "HF_HOME": "hf"}, "cache"),
        ({"HF_HUB_CACHE": "", "HF_HOME": ""}, "home/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_has_it(tmp_path, monkeypatch, downloads, variables, cache):
    for name, value in variables.items():
        is_path = value and not value.startswith("$")
        monkeypatch.setenv(name, str(tmp_path / value) if is_path else value)
    snapshot = write_cache(tmp_path / cache)
    assert hub.resolve(NAME) == snapshot
    assert not downloads[0], "the network is not asked"
    assert specjax.load(snapshot).config.num_layers == 2


def test_a_revision_is_a_branch_or_a_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main = write_cache(tmp_path)
    branch = write_cache(tmp_path, "refs/pr/1", OTHER_COMMIT)
    assert hub.resolve(NAME) == hub.resolve(NAME, "main") == hub.resolve(NAME, COMMIT) == main
    assert hub.resolve(NAME, "refs/pr/1") == hub.resolve(NAME, OTHER_COMMIT) == branch
    for revision in ("v2", "a" * 40, "../refs/main", "../../main"):
        with pytest.raises(SpecJAXError, match="neither a local path nor in the Hugging Face"):
            hub.resolve(NAME, revision)


@pytest.mark.parametrize(
    ("shards", "lost"),
    [(1, "model.safetensors"), (3, "model-00002-of-00003.safetensors"), (1, "config.json")],
)
def test_a_download_that_was_interrupted_is_resumed(tmp_path, monkeypatch, downloads, shards, lost):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = write_cache(tmp_path, shards=shards)
    assert hub.resolve(NAME) == snapshot
    (snapshot / lost).unlink()
    calls, outcomes = downloads
    outcomes.append(snapshot)
    assert hub.resolve(NAME) == snapshot
    assert len(calls) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SpecJAXError, match=f"is incomplete .* without {re.escape(lost)}, and HF_"):
        hub.resolve(NAME)


def test_what_is_downloaded(tmp_path, monkeypatch, downloads):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    calls, outcomes = downloads
    outcomes.append(tmp_path)
    assert hub.resolve(NAME, "v1") == tmp_path
    [((name,), options)] = calls
    assert (name, options["revision"], options["cache_dir"]) == (NAME, "v1", tmp_path / "cache")
    read = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    read += ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    read += ["chat_template.jinja", "special_tokens_map.json", "params/layers/000/d/manifest.ocdbt"]
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"]
    others += ["fp16/model.safetensors", "README.md", "model-q4.gguf", "onnx/model.onnx"]
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*read, *others], **patterns)) == read


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./some-org/model", "a/b/c", "model.gguf", "org/", "-a/b", "", None]
)
def test_what_is_neither_a_path_nor_a_repository(name, downloads):
    with pytest.raises(SpecJAXError, match="give the folder of a model, or the name of a reposi"):
        hub.resolve(name)
    assert not downloads[0]


def test_a_name_without_organization_is_not_downloaded(downloads):
    with pytest.raises(SpecJAXError, match="my-model is neither a local path nor in the Hugging"):
        hub.resolve("my-model")
    assert not downloads[0]


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_nothing_is_downloaded(monkeypatch, downloads, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SpecJAXError, match="and HF_HUB_OFFLINE forbids to download it; give the f"):
        hub.resolve(NAME)
    assert not downloads[0]


def test_without_huggingface_hub_the_cache_is_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import fails
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SpecJAXError, match="and huggingface_hub, which downloads models, is not"):
        hub.resolve(NAME)
    snapshot = write_cache(tmp_path)
    assert hub.resolve(NAME) == snapshot


class _Response:
    """As much of an HTTP response as errors need."""

    status_code, headers, request, text = 404, {}, None, ""


def unreachable() -> Exception:
    error = errors.LocalEntryNotFoundError("Got: ConnectError: no route\nmore lines")
    error.__cause__ = ConnectionError("no route to host")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("gated", response=_Response()), "access is restricted; accept the"),
        (errors.RepositoryNotFoundError("no", response=_Response()), "no such repository, or it"),
        (errors.RevisionNotFoundError("no", response=_Response()), "it has no revision 'v1'"),
        (unreachable(), "cannot be downloaded: ConnectionError: no route to host"),
        (OSError("disk full"), "cannot be downloaded: OSError: disk full"),
    ],
    ids=["gated", "missing", "revision", "network", "disk"],
)
def test_a_failed_download_says_why(downloads, error, message):
    downloads[1].append(error)
    with pytest.raises(SpecJAXError, match=re.escape(message)) as caught:
        hub.resolve(NAME, "v1")
    assert str(caught.value).startswith(f"{NAME} is neither a local path nor in the Hugging Face")
    assert "\n" not in str(caught.value)


# --- Names in place of paths ----------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model in the cache, which is all that there is."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return write_cache(tmp_path / "cache")


def write_head(cache: pathlib.Path, target) -> pathlib.Path:
    """Puts the EAGLE head org/head into the cache."""
    repository = cache / "models--org--head"
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    config = eagle_training.make_config(target.config)
    params = eagle_training.initial_params(config, target.params, jax.random.key(0))
    eagle_format.save(folder, config, params, None)
    return folder


def test_functions_that_take_paths_take_names(cached, tmp_path):
    target = specjax.load(NAME)
    assert target.path == str(cached)
    assert load.open_source(NAME).config == load.read_model_config(NAME) == target.config
    assert specjax.load_drafter("draft_model", NAME, target).path == str(cached)
    head = write_head(tmp_path / "cache", target)
    assert specjax.load_drafter("eagle", "org/head", target).path == str(head)
    load.convert(NAME, tmp_path / "ours")
    assert specjax.load(tmp_path / "ours").config == target.config


@pytest.mark.parametrize("flag", ["target", "model"])
def test_commands_take_names(cached, command, tmp_path, flag):
    output = tmp_path / "out.jsonl"
    outcome = command(
        "generate",
        f"--{flag}={NAME}",
        f"--speculative_model={NAME}",
        "--num_speculative_tokens=2",
        "--prompt=hello",
        "--max_new_tokens=3",
        f"--output={output}",
    )
    assert (outcome.code, outcome.err) == (0, "")
    assert any(a_round["drafted"] for a_round in json.loads(output.read_text())["rounds"])
    outcome = command("plan", f"--{flag}={NAME}", f"--speculative_model={NAME}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "draft" in outcome.out


@pytest.mark.parametrize(
    "line",
    [
        "generate --prompt=a --target={name}",
        "generate --prompt=a --target={good} --drafter=draft_model --draft={name}",
        "generate --prompt=a --target={good} --drafter=eagle --draft={name}",
        "generate --prompt=a --target={good} --speculative_model={name}",
        "bench decode --target={name}",
        "bench gpu --target={name} --output={new}",
        "plan --target={name}",
        "plan --target={good} --draft={name}",
        "train --target={name} --data=x --steps=1 --output={new}",
        "train --target={good} --data=x --steps=1 --output={new} --draft={name}",
        "train --target={good} --data=x --steps=1 --output={new} --drafter=draft_model "
        "--draft_config={name}",
        "convert --source={name} --output={new}",
        "export --source={name} --output={new}",
        "demo --target={name}",
    ],
)
def test_commands_refuse_names_that_nobody_has(cached, command, tmp_path, line):
    words = line.format(name="some-org/other", good=NAME, new=tmp_path / "new").split()
    check_refused(command(*words), "some-org/other is neither a local path nor in the Hugging Face")
    assert not (tmp_path / "new").exists()


def test_convert_takes_a_name(cached, command, tmp_path):
    outcome = command("convert", f"--source={NAME}", f"--output={tmp_path / 'ours'}")
    assert outcome.code == 0, outcome.err


def test_a_plan_downloads_the_configuration_alone(tmp_path, monkeypatch, downloads, command):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = write_cache(tmp_path / "other")
    (snapshot / "model.safetensors").unlink()
    calls, outcomes = downloads
    outcomes.append(snapshot)
    assert command("plan", f"--target={NAME}").code == 0
    [(_, options)] = calls
    assert options["allow_patterns"] == ["config.json"]
    write_cache(tmp_path / "cache").joinpath("model.safetensors").unlink()
    assert command("plan", f"--target={NAME}").code == 0
    assert len(calls) == 1, "config.json is in the cache"
