"""GGUF files of architecture "llama". Quantised tensors are dequantised to float32."""

from __future__ import annotations

import dataclasses
import functools
import mmap
import pathlib
from typing import Any

import numpy as np

from specjax import dtypes, llama
from specjax.checkpoints_convert import gguf_header, gguf_tokenizer, table
from specjax.checkpoints_convert.gguf_header import GGUFHeader, GGUFTensor
from specjax.config import LlamaConfig, RopeConfig
from specjax.dtypes import DTYPES
from specjax.errors import SpecJAXError
from specjax.files import parsing

ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "token_embd.weight"
PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_file(path: pathlib.Path) -> table.CheckpointReader:
    """Opens a GGUF file and checks its header.

    Raises:
      SpecJAXError: naming the field or tensor that cannot be used, or the missing gguf package.
    """
    try:
        import gguf  # noqa: F401 (an optional package, needed from here on)
    except ModuleNotFoundError as error:
        raise SpecJAXError(
            "reading GGUF files needs the gguf package: pip install 'specjax[gguf]'"
        ) from error
    header = gguf_header.read(path)
    with parsing(path):
        config = read_config(header)
        table.check_num_layers(config, len(header.tensors), "tensors", path)
    source = GGUFSource(path, header, config)
    table.check_tensors(source, config, path)
    with parsing(path):
        tokenizer = gguf_tokenizer.build(header.metadata, path)
        eos_ids = gguf_tokenizer.end_of_generation_ids(header.metadata)
        eos_ids = table.reachable_eos_ids(eos_ids, config, tokenizer, path)
    read_parameters = functools.partial(table.read_parameters, source, config)
    return table.CheckpointReader(config, source.dtype, read_parameters, tokenizer, eos_ids, {})


def read_config(header: GGUFHeader) -> LlamaConfig:
    """Returns the configuration of a GGUF file.

    Vocabulary size, ties, biases and the factors of "llama3" RoPE come from the tensors.

    Raises:
      SpecJAXError: for a model that is not supported.
      KeyError: a field is missing.
    """
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise SpecJAXError(f"architecture {architecture!r} is not supported; supported: 'llama'")
    if metadata.get("llama.expert_count", 0):
        raise SpecJAXError("mixture of experts (llama.expert_count) is not supported")
    if EMBEDDING not in tensors:
        raise SpecJAXError(f"tensor {EMBEDDING} is missing")
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    rotary_dim = metadata.get("llama.rope.dimension_count")
    head_dim = metadata.get("llama.attention.key_length") or rotary_dim or hidden_size // num_heads
    if rotary_dim not in (None, head_dim):
        raise SpecJAXError(f"llama.rope.dimension_count must be {head_dim}, got {rotary_dim}")
    config = LlamaConfig(
        vocab_size=tensors[EMBEDDING].shape[0],
        hidden_size=hidden_size,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_layers=metadata["llama.block_count"],
        num_heads=num_heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        max_position_embeddings=metadata["llama.context_length"],
        rope=_read_rope(metadata),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    )
    if ROPE_FACTORS not in tensors:
        return config
    if config.rope.rope_type != "default":
        raise SpecJAXError(f"tensor {ROPE_FACTORS} with linear RoPE scaling is not supported")
    return _llama3_rope(config, header)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value; 1e-5 is stored as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _read_rope(metadata: dict[str, Any]) -> RopeConfig:
    theta = _shortest(metadata.get("llama.rope.freq_base", 10000.0))
    # A file older than the key of the type has a factor only.
    rope_type = metadata.get("llama.rope.scaling.type", "linear")
    older_factor = metadata.get("llama.rope.scale_linear", 1.0)
    factor = metadata.get("llama.rope.scaling.factor", older_factor) or 1.0
    if rope_type not in ("none", "linear"):
        raise SpecJAXError(
            f"RoPE type {rope_type!r} is not supported; supported: none, linear, and the factors "
            "of Llama 3"
        )
    if rope_type == "none" or factor == 1:
        return RopeConfig(theta)
    return RopeConfig(theta, "linear", _shortest(factor))


def _llama3_rope(config: LlamaConfig, header: GGUFHeader) -> LlamaConfig:
    """Returns `config` with the "llama3" scaling that the file's RoPE factors stand for.

    llama.cpp writes the divisors of the frequencies, not the constants that they were computed
    from. Of these, only the factor differs among the released Llama 3 models: the frequency factors
    and the original length are always 1, 4 and 8192. Other divisors are rejected.
    """
    tensor = header.tensors[ROPE_FACTORS]
    num_factors = config.head_dim // 2
    if tensor.shape != (num_factors,) or tensor.kind.name != "F32":
        raise SpecJAXError(
            f"tensor {ROPE_FACTORS} has shape {list(tensor.shape)} and type {tensor.kind.name}; "
            f"head_dim {config.head_dim} requires {[num_factors]} and F32"
        )
    factors = _read_blocks(header, tensor).view(np.float32)
    if np.all(factors == 1):
        return config
    rope = RopeConfig(config.rope.theta, "llama3", _shortest(factors.max()), 1.0, 4.0, 8192)
    scaled = dataclasses.replace(config, rope=rope)
    expected = llama.rope_frequencies(config) / llama.rope_frequencies(scaled)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise SpecJAXError(
            f"tensor {ROPE_FACTORS} holds other RoPE factors than those of Llama 3: not supported"
        )
    return scaled


def _read_blocks(header: GGUFHeader, tensor: GGUFTensor) -> np.ndarray:
    """The bytes of a tensor, uint8, with the tensor's shape but for the last axis."""
    start = header.data_start + tensor.offset
    data = np.frombuffer(header.data, np.uint8, tensor.num_bytes, start)
    return data.reshape(*tensor.shape[:-1], -1)


class GGUFSource:
    """The tensors of a GGUF file, named and ordered as Hugging Face's.

    Attributes:
      tensors: headers by name.
      dtype: key of DTYPES that holds every tensor exactly.
    """

    def __init__(self, path: pathlib.Path, header: GGUFHeader, config: LlamaConfig):
        self._header = header
        self._num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._own_names = _own_names(config)
        names = {own_name: name for name, own_name in self._own_names.items()}
        self._tensors: dict[str, GGUFTensor] = {}
        self.tensors: dict[str, table.TensorInfo] = {}
        for own_name, tensor in header.tensors.items():
            if own_name == ROPE_FACTORS:
                continue
            name = names.get(own_name, own_name)  # `check_tensors` rejects unknown names
            self._tensors[name] = tensor
            self.tensors[name] = table.TensorInfo(tensor.shape, _dtype(tensor), str(path))
        # llama.cpp stores vectors as float32 in all models; matrices have the dtype of the model.
        matrices = [info.dtype for info in self.tensors.values() if len(info.shape) > 1]
        self.dtype = dtypes.widest(matrices)

    def own_name(self, name: str) -> str:
        """Returns llama.cpp's name of a Hugging Face tensor."""
        return self._own_names.get(name, name)

    def read(self, name: str, index: table.Index = ()) -> np.ndarray:
        """Reads the slice `index` of a tensor, dequantised."""
        import gguf

        if hasattr(mmap, "MADV_DONTNEED"):
            # Drop the pages read before, or the whole file would stay resident.
            self._header.data.madvise(mmap.MADV_DONTNEED)
        tensor = self._tensors[name]
        blocks = _read_blocks(self._header, tensor)
        if tensor.kind.name in PLAIN_DTYPES:
            array = blocks.view(DTYPES[PLAIN_DTYPES[tensor.kind.name]])
        else:
            array = gguf.dequantize(blocks, tensor.kind)
        num_heads = self._num_heads.get(tensor.name.split(".")[-2])
        if num_heads is not None:
            # llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head:
            # [heads, H/2, 2] -> [heads, 2, H/2].
            pairs = array.reshape(num_heads, -1, 2, *tensor.shape[1:])
            array = pairs.swapaxes(1, 2)
        return array.reshape(tensor.shape)[index]


def _own_names(config: LlamaConfig) -> dict[str, str]:
    """llama.cpp's names of the tensors by their Hugging Face names."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    result = {}
    for parameter in table.parameters(config):
        for part in parameter.parts:
            result[part.name] = names.get_name(part.name, (".weight", ".bias"))
    return result


def _dtype(tensor: GGUFTensor) -> str:
    import gguf

    kind = tensor.kind
    if kind.name in PLAIN_DTYPES:
        return PLAIN_DTYPES[kind.name]
    # The library's table of dequantisers is private; `dequantize` itself needs data.
    if kind in gguf.quants._type_traits:
        return "float32"
    return kind.name
