"""Hugging Face Llama folders: config.json, safetensors (one file or shards), tokenizer. Read and
written."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from specjax import tokenizer as tokenizer_lib
from specjax.checkpoints_convert import table
from specjax.config import LlamaConfig, RopeConfig
from specjax.errors import SpecJAXError
from specjax.files import parsing, read_json, write_json, writing

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_folder(folder: pathlib.Path) -> table.Opened:
    """Checks a Llama folder by its headers; raises SpecJAXError naming what is wrong."""
    cfg = read_config(folder)
    source = SafetensorsSource(folder)
    table.check(source, cfg, folder)
    tokenizer = tokenizer_lib.from_folder(folder)
    dtype = table.widest(info.dtype for info in source.tensors.values())
    return table.Opened(
        cfg,
        dtype,
        functools.partial(table.fused, source, cfg),
        tokenizer,
        read_eos_ids(folder, tokenizer),
    )


def read_config(folder: pathlib.Path) -> LlamaConfig:
    """config.json -> LlamaConfig.

    Raises SpecJAXError, naming the value, for an architecture, RoPE type, activation or
    quantisation that is not supported, and for fields that are missing.
    """
    path = folder / "config.json"
    fields = read_json(path)
    with parsing(path):
        architectures, kind = (
            fields.get("architectures") or ["LlamaForCausalLM"],
            fields.get("model_type"),
        )
        if kind != "llama" or architectures != ["LlamaForCausalLM"]:
            raise SpecJAXError(
                f"architectures {architectures!r} (model_type {kind!r}) is not supported; "
                "supported: ['LlamaForCausalLM'] ('llama')"
            )
        if fields.get("quantization_config"):
            method = fields["quantization_config"].get("quant_method", "unknown")
            raise SpecJAXError(
                f"quantised weights ({method}) are not supported; use the plain ones or a GGUF"
            )
        if fields.get("hidden_act", "silu") != "silu":
            raise SpecJAXError(
                f"hidden_act {fields['hidden_act']!r} is not supported; supported: 'silu'"
            )
        heads = fields["num_attention_heads"]
        return LlamaConfig(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=heads
            if fields.get("num_key_value_heads") is None
            else fields["num_key_value_heads"],
            head_dim=fields["hidden_size"] // heads
            if fields.get("head_dim") is None
            else fields["head_dim"],
            rms_norm_eps=fields["rms_norm_eps"],
            max_position_embeddings=fields["max_position_embeddings"],
            rope=_read_rope(fields),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bool(fields.get("attention_bias", False)),
            mlp_bias=bool(fields.get("mlp_bias", False)),
        )


def _read_rope(fields: dict[str, Any]) -> RopeConfig:
    """`rope_theta` and `rope_scaling`, or what transformers 5 makes of the two: `rope_parameters`."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    theta = 10000.0 if theta is None else theta  # Llama 1 and 2 do not write it
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1)) not in (1, None):
        raise SpecJAXError("partial_rotary_factor is not supported")
    if kind == "linear":
        return RopeConfig(float(theta), kind, float(rope["factor"]))
    if kind == "llama3":
        original = rope.get(
            "original_max_position_embeddings", fields.get("original_max_position_embeddings")
        )
        if original is None:
            raise KeyError("original_max_position_embeddings")
        return RopeConfig(
            float(theta),
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(original),
        )
    return RopeConfig(float(theta), str(kind))  # which refuses types it does not know


def read_eos_ids(
    folder: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer | None
) -> tuple[int, ...]:
    """The union of the ids in config.json, generation_config.json and the tokenizer, sorted."""
    ids = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        for id_ in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(id_, int):
                raise SpecJAXError(
                    f"{folder / name}: eos_token_id must be an integer or a list of them, got {value!r}"
                )
            ids.add(id_)
    return tuple(sorted(ids))


class SafetensorsSource:
    """The tensors of a folder's safetensors files, opened one at a time so that no more than one
    stays mapped."""

    def __init__(self, folder: pathlib.Path):
        self.tensors: dict[str, table.TensorInfo] = {}
        self._files: dict[str, pathlib.Path] = {}
        indexed = None
        names = [SINGLE]
        if not (folder / SINGLE).exists():
            indexed = _read_index(folder)
            names = sorted(set(indexed.values()))
        for name in names:
            path = folder / name
            if not path.exists():
                raise SpecJAXError(f"{folder}: shard {name} is in the index but not in the folder")
            for tensor, info in _read_header(path).items():
                if tensor.endswith("rotary_emb.inv_freq"):
                    continue
                if indexed is not None and indexed.get(tensor) != name:
                    raise SpecJAXError(
                        f"{path}: tensor {tensor} is in this shard, but the index does not say so"
                    )
                self.tensors[tensor] = info
                self._files[tensor] = path
        for tensor, name in (indexed or {}).items():
            if tensor not in self.tensors and not tensor.endswith("rotary_emb.inv_freq"):
                raise SpecJAXError(
                    f"{folder / name}: tensor {tensor} is missing; the index says it is in this shard"
                )

    def own_name(self, name: str) -> str:
        return name

    def read(self, name: str, index: table.Index = ()) -> np.ndarray:
        try:
            with safetensors.safe_open(self._files[name], framework="np") as file:
                return file.get_slice(name)[index]
        except (safetensors.SafetensorError, OSError) as error:
            raise SpecJAXError(f"cannot read {self._files[name]}: {error}") from error


def _read_index(folder: pathlib.Path) -> dict[str, str]:
    """The index's map from tensor to shard; every shard that lies in the folder must occur in it."""
    present = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    path = folder / INDEX
    if not path.exists():
        raise SpecJAXError(
            f"{folder}: no {INDEX} for the shards, such as {present[0]}"
            if present
            else f"{folder}: neither {SINGLE} nor {INDEX}: no safetensors weights here"
        )
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SpecJAXError(f"{path}: no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise SpecJAXError(
                f"{path}: {name!r}, given for tensor {tensor}, is not the name of a file"
            )
    for name in present:
        if name not in weight_map.values():
            raise SpecJAXError(
                f"{folder}: shard {name} is in the folder but missing from the index"
            )
    return weight_map


def _read_header(path: pathlib.Path) -> dict[str, table.TensorInfo]:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            result = {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                dtype = STORED_DTYPES.get(part.get_dtype(), part.get_dtype())
                result[name] = table.TensorInfo(tuple(part.get_shape()), dtype, str(path))
            return result
    except (safetensors.SafetensorError, OSError) as error:
        raise SpecJAXError(f"{path}: truncated or not a safetensors file: {error}") from error


def write_folder(
    folder: pathlib.Path,
    opened: table.Opened,
    dtype: str,
    progress: Callable | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes into the empty `folder` what transformers loads as LlamaForCausalLM; no more than a
    shard is in memory."""
    cfg = opened.config
    size = table.DTYPES[dtype].itemsize
    entries = table.parameters(cfg)
    shards: list[list[str]] = [
        []
    ]  # names by shard, decided before data are read: file names hold their number
    filled = 0
    for entry in entries:
        for part in entry.parts:
            tensor_bytes = size * math.prod(part.shape)
            if filled and filled + tensor_bytes > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(part.name)
            filled += tensor_bytes
    files = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    pending: dict[str, np.ndarray] = {}
    shard = 0
    for done, (entry, (_, array)) in enumerate(zip(entries, opened.parameters(dtype), strict=True)):
        for name, tensor in entry.split(array):
            pending[name] = tensor
            if name == shards[shard][-1]:
                with writing():
                    safetensors.numpy.save_file(
                        pending, folder / files[shard], metadata={"format": "pt"}
                    )
                pending.clear()
                shard += 1
        if progress:
            progress(done + 1, len(entries))
    if len(shards) > 1:
        total = size * sum(math.prod(part.shape) for entry in entries for part in entry.parts)
        weight_map = {
            name: file for names, file in zip(shards, files, strict=True) for name in names
        }
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    tokenizer = opened.tokenizer
    # Null where there is none: transformers would take 1 and 2 for fields that are absent.
    ids = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_id,
        "eos_token_id": list(opened.eos_ids) or None,
    }
    write_json(folder / "config.json", config_fields(cfg, dtype) | ids)
    write_json(folder / "generation_config.json", ids)
    if tokenizer is not None:
        tokenizer.save(folder)
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": cfg.max_position_embeddings,
                **tokenizer.special_tokens,
            },
        )


def config_fields(cfg: LlamaConfig, dtype: str) -> dict[str, Any]:
    """LlamaConfig -> the fields of config.json; `read_config` reverses it."""
    rope = cfg.rope
    scaling = (
        None
        if rope.rope_type == "default"
        else {"rope_type": rope.rope_type, "factor": rope.factor}
    )
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
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "rms_norm_eps": cfg.rms_norm_eps,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "attention_bias": cfg.attention_bias,
        "mlp_bias": cfg.mlp_bias,
    }
