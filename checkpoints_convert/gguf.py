"""GGUF files of architecture "llama": configuration and tensors. Quantised tensors are dequantised
to float32."""

from __future__ import annotations

import dataclasses
import functools
import mmap
import pathlib
from typing import Any

import numpy as np

from specjax import llama
from specjax.checkpoints_convert import gguf_tokenizer, table
from specjax.config import LlamaConfig, RopeConfig
from specjax.errors import SpecJAXError
from specjax.files import parsing

ROPE_FACTORS = "rope_freqs.weight"


def open_file(path: pathlib.Path) -> table.Opened:
    """Checks a GGUF file by its header; raises SpecJAXError naming what is wrong."""
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise SpecJAXError(
            "reading GGUF files needs the gguf package: pip install 'specjax[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise SpecJAXError(f"{path}: truncated or not a GGUF file: {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    with parsing(path):
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name == "general.architecture" or name.startswith(("llama.", "tokenizer."))
        }
        cfg = read_config(metadata, tensors)
        eos_ids = {
            int(id_) for key in keys if (id_ := metadata.get(f"tokenizer.ggml.{key}")) is not None
        }
    source = GGUFSource(path, tensors, cfg, reader.data.base)
    table.check(source, cfg, path)
    with parsing(path):
        tokenizer = gguf_tokenizer.build(metadata)
    return table.Opened(
        cfg,
        source.dtype,
        functools.partial(table.fused, source, cfg),
        tokenizer,
        tuple(sorted(eos_ids)),
    )


def read_config(metadata: dict[str, Any], tensors: dict[str, Any]) -> LlamaConfig:
    """Metadata, and what can only be told from the tensors (vocabulary, ties, biases, RoPE factors)
    -> LlamaConfig. Raises KeyError for what the metadata lack."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise SpecJAXError(f"architecture {architecture!r} is not supported; supported: 'llama'")
    if metadata.get("llama.expert_count", 0):
        raise SpecJAXError("mixture of experts (llama.expert_count) is not supported")
    if "token_embd.weight" not in tensors:
        raise SpecJAXError("tensor token_embd.weight is missing")
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    rotary = metadata.get("llama.rope.dimension_count")
    head_dim = metadata.get("llama.attention.key_length") or rotary or hidden // heads
    if rotary not in (None, head_dim):
        raise SpecJAXError(f"llama.rope.dimension_count {rotary} is not the head width {head_dim}")
    cfg = LlamaConfig(
        vocab_size=int(
            tensors["token_embd.weight"].shape[1]
        ),  # shapes are written innermost axis first
        hidden_size=hidden,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_layers=metadata["llama.block_count"],
        num_heads=heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        max_position_embeddings=metadata["llama.context_length"],
        rope=_read_rope(metadata),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )
    if ROPE_FACTORS not in tensors:
        return cfg
    if cfg.rope.rope_type != "default":
        raise SpecJAXError(
            f"tensor {ROPE_FACTORS} together with linear RoPE scaling is not supported"
        )
    return _llama3_rope(cfg, tensors[ROPE_FACTORS].data)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: GGUF stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _read_rope(metadata: dict[str, Any]) -> RopeConfig:
    theta = _shortest(metadata.get("llama.rope.freq_base", 10000.0))
    kind = metadata.get(
        "llama.rope.scaling.type", "linear"
    )  # a file older than this key has only the factor
    factor = (
        metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 1.0))
        or 1.0
    )
    if kind not in ("none", "linear"):
        raise SpecJAXError(
            f"RoPE type {kind!r} is not supported; supported: none, linear, and the factors of Llama 3"
        )
    return (
        RopeConfig(theta)
        if kind == "none" or factor == 1
        else RopeConfig(theta, "linear", _shortest(factor))
    )


def _llama3_rope(cfg: LlamaConfig, factors: np.ndarray) -> LlamaConfig:
    """`cfg`, unscaled so far, with the "llama3" scaling that divides its frequencies by `factors`
    [H/2].

    llama.cpp writes these divisors and not what they were computed from. Of that, only the factor
    differs among the
    released Llama 3 models: knees and original length are always 1, 4 and 8192. Any other divisors
      are refused.
    """
    factors = np.asarray(factors).reshape(-1)
    if factors.shape != (cfg.head_dim // 2,):
        raise SpecJAXError(
            f"tensor {ROPE_FACTORS} has shape {list(factors.shape)}, the head width requires "
            f"{[cfg.head_dim // 2]}"
        )
    if np.all(factors == 1):
        return cfg
    rope = RopeConfig(cfg.rope.theta, "llama3", _shortest(factors.max()), 1.0, 4.0, 8192)
    scaled = dataclasses.replace(cfg, rope=rope)
    if not np.allclose(
        factors, llama.rope_frequencies(cfg) / llama.rope_frequencies(scaled), rtol=1e-4
    ):
        raise SpecJAXError(
            f"tensor {ROPE_FACTORS} holds RoPE factors that are not those of Llama 3: not supported"
        )
    return scaled


class GGUFSource:
    """The tensors of a GGUF file under their Hugging Face names, in Hugging Face's order of rotary
    pairs."""

    def __init__(
        self, path: pathlib.Path, tensors: dict[str, Any], cfg: LlamaConfig, mapped: mmap.mmap
    ):
        import gguf

        self._mapped = mapped
        self._heads = {"attn_q": cfg.num_heads, "attn_k": cfg.num_kv_heads}
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.num_layers)
        self._own_names = {
            part.name: names.get_name(part.name, (".weight", ".bias"))
            for parameter in table.parameters(cfg)
            for part in parameter.parts
        }
        # `table.check` reports what has no name there as surplus.
        known = {own: name for name, own in self._own_names.items()}
        self._tensors = {
            known.get(name, name): tensor
            for name, tensor in tensors.items()
            if name != ROPE_FACTORS
        }
        self.tensors = {
            name: table.TensorInfo(
                tuple(map(int, reversed(tensor.shape))), _dtype(tensor), str(path)
            )
            for name, tensor in self._tensors.items()
        }
        # llama.cpp writes vectors as float32 whatever the matrices are, so the matrices tell what
        # the model was.
        self.dtype = table.widest(
            info.dtype for info in self.tensors.values() if len(info.shape) > 1
        )

    def own_name(self, name: str) -> str:
        """llama.cpp's name of a Hugging Face tensor."""
        return self._own_names.get(name, name)

    def read(self, name: str, index: table.Index = ()) -> np.ndarray:
        import gguf

        if hasattr(
            mmap, "MADV_DONTNEED"
        ):  # forget what was read before, or the whole file would stay resident
            self._mapped.madvise(mmap.MADV_DONTNEED)
        tensor, shape = self._tensors[name], self.tensors[name].shape
        kind = tensor.tensor_type.name
        if kind == "BF16":
            array = tensor.data.view(table.DTYPES["bfloat16"])
        else:
            array = (
                tensor.data
                if kind in ("F32", "F16")
                else gguf.dequantize(tensor.data, tensor.tensor_type)
            )
        heads = self._heads.get(tensor.name.split(".")[-2])
        if heads is None:
            return array.reshape(shape)[index]
        # llama.cpp turns neighbouring pairs, Hugging Face the two halves of a head: [heads, H/2, 2]
        # -> [heads, 2, H/2].
        return array.reshape(heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)[index]


def _dtype(tensor) -> str:
    import gguf

    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    # The library keeps its table of dequantisers private; `dequantize` itself needs data to tell.
    known = tensor.tensor_type in gguf.quants._type_traits
    return plain.get(tensor.tensor_type.name, "float32" if known else tensor.tensor_type.name)
