"""Hugging Face Llama folders: config.json, safetensors (one file or shards) and the tokenizer."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax import dtypes, files
from specjax import tokenizer as tokenizer_lib
from specjax.checkpoints_convert import table
from specjax.config import LlamaConfig, RopeConfig
from specjax.dtypes import DTYPES
from specjax.errors import SpecJAXError
from specjax.files import parsing, read_json, write_json, writing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that older checkpoints store


def open_folder(folder: pathlib.Path) -> table.CheckpointReader:
    """Opens a Llama folder and checks its headers.

    Raises:
      SpecJAXError: naming the file, field or tensor that cannot be used.
    """
    config = read_config(folder)
    source = SafetensorsSource(folder)
    table.check_tensors(source, config, folder)
    tokenizer = tokenizer_lib.from_folder(folder)
    eos_ids = table.reachable_eos_ids(read_eos_ids(folder, tokenizer), config, tokenizer, folder)
    dtype = dtypes.widest(info.dtype for info in source.tensors.values())
    read_parameters = functools.partial(table.read_parameters, source, config)
    path = folder / GENERATION
    generation = read_json(path) if files.exists(path) else {}
    generation.pop("eos_token_id", None)  # among eos_ids
    return table.CheckpointReader(config, dtype, read_parameters, tokenizer, eos_ids, generation)


def read_config(folder: pathlib.Path) -> LlamaConfig:
    """Returns the configuration in config.json.

    Raises:
      SpecJAXError: naming the field, for an architecture, RoPE type, activation or quantisation
        that is not supported, and for a missing field.
    """
    path = folder / "config.json"
    fields = read_json(path)
    with parsing(path):
        _check_supported(fields)
        num_heads = fields["num_attention_heads"]
        num_kv_heads = fields.get("num_key_value_heads")
        head_dim = fields.get("head_dim")
        return LlamaConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=fields["hidden_size"] // num_heads if head_dim is None else head_dim,
            rms_norm_eps=fields["rms_norm_eps"],
            max_position_embeddings=fields["max_position_embeddings"],
            rope=_read_rope(fields),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bool(fields.get("attention_bias", False)),
            mlp_bias=bool(fields.get("mlp_bias", False)),
        )


def _check_supported(fields: dict[str, Any]) -> None:
    architectures = fields.get("architectures") or ["LlamaForCausalLM"]
    model_type = fields.get("model_type")
    if model_type != "llama" or architectures != ["LlamaForCausalLM"]:
        raise SpecJAXError(
            f"architectures {architectures!r} (model_type {model_type!r}) is not supported; "
            "supported: ['LlamaForCausalLM'] ('llama')"
        )
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "unknown")
        raise SpecJAXError(
            f"quantised weights ({method}) are not supported; use unquantised weights or a GGUF "
            "file"
        )
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise SpecJAXError(f"hidden_act {activation!r} is not supported; supported: 'silu'")


def _read_rope(fields: dict[str, Any]) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5.

    If both are present, transformers takes `rope_scaling` and drops `rope_parameters`.
    """
    parameters = fields.get("rope_parameters") or {}
    rope = fields.get("rope_scaling") or parameters
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)  # Llama 1 and 2 do not write it
    other_theta = parameters.get("rope_theta")
    if other_theta is not None and other_theta != theta:
        raise SpecJAXError(
            f"rope_theta is {other_theta} in rope_parameters, and {theta} for rope_scaling, which "
            "transformers prefers; remove one of the two fields"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1)) not in (1, None):
        raise SpecJAXError("partial_rotary_factor is not supported")
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, float(rope["factor"]))
    if rope_type == "llama3":
        original = rope.get("original_max_position_embeddings")
        if original is None:
            original = fields["original_max_position_embeddings"]
        return RopeConfig(
            theta,
            rope_type,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(original),
        )
    return RopeConfig(theta, str(rope_type))  # rejects unknown types


def read_eos_ids(folder: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer | None) -> set[int]:
    """Returns the ids in config.json, in generation_config.json and of the tokenizer."""
    ids = set()
    if tokenizer is not None and tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    for name in ("config.json", GENERATION):
        path = folder / name
        value = read_json(path).get("eos_token_id") if files.exists(path) else None
        if value is None:
            continue
        for id_ in value if isinstance(value, list) else [value]:
            if isinstance(id_, bool) or not isinstance(id_, int):
                raise SpecJAXError(
                    f"{path}: eos_token_id must be an integer or a list of integers, got {value!r}"
                )
            ids.add(id_)
    return ids


class SafetensorsSource:
    """The tensors of a folder's safetensors files.

    A file is opened for one read at a time, so that at most one is mapped.

    Attributes:
      tensors: headers by name.
    """

    def __init__(self, folder: pathlib.Path):
        self.tensors: dict[str, table.TensorInfo] = {}
        self._files: dict[str, pathlib.Path] = {}
        if files.exists(folder / SINGLE):
            self._add(folder / SINGLE, _read_header(folder / SINGLE))
            return
        index = _read_index(folder)
        for name in sorted(set(index.values())):
            path = folder / name
            if not files.exists(path):
                raise SpecJAXError(f"{folder}: shard {name} is in the index but not in the folder")
            header = _read_header(path)
            for tensor in header:
                if index.get(tensor) != name:
                    raise SpecJAXError(
                        f"{path}: tensor {tensor} is in this shard, but not in it in the index"
                    )
            self._add(path, header)
        for tensor, name in index.items():
            if tensor not in self.tensors:
                raise SpecJAXError(
                    f"{folder / name}: tensor {tensor} is missing; the index has it in this shard"
                )

    def _add(self, path: pathlib.Path, header: dict[str, table.TensorInfo]) -> None:
        for tensor, info in header.items():
            self.tensors[tensor] = info
            self._files[tensor] = path

    def own_name(self, name: str) -> str:
        """Returns `name`: the files use the names of Hugging Face."""
        return name

    def read(self, name: str, index: table.Index = ()) -> np.ndarray:
        """Reads the slice `index` of a tensor."""
        path = self._files[name]
        try:
            with safetensors.safe_open(path, framework="np") as file:
                return file.get_slice(name)[index]
        except (safetensors.SafetensorError, OSError) as error:
            raise SpecJAXError(f"cannot read {path}: {error}") from error


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """The shard of every tensor. Every shard in the folder must occur in it."""
    present = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    path = folder / INDEX
    if not files.exists(path):
        if present:
            raise SpecJAXError(f"{folder}: no {INDEX} for the shards, such as {present[0]}")
        raise SpecJAXError(f"{folder}: no safetensors weights: neither {SINGLE} nor {INDEX}")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SpecJAXError(f"{path}: no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise SpecJAXError(f"{path}: tensor {tensor} is in {name!r}, which is not a file name")
    shards = set(weight_map.values())
    for name in present:
        if name not in shards:
            raise SpecJAXError(
                f"{folder}: shard {name} is in the folder but missing from the index"
            )
    index = {}
    for tensor, name in weight_map.items():
        if not tensor.endswith(IGNORED_SUFFIX):
            index[tensor] = name
    return index


def _read_header(path: pathlib.Path) -> dict[str, table.TensorInfo]:
    """The headers of the tensors of one safetensors file."""
    header = {}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(IGNORED_SUFFIX):
                    continue
                tensor = file.get_slice(name)
                dtype = STORED_DTYPES.get(tensor.get_dtype(), tensor.get_dtype())
                header[name] = table.TensorInfo(tuple(tensor.get_shape()), dtype, str(path))
    except (safetensors.SafetensorError, OSError) as error:
        raise SpecJAXError(f"{path}: truncated or not a safetensors file: {error}") from error
    return header


def write_folder(
    folder: pathlib.Path,
    reader: table.CheckpointReader,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers loads as LlamaForCausalLM.

    At most one shard is in host memory.

    Args:
      folder: an empty folder.
      reader: the checkpoint to write.
      dtype: key of DTYPES.
      progress: called with (parameters written, parameters in all).
      shard_bytes: most bytes of a shard; a larger tensor has a shard of its own.
    """
    config = reader.config
    entries = table.parameters(config)
    # Names of files contain the number of shards, which is therefore decided before data are read.
    shards = _deal_out(entries, DTYPES[dtype].itemsize, shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [
            f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
        ]
    pending: dict[str, np.ndarray] = {}
    shard = 0
    arrays = reader.parameters(dtype)
    for done, (entry, (_, array)) in enumerate(zip(entries, arrays, strict=True), 1):
        for name, tensor in entry.split(array):
            pending[name] = tensor
            if name == shards[shard][-1]:
                path = folder / names[shard]
                with writing():
                    safetensors.numpy.save_file(pending, path, metadata={"format": "pt"})
                pending.clear()
                shard += 1
        if progress:
            progress(done, len(entries))
    if len(shards) > 1:
        weight_map = {}
        for tensors, name in zip(shards, names, strict=True):
            weight_map |= dict.fromkeys(tensors, name)
        total_size = table.num_parameters(config) * DTYPES[dtype].itemsize
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    _write_configuration(folder, reader, dtype)


def _deal_out(entries: list[table.Parameter], itemsize: int, shard_bytes: int) -> list[list[str]]:
    """The names of the tensors of every shard."""
    shards: list[list[str]] = [[]]
    filled = 0
    for entry in entries:
        for part in entry.parts:
            tensor_bytes = itemsize * math.prod(part.shape)
            if filled and filled + tensor_bytes > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(part.name)
            filled += tensor_bytes
    return shards


def _write_configuration(folder: pathlib.Path, reader: table.CheckpointReader, dtype: str) -> None:
    """Writes config.json, generation_config.json and the files of the tokenizer."""
    tokenizer = reader.tokenizer
    # Null for "none": transformers would take 1 and 2 if the fields were absent.
    ids = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": list(reader.eos_ids) or None,
    }
    write_json(folder / "config.json", config_fields(reader.config, dtype) | ids)
    write_json(folder / GENERATION, reader.generation | ids)
    if tokenizer is None:
        return
    tokenizer.save(folder)
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": reader.config.max_position_embeddings,
        **tokenizer.special_tokens,
    }
    write_json(folder / "tokenizer_config.json", fields)


def config_fields(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Returns the fields of config.json. The reverse of `read_config`."""
    rope = config.rope
    scaling = None
    if rope.rope_type != "default":
        scaling = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
