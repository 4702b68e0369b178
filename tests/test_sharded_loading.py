"""Checkpoints loaded into shards: the same bits, and no unnecessary reads.

python tests/test_sharded_loading.py     # memory, with a checkpoint of 2 GB
"""

import contextlib
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors

from specjax import dtypes, llama, parallel
from specjax.checkpoints_convert import hf, orbax, table
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from support import folders

CONFIG = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "attention_bias": True,
    "mlp_bias": True,
}
DEGREES = [(1, 8, 1), (1, 4, 2), (2, 4, 2)]  # data, target, draft


@pytest.fixture(
    scope="module",
    params=[
        ("hf", False, "bfloat16"),
        ("hf", True, "float32"),
        ("ours", False, "float32"),
        ("ours", True, "bfloat16"),
    ],
)
def case(request, tmp_path_factory):
    """Folder of a model with biases, a dtype, and the model in that dtype without a mesh."""
    (name, tied, dtype), path = request.param, tmp_path_factory.mktemp("models")
    config = CONFIG | {"tie_word_embeddings": tied}
    folders.write_folder(path / "hf", config, shards=2, dtype="bfloat16")
    if name == "ours":
        checkpoint.convert(path / "hf", path / "ours")
    return path / name, dtype, checkpoint.load(path / name, dtype=dtype)


def assert_same_bits(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True),
        actual,
        expected,
    )


@pytest.mark.parametrize("role", parallel.RULES)
@pytest.mark.parametrize(("data", "target", "draft"), DEGREES)
def test_shards_equal_slices_of_the_whole_model(case, data, target, draft, role):
    folder, dtype, whole = case
    mesh = parallel.make_mesh(target, draft, data)
    model = checkpoint.load(folder, dtype=dtype, mesh=mesh, role=role)
    assert (whole.mesh, model.mesh, model.config) == (None, mesh, whole.config)
    assert_same_bits(model.params, whole.params)
    specs = parallel.specs(llama.abstract_params(model.config), role)
    assert jax.tree.map(lambda array: array.sharding, model.params) == jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec), specs
    )
    split = target if role == "target" else draft
    assert model.params["embed_VD"].addressable_data(0).shape == (288 // split, 32)
    assert model.params["layers"][1]["attention"]["out_DKGH"].addressable_data(0).shape == (
        32,
        8 // split,
        2,
        4,
    )


def test_without_a_mesh_everything_is_on_the_default_device(case):
    with jax.default_device(jax.devices()[3]):
        model = checkpoint.load(case[0])
    assert {array.device for array in jax.tree.leaves(model.params)} == {jax.devices()[3]}


def test_each_slice_is_read_once(tmp_path, monkeypatch):
    """Also a slice that several devices hold. No read is larger than a shard."""
    folders.write_folder(tmp_path / "hf", CONFIG)
    sizes, safe_open = {}, safetensors.safe_open

    class Slice:
        def __init__(self, name, part):
            self.name, self.part, self.get_dtype, self.get_shape = (
                name,
                part,
                part.get_dtype,
                part.get_shape,
            )

        def __getitem__(self, index):
            result = self.part[index]
            sizes.setdefault(self.name, []).append(result.size)
            return result

    @contextlib.contextmanager
    def watched(*args, **kwargs):
        with safe_open(*args, **kwargs) as file:
            yield types.SimpleNamespace(
                keys=file.keys, get_slice=lambda name: Slice(name, file.get_slice(name))
            )

    monkeypatch.setattr(safetensors, "safe_open", watched)
    checkpoint.load(tmp_path / "hf", mesh=parallel.make_mesh(4, 2, 2), role="target")
    whole = {name: int(np.prod(shape)) for name, shape in folders.shapes(CONFIG).items()}
    assert sizes == {
        name: [size]
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        else [size // 4] * 4
        for name, size in whole.items()
    }


def test_converted_arrays_are_chunked_along_the_sharded_axes(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 2048)
    checkpoint.convert(folders.write_folder(tmp_path / "hf", CONFIG), tmp_path / "ours")
    handler = ocp.PyTreeCheckpointHandler()
    found = {}
    for item in ("embed_VD", "layers/000"):
        for path, array in jax.tree.leaves_with_path(
            handler.metadata(tmp_path / "ours" / "params" / item).tree
        ):
            found[path[-1].key] = array.storage.chunk_shape
    assert found["qkv_KGHD"] == (1, 4, 4, 32)
    assert found["out_DKGH"] == (32, 1, 2, 4)
    assert found["embed_VD"][0] <= 288 // 8
    assert found["gate_up_2FD"][1] <= 32
    assert found["down_DF"][1] <= 32
    assert found["norm_D"] == (32,)
    assert_same_bits(
        checkpoint.load(tmp_path / "ours").params, checkpoint.load(tmp_path / "hf").params
    )


@pytest.mark.parametrize(
    ("size", "chunks"), [(128256, 64), (128257, 1), (2 * 64151, 2), (32001, 3), (14336, 64)]
)
def test_the_number_of_chunks_is_limited(size, chunks):
    array = np.empty((size, 4096), np.float16)
    assert orbax._save_args(("embed_VD",), array).chunk_byte_size == array.nbytes // chunks


def test_a_checkpoint_with_other_chunks_still_loads(tmp_path, monkeypatch):
    """Earlier versions wrote every array as one chunk."""
    monkeypatch.setattr(orbax, "_save_args", lambda path, array: ocp.SaveArgs())
    checkpoint.convert(folders.write_folder(tmp_path / "hf", CONFIG), tmp_path / "ours")
    whole = checkpoint.load(tmp_path / "hf").params
    assert_same_bits(checkpoint.load(tmp_path / "ours", mesh=parallel.make_mesh(8)).params, whole)


def test_invalid_slices_of_a_tensor_are_errors():
    parameter = table.Parameter(
        ("x_ABC",), 1, (table.Part("x", (6, 5), (2, 3, 5)), table.Part("y", (4, 5), (2, 2, 5)))
    )
    whole = slice(None)
    assert parameter.parts[0].cut((slice(1, 2), whole, slice(1, 3))) == (
        (slice(3, 6), slice(1, 3)),
        [1, 3, 2],
    )
    with pytest.raises(ValueError, match="not in list"):
        parameter.parts[0].cut((whole, slice(0, 1), whole))
    with pytest.raises(AssertionError, match="Part"):
        table.Part("z", (4, 5), (20,)).cut((slice(0, 10),))
    with pytest.raises(AssertionError, match="Parameter"):
        parameter.fuse(lambda name, index: np.zeros(0), (whole, slice(0, 1), whole))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_overflow_in_float16_names_the_tensor(tmp_path, dtype):
    arrays = folders.tensors(CONFIG)
    arrays["model.layers.1.mlp.down_proj.weight"][3, 60] = 1e5
    checkpoint.convert(folders.write_folder(tmp_path / "hf", CONFIG, arrays), tmp_path / "ours")
    for folder, words in (
        ("hf", r"layers\.1\.mlp\.down_proj\.weight"),
        ("ours", r"layers/001: .* mlp\.down_DF"),
    ):
        if dtype == "float16":
            with pytest.raises(SpecJAXError, match=words + " does not fit into float16"):
                checkpoint.load(tmp_path / folder, dtype=dtype, mesh=parallel.make_mesh(8))
        else:
            checkpoint.load(tmp_path / folder, dtype=dtype, mesh=parallel.make_mesh(8))


def forbid_reading(monkeypatch):
    def read(*args, **kwargs):
        raise AssertionError("data are read")

    monkeypatch.setattr(hf.SafetensorsSource, "read", read)
    monkeypatch.setattr(orbax, "_read_parameters", read)


def test_models_that_cannot_be_split_are_rejected_before_anything_is_read(tmp_path, monkeypatch):
    checkpoint.convert(folders.write_folder(tmp_path / "hf"), tmp_path / "ours")  # two kv heads
    forbid_reading(monkeypatch)
    mesh = parallel.make_mesh(8, 4)
    for folder in ("hf", "ours"):
        for role, words in (
            (
                "target",
                "target cannot be split over 8 devices: its 2 kv heads .*; choose from 1, 2",
            ),
            ("draft", "draft cannot be split over 4 devices: its 2 kv heads .*; choose from 1, 2"),
            ("other", "unknown role 'other'; choose from target, draft"),
        ):
            with pytest.raises(SpecJAXError, match=words):
                checkpoint.load(tmp_path / folder, mesh=mesh, role=role)


def test_headers_that_disagree_with_the_configuration_are_rejected_before_anything_is_read(
    tmp_path, monkeypatch
):
    checkpoint.convert(folders.write_folder(tmp_path / "hf", CONFIG), tmp_path / "ours")
    forbid_reading(monkeypatch)
    for folder, change, words in (
        ("hf", {"intermediate_size": 128}, [r"down_proj.weight", r"\[32, 64\]", r"\[32, 128\]"]),
        (
            "ours",
            {"model": {"intermediate_size": 128}},
            ["gate_up", r"\[2, 64.*\]", r"\[2, 128.*\]"],
        ),
        ("ours", {"dtype": "bfloat16"}, ["embed_VD", "float32", "bfloat16"]),
    ):
        path = tmp_path / folder / "config.json"
        text = path.read_text()
        fields = json.loads(text)
        for key, value in change.items():
            fields[key] = fields[key] | value if isinstance(value, dict) else value
        path.write_text(json.dumps(fields))
        with pytest.raises(SpecJAXError) as caught:
            checkpoint.load(tmp_path / folder, mesh=parallel.make_mesh(8))
        for word in words:
            assert caught.match(word)
        path.write_text(text)


# Prints the bytes that a process reads, and the memory this takes. The last process loads first.
LOAD = """
import ctypes, json, pathlib, re, sys, time
import jax, numpy as np, tensorstore
folders, port, process, processes, dtype = sys.argv[1:-4], *sys.argv[-4:]
process, processes = int(process), int(processes)
jax.config.update("jax_platforms", "cpu")
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, process)
from specjax import parallel
from specjax.engine import load as checkpoint
from specjax.checkpoints_convert import hf
def memory(field):  # in bytes; not resource.getrusage, whose peak starts at that of the parent
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(field + r":\\s+(\\d+)", status)[1])
def from_files():  # bytes that TensorStore has read
    return sum(value["value"] for metric in tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read") for value in metric["values"])
sliced, read = 0, hf.SafetensorsSource.read
def counted(*args):
    global sliced
    result = read(*args)
    sliced += result.nbytes
    return result
hf.SafetensorsSource.read = counted
mesh = parallel.make_mesh(tensor_parallel=4)
small, *folders = folders
for folder in (small + "/hf", small + "/ours"):  # everything is imported and warm
    whole = checkpoint.load(folder, dtype=dtype).params
    assert all(array.is_fully_addressable for array in jax.tree.leaves(whole))
    barrier = pathlib.Path(folder + ".loaded")
    while process + 1 < processes and not barrier.exists():
        time.sleep(0.01)
    params = checkpoint.load(folder, dtype=dtype, mesh=mesh).params
    barrier.touch()
    for ours, all_ in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert len(ours.addressable_shards) == 4 // processes
        for shard in ours.addressable_shards:
            part = np.asarray(all_)[shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), part, strict=True)
del params, ours, shard, whole, all_
results = []
for folder in folders:
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, read_before, start = memory("VmRSS"), sliced + from_files(), time.perf_counter()
    params = checkpoint.load(folder, dtype=dtype, mesh=mesh).params
    seconds = time.perf_counter() - start
    shards = [shard for array in jax.tree.leaves(params) for shard in array.addressable_shards]
    del params
    results.append({
        "arrays": sum(shard.data.nbytes for shard in shards),
        "peak": memory("VmHWM") - before,
        "read": sliced + from_files() - read_before,
        "seconds": seconds,
    })
    del shards
print(json.dumps(results))
"""


def write_large(path, D, num_layers):
    """Writes a checkpoint of many copies of one random layer in both formats; returns its bytes."""
    config = {
        "hidden_size": D,
        "intermediate_size": 4 * D,
        "num_hidden_layers": num_layers,
        "vocab_size": 8 * D,
        "num_attention_heads": D // 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2**15, shape, np.uint16).view(dtypes.DTYPES["bfloat16"])
        for name, shape in folders.shapes(config | {"num_hidden_layers": 1}).items()
    }
    for name in [name for name in arrays if name.startswith("model.layers.0.")]:
        arrays |= {name.replace(".0.", f".{i}.", 1): arrays[name] for i in range(1, num_layers)}
    folders.write_folder(path / "hf", config, arrays, shards=num_layers, tokenizer=False)
    checkpoint.convert(path / "hf", path / "ours")
    return sum(array.nbytes for array in arrays.values())


def measure(large, processes, dtype="bfloat16"):
    """The output of `LOAD` in each of several processes, which share four devices."""
    small = pathlib.Path(tempfile.mkdtemp(dir=large[0].parent))
    checkpoint.convert(folders.write_folder(small / "hf", CONFIG), small / "ours")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={4 // processes}"
    command = [sys.executable, "-c", LOAD, small, *large, str(port)]
    running = [
        subprocess.Popen(
            [*command, str(i), str(processes), dtype],
            stdout=subprocess.PIPE,
            env=os.environ | {"XLA_FLAGS": flags},
        )
        for i in range(processes)
    ]
    try:
        return [json.loads(process.communicate(timeout=120)[0]) for process in running]
    finally:
        for process in running:
            process.kill()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    return path, write_large(path, 512, 24)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_reads_and_holds_little_more_than_its_shards(large, processes):
    """A process does not wait for the other one: the second loads first."""
    path, size = large
    for results in measure([path / "hf", path / "ours"], processes):
        for result, surplus in zip(
            results, (1, 1.3), strict=True
        ):  # some chunks are part of two shards
            assert size / processes <= result["arrays"] < 1.01 * size / processes
            assert result["read"] <= surplus * result["arrays"]
            assert result["peak"] < 1.25 * result["arrays"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        print(f"{write_large(path, 2048, 16) / 1e6:.0f} MB in bfloat16")
        for processes, dtype, kind in itertools.product(
            (1, 2), ("bfloat16", "float32"), ("hf", "ours")
        ):
            for process, (result,) in enumerate(measure([path / kind], processes, dtype)):
                sizes = [
                    f"{name} {result[name] / 1e6:.0f} MB" for name in ("read", "arrays", "peak")
                ]
                print(f"process {process + 1} of {processes}, {kind} as {dtype}:", *sizes)
                print(f"  {result['seconds']:.1f} s")
