"""SpecJAX checkpoints: round trips bit for bit, and no incomplete folder that loads."""

import json
import shutil
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from specjax import LLM, SamplingParams, files
from specjax.checkpoints_convert import hf, orbax
from specjax.config import LlamaConfig
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders
from support.limits import limits

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    "head_dim": {
        "head_dim": 16,
        "num_key_value_heads": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (array.shape, array.dtype), name
        assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("dtype", "shards"), [("float32", 1), ("float16", 2), ("bfloat16", 1), ("bfloat16", 3)]
)
def test_round_trip_is_equal_bit_for_bit(tmp_path, variant, dtype, shards):
    arrays = folders.tensors(VARIANTS[variant], dtype)
    arrays["model.embed_tokens.weight"].flat[:5] = [-0.0, np.inf, -np.inf, np.nan, 6e-8]
    source = folders.write_folder(tmp_path / "hf", VARIANTS[variant], arrays, shards)
    assert checkpoint.convert(source, tmp_path / "ours").dtype == dtype
    assert checkpoint.export(tmp_path / "ours", tmp_path / "back").dtype == dtype
    assert_same_bits(folders.read_folder(tmp_path / "back"), arrays)
    assert hf.read_config(tmp_path / "back") == hf.read_config(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]


def test_the_three_folders_load_as_the_same_model(tmp_path):
    source = folders.write_folder(tmp_path / "hf", VARIANTS["biases"], dtype="bfloat16")
    generation = {"eos_token_id": [3, 5], "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7}
    (source / "generation_config.json").write_text(json.dumps(generation))
    checkpoint.convert(source, tmp_path / "ours")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    checkpoint.convert(tmp_path / "ours", tmp_path / "again", dtype="float32")
    for name in ("hf", "ours", "back", "again"):
        llm = LLM(tmp_path / name, kv_cache_gib=0.01)
        defaults = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=7)
        assert (llm.get_default_sampling_params(), llm.target.eos_ids) == (defaults, (1, 3, 5))
    models = [checkpoint.load(tmp_path / name) for name in ("hf", "ours", "back")]
    for model in models[1:]:
        jax.tree.map(np.testing.assert_array_equal, model.params, models[0].params)
        assert (
            (model.config, model.eos_ids)
            == (models[0].config, models[0].eos_ids)
            == (models[0].config, (1, 3, 5))
        )
        assert model.tokenizer.backend.to_str() == models[0].tokenizer.backend.to_str()
        assert model.tokenizer.special_tokens == models[0].tokenizer.special_tokens
        assert model.tokenizer.chat_template == folders.CHAT_TEMPLATE
    assert models[0].num_valid_tokens == 267 < models[0].config.vocab_size
    assert models[1].path == str(tmp_path / "ours")


def test_without_a_tokenizer(tmp_path):
    checkpoint.convert(folders.write_folder(tmp_path / "hf", tokenizer=False), tmp_path / "ours")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    for name in ("hf", "ours", "back"):
        model = checkpoint.load(tmp_path / name)
        assert model.tokenizer is None
        assert (model.num_valid_tokens, model.eos_ids) == (288, (1,))


def test_export_in_shards(tmp_path):
    arrays = folders.tensors({}, "float16")
    opened = checkpoint.open_source(folders.write_folder(tmp_path / "hf", arrays=arrays))
    (tmp_path / "back").mkdir()
    hf.write_folder(tmp_path / "back", opened, "float16", shard_bytes=20_000)
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 2
    assert max(path.stat().st_size for path in shards) < 22_000
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert_same_bits(folders.read_folder(tmp_path / "back"), arrays)
    index = json.loads((tmp_path / "back" / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    checkpoint.load(tmp_path / "back")


def test_conversion_to_another_dtype(tmp_path):
    arrays = folders.tensors({})
    source = folders.write_folder(tmp_path / "hf", arrays=arrays)
    checkpoint.convert(source, tmp_path / "ours", dtype="bfloat16")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    rounded = {name: array.astype(folders.DTYPES["bfloat16"]) for name, array in arrays.items()}
    assert_same_bits(folders.read_folder(tmp_path / "back"), rounded)
    checkpoint.convert(tmp_path / "ours", tmp_path / "wide", dtype=np.float32)
    assert checkpoint.open_source(tmp_path / "wide").dtype == "float32"


@pytest.mark.parametrize("write", [checkpoint.convert, checkpoint.export])
@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_output_that_exists_is_rejected_before_any_work(tmp_path, write, kind):
    output = tmp_path / "out"
    if kind == "folder":
        output.mkdir()
    elif kind == "file":
        output.touch()
    else:
        output.symlink_to("nowhere")
    with pytest.raises(SpecJAXError, match="out exists"):
        write(tmp_path / "does not matter", output)
    assert list(tmp_path.iterdir()) == [output]


def test_output_in_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(SpecJAXError, match="cannot create"):
        checkpoint.convert(folders.write_folder(tmp_path / "hf"), tmp_path / "no" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_sources_without_a_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, words in (
        ("absent", "does not exist"),
        ("empty", "no config.json"),
        ("file", "neither a folder nor"),
    ):
        with pytest.raises(SpecJAXError, match=words) as caught:
            checkpoint.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(SpecJAXError, match="does not exist"):
        checkpoint.load(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SpecJAXError, match=r"specjax convert --source=.*model\.gguf"):
        checkpoint.load(tmp_path / "model.gguf")


def test_the_name_of_a_folder_may_end_in_gguf(tmp_path):
    checkpoint.load(folders.write_folder(tmp_path / "t.gguf"))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError("No space left on device"), MemoryError]
)
@pytest.mark.parametrize("write", [checkpoint.convert, checkpoint.export])
def test_an_exception_leaves_nothing(tmp_path, write, error):
    source = folders.write_folder(tmp_path / "hf")

    def progress(done, total):
        assert 0 < done <= total
        assert len(list(tmp_path.glob("out.incomplete-*"))) == 1
        raise error

    with pytest.raises(SpecJAXError if isinstance(error, OSError) else error):
        write(source, tmp_path / "out", progress=progress)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("write", [checkpoint.convert, checkpoint.export])
def test_the_error_of_a_failed_write_names_the_output_and_nothing_is_left(tmp_path, write):
    resource = pytest.importorskip("resource")
    source = folders.write_folder(tmp_path / "hf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(SpecJAXError, match=r"cannot write .*/out: ") as caught:
            write(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


FULL = """
import resource, signal, sys
from specjax.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))
sys.exit(main(["specjax", *sys.argv[2:]]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize("size", [1000, 1_500_000])
def test_a_failed_write_is_an_error_of_one_line(tmp_path, command, size):
    """Many writes of a layer fail or are abandoned; other libraries print no tracebacks."""
    large = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128}
    source = folders.write_folder(tmp_path / "hf", large)
    arguments = [command, f"--source={source}", f"--output={tmp_path / 'out'}"]
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(size), *arguments], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"specjax: error: cannot write {tmp_path / 'out'}: ")
    assert list(tmp_path.iterdir()) == [source]


def test_only_the_tracebacks_of_abandoned_writes_are_dropped(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    abandoned = types.SimpleNamespace(exc_value=RuntimeError("Event loop is closed"))
    other = types.SimpleNamespace(exc_value=RuntimeError("anything else"))
    with orbax._quiet_when_abandoned():
        sys.unraisablehook(abandoned)
    assert sys.unraisablehook == shown.append
    for _ in range(2):
        with pytest.raises(OSError), orbax._quiet_when_abandoned():
            raise OSError
        sys.unraisablehook(abandoned)  # it may also be called later
        sys.unraisablehook(other)
    assert shown == [other, other]
    assert sys.unraisablehook.previous == shown.append


@pytest.mark.parametrize("write", [checkpoint.convert, checkpoint.export])
def test_the_error_of_a_vanished_source_names_the_source(tmp_path, write):
    source = folders.write_folder(tmp_path / "hf", shards=2)

    def remove(done, total):
        for path in source.glob("*.safetensors"):
            path.unlink()

    with pytest.raises(SpecJAXError, match=r"cannot read .*safetensors"):
        write(source, tmp_path / "out", progress=remove)


KILLED = """
import os, signal, sys
from specjax.engine import load as checkpoint
def progress(done, total):
    if done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.convert(sys.argv[1], sys.argv[2], progress=progress)
"""


# After the first parameter, and after the last: all arrays are written, the other files are not.
@pytest.mark.parametrize("parameters", [1, 15])
def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path, parameters):
    source = folders.write_folder(tmp_path / "hf")
    output = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-c", KILLED, source, output, str(parameters)], capture_output=True
    )
    assert result.returncode == -signal.SIGKILL
    assert not output.exists()
    (left,) = tmp_path.glob("out.incomplete-*")
    assert (left / "params" / "embed_VD").is_dir()
    with pytest.raises(SpecJAXError, match="is incomplete: its writer was interrupted"):
        checkpoint.load(left)
    left.rename(output)  # not even after it is renamed
    with pytest.raises(SpecJAXError, match="is incomplete"):
        checkpoint.load(output)
    checkpoint.convert(source, tmp_path / "again")
    checkpoint.load(tmp_path / "again")


@pytest.fixture
def ours(tmp_path):
    checkpoint.convert(folders.write_folder(tmp_path / "hf"), tmp_path / "ours")
    return tmp_path / "ours"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_damaged_checkpoints(ours):
    def check_rejected(damage, *words):
        copy = ours.with_name("copy")
        shutil.copytree(ours, copy)
        damage(copy)
        with pytest.raises(SpecJAXError) as caught:
            checkpoint.load(copy)
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)
        shutil.rmtree(copy)

    def largest(path):
        found = [file for file in (path / "params").rglob("*") if file.is_file()]
        return max(found, key=lambda file: file.stat().st_size)

    name = largest(ours).name
    model = json.loads((ours / "config.json").read_text())["model"]
    check_rejected(
        lambda path: shutil.rmtree(path / "params" / "layers" / "001"), "layers/001", "missing"
    )
    check_rejected(
        lambda path: shutil.copytree(path / "params/layers/001", path / "params/layers/002"),
        "layers/002",
        "surplus",
    )
    check_rejected(lambda path: largest(path).write_bytes(b"half"), name, "4 bytes long instead of")
    check_rejected(lambda path: largest(path).unlink(), name, "missing")
    check_rejected(lambda path: largest(path).with_name("more").touch(), "more", "surplus")
    check_rejected(
        lambda path: (path / "params/layers/001/manifest.ocdbt").write_bytes(
            bytes((path / "params/layers/001/manifest.ocdbt").stat().st_size)
        ),
        "layers/001",
        "cannot read",
    )
    check_rejected(
        lambda path: edit(path / "config.json", model=model | {"num_layers": 3}),
        "layers/002",
        "missing",
    )
    check_rejected(
        lambda path: edit(path / "config.json", model=model | {"num_layers": 1}),
        "layers/001",
        "surplus",
    )
    check_rejected(
        lambda path: edit(path / "config.json", model=model | {"attention_bias": True}),
        "qkv_bias_KGH",
        "missing",
    )
    check_rejected(
        lambda path: edit(path / "config.json", model=model | {"hidden_size": 64}),
        "embed_VD",
        "[288, 32]",
        "[288, 64]",
    )
    check_rejected(
        lambda path: edit(path / "config.json", model={"hidden_size": 64}), "configuration"
    )
    check_rejected(lambda path: edit(path / "config.json", version=99), "version 99")
    for field, value in (
        ("files", 3),
        ("eos_ids", ["x"]),
        ("special_tokens", 3),
        ("special_tokens", {"eos_token": 3}),
        ("dtype", "int8"),
        ("model", 3),
    ):
        check_rejected(
            lambda path, fields={field: value}: edit(path / "config.json", **fields), "config.json"
        )
    check_rejected(lambda path: (path / "config.json").write_text("{"), "config.json", "JSON")
    check_rejected(lambda path: (path / "config.json").unlink(), "no config.json")


def test_sizes_in_config_json_are_compared_with_the_files(ours):
    model = json.loads((ours / "config.json").read_text())["model"]
    for field, words in (
        ("num_layers", "50000000 layers, but there are only"),
        ("vocab_size", "embed_VD has shape"),
        ("hidden_size", "embed_VD has shape"),
        ("intermediate_size", "has shape"),
    ):
        edit(ours / "config.json", model=model | {field: 5 * 10**7})
        with limits(), pytest.raises(SpecJAXError, match=words):
            checkpoint.load(ours)


def test_sizes_of_arrays_are_compared_with_the_files(ours, monkeypatch):
    """An array of the configuration's shape, without its data."""
    monkeypatch.setattr(orbax, "_check_headers", lambda params, config, dtype: None)
    model = json.loads((ours / "config.json").read_text())["model"]
    edit(ours / "config.json", model=model | {"vocab_size": 5 * 10**12})
    with limits(), pytest.raises(SpecJAXError, match=r"have \d+ bytes, but the files only \d+"):
        checkpoint.load(ours)


def test_an_eos_token_that_can_never_be_emitted_is_rejected(ours):
    edit(ours / "config.json", eos_ids=[1, 267])
    with pytest.raises(SpecJAXError, match=r"config\.json: .*token 267 can never be emitted"):
        checkpoint.load(ours)


def test_a_chat_template_that_fails_names_the_file(ours):
    (ours / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    tokenizer = checkpoint.load(ours).tokenizer
    with pytest.raises(SpecJAXError, match=f"{ours / 'chat_template.jinja'}: the chat template"):
        tokenizer.render_chat([])


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_dangling_links_are_named(ours, file):
    (ours / file).unlink()
    (ours / file).symlink_to("../gone")
    with pytest.raises(SpecJAXError, match=f"{file} is a link to ../gone, which does not exist"):
        checkpoint.load(ours)


def test_a_dangling_link_to_a_model_is_named(tmp_path):
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(SpecJAXError, match="model is a link to gone, which does not exist"):
        checkpoint.load(tmp_path / "model")


def test_home_folder_of_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = folders.write_folder(tmp_path / "hf")
    checkpoint.convert(source, "~/ours")
    checkpoint.load(tmp_path / "ours")
    with files.new_file("~/file") as path:
        path.write_text("text")
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(SpecJAXError, match="output ~/ours exists"):
        checkpoint.convert(source, "~/ours")
    with pytest.raises(SpecJAXError, match="cannot expand ~no-such-user/out"):
        files.expand("~no-such-user/out")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5000, "[]"])
def test_json_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecJAXError, match=r"config\.json.*JSON"):
        files.read_json(tmp_path / "config.json")


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf"a"\n\n"b"\n')
    rows = list(files.json_lines(tmp_path / "rows.jsonl"))
    path = tmp_path / "rows.jsonl"
    assert rows == [(f"{path}, line 1", "a"), (f"{path}, line 3", "b")]


def test_surplus_parameter_of_a_layer(tmp_path):
    checkpoint.convert(folders.write_folder(tmp_path / "hf", {"mlp_bias": True}), tmp_path / "ours")
    model = json.loads((tmp_path / "ours" / "config.json").read_text())["model"]
    edit(tmp_path / "ours" / "config.json", model=model | {"mlp_bias": False})
    with pytest.raises(
        SpecJAXError,
        match=r"mlp\.(gate_up_bias_2F|down_bias_D) is not part of this model \(surplus\)",
    ):
        checkpoint.load(tmp_path / "ours")


def test_new_files_are_atomic(tmp_path):
    output = tmp_path / "out"
    for error, raised, message in (
        (KeyError("what"), KeyError, "what"),
        (OSError("disk full"), SpecJAXError, f"cannot write {output}: disk full"),
    ):
        with pytest.raises(raised, match=message), files.new_file(output) as path:
            path.write_text("half")
            raise error
        assert not list(tmp_path.iterdir())
    with files.new_file(output) as path:
        path.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    nowhere = tmp_path / "nowhere" / "out"
    with (
        pytest.raises(SpecJAXError, match=f"cannot write {nowhere}"),
        files.new_file(nowhere) as path,
    ):
        path.write_text("whole")


def test_new_folder_rejects_an_output_created_in_the_meantime(tmp_path):
    with pytest.raises(SpecJAXError, match="out exists"), files.new_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


MEMORY = """
import pathlib, re, sys
from specjax.engine import load as checkpoint
def peak():  # not resource.getrusage: its ru_maxrss starts at that of the parent process
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
write = {"convert": checkpoint.convert, "export": checkpoint.export}[sys.argv[1]]
write(sys.argv[2], sys.argv[4])  # everything is imported and warm
before = peak()
write(sys.argv[3], sys.argv[5])
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_stays_far_below_the_model(tmp_path):
    large = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "head_dim": 64,
        "num_key_value_heads": 12,
    }
    arrays = folders.tensors({**large, "num_hidden_layers": 1}, "bfloat16")
    for name in list(arrays):  # 40 copies of one random layer, to save time
        if name.startswith("model.layers.0."):
            arrays |= {name.replace(".0.", f".{i}.", 1): arrays[name] for i in range(1, 40)}
    size = sum(array.nbytes for array in arrays.values())
    assert size > 500e6  # far more than some layers and the fixed buffers of libraries
    small = folders.write_folder(tmp_path / "small")
    folders.write_folder(tmp_path / "large", large, arrays, shards=8)
    del arrays
    sources = [small, tmp_path / "large"]
    outputs = [tmp_path / "small_out", tmp_path / "large_out"]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, "convert", *sources, *outputs],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < size / 4, (
        f"{int(result.stdout) / 1e6:.0f} MB more for a model of {size / 1e6:.0f} MB"
    )


def _model(tokenizer, vocab_size=288):
    return checkpoint.Model(LlamaConfig(vocab_size, 32, 64, 1, 4, 2, 8), {}, tokenizer, (), "")


def test_same_vocabulary(tmp_path):
    folder = folders.write_folder(tmp_path / "hf")
    tokenizer = checkpoint.load(folder).tokenizer
    checkpoint.check_same_vocabulary(_model(tokenizer), _model(tokenizer))
    checkpoint.check_same_vocabulary(_model(tokenizer), _model(None))
    with pytest.raises(SpecJAXError, match="target 288, draft 320"):
        checkpoint.check_same_vocabulary(_model(tokenizer), _model(tokenizer, 320))
    state = json.loads((folder / "tokenizer.json").read_text())
    model = state["model"]
    model["merges"] = model["merges"][:3]  # without "hell" + "o" and later merges
    first_absent = model["vocab"]["hello"]
    model["vocab"] = {token: id_ for token, id_ in model["vocab"].items() if id_ < first_absent}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    other = checkpoint.load(folder).tokenizer
    message = r"tokenizers 267 and 263\): 'hello' is 263 in the target and absent in the draft"
    with pytest.raises(SpecJAXError, match=message):
        checkpoint.check_same_vocabulary(_model(tokenizer), _model(other))
