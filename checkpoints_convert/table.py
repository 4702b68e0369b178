"""The table that maps the tensors of Hugging Face Llama models to our fused parameters and back."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from specjax.config import LlamaConfig
from specjax.dtypes import DTYPES
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

Path = tuple[str | int, ...]
Index = tuple[slice, ...]
Array = np.ndarray | jax.Array

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
ROWS_AT_ONCE = 4096  # of an embedding, which is large
NO_TOKEN = 2**32 - 1  # -1 as GGUF files write it


class TensorInfo(NamedTuple):
    """The header of a tensor.

    Attributes:
      shape: shape of the tensor.
      dtype: a key of DTYPES, or the file's name for any other dtype.
      where: the file, for error messages.
    """

    shape: tuple[int, ...]
    dtype: str
    where: str


class TensorSource(Protocol):
    """Tensors of a file or folder by their Hugging Face names, read one at a time.

    Attributes:
      tensors: headers by name.
    """

    tensors: dict[str, TensorInfo]

    def own_name(self, name: str) -> str:
        """Returns the name that the file uses for a tensor, for error messages."""

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads the slice `index` of a tensor."""


class CheckpointReader(NamedTuple):
    """A checkpoint of any format, whose headers have been checked and whose data are not yet read.

    Attributes:
      config: shape and constants of the model.
      dtype: key of DTYPES; the narrowest dtype that holds every parameter exactly.
      parameters: function (dtype, shardings) -> iterator over (path, array), with paths into
        `llama.abstract_params`. With a tree of shardings like that of the parameters, the arrays
        are `jax.Array`s of which this process reads its own shards; without, they are whole numpy
        arrays. The iterator holds at most one parameter, or one layer, in host memory.
      tokenizer: None if the checkpoint has none.
      eos_ids: sorted ids that end a sequence.
      generation: fields of generation_config.json, such as a temperature, without those ids.
    """

    config: LlamaConfig
    dtype: str
    parameters: Callable[..., Iterator[tuple[Path, Array]]]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    generation: dict[str, Any]


class Part(NamedTuple):
    """A Hugging Face tensor as a block of one of our parameters.

    Attributes:
      name: name of the tensor.
      shape: shape of the tensor.
      block: shape of the same values inside our parameter.
    """

    name: str
    shape: tuple[int, ...]
    block: tuple[int, ...]

    def cut(self, index: Index) -> tuple[Index, list[int]]:
        """Translates the slice `index` of the block to a slice of the tensor.

        An axis of the tensor is one or more axes of the block, of which only the first can be cut.

        Returns:
          The slice of the tensor, and the shape of the slice of the block.
        """
        tensor_index = [slice(None)] * len(self.shape)
        block_shape = []
        values_before = [math.prod(self.shape[:axis]) for axis in range(len(self.shape))]
        for axis, (along, size) in enumerate(zip(index, self.block, strict=True)):
            start, stop, _ = along.indices(size)
            block_shape.append(stop - start)
            if stop - start == size:
                continue
            tensor_axis = values_before.index(math.prod(self.block[:axis]))
            step, rest = divmod(self.shape[tensor_axis], size)
            assert rest == 0, (self, index)
            tensor_index[tensor_axis] = slice(start * step, stop * step)
        return tuple(tensor_index), block_shape


class Parameter(NamedTuple):
    """One of our parameters: the blocks of its parts, concatenated along `axis`."""

    path: Path
    axis: int
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of our parameter, as in `llama.abstract_params`."""
        sizes = list(self.parts[0].block)
        sizes[self.axis] = sum(part.block[self.axis] for part in self.parts)
        return tuple(sizes)

    def fuse(self, read: Callable[[str, Index], np.ndarray], index: Index) -> np.ndarray:
        """Returns the slice `index` of our parameter.

        Args:
          read: function (name, index) -> slice of a Hugging Face tensor.
          index: one slice per axis; whole along `axis` if there are several parts.
        """
        assert len(self.parts) == 1 or index[self.axis] == slice(None), (self, index)
        blocks = []
        for part in self.parts:
            tensor_index, block_shape = part.cut(index)
            block = read(part.name, tensor_index).reshape(block_shape)
            blocks.append(block)
        if len(blocks) == 1:
            return blocks[0]
        return np.concatenate(blocks, self.axis)

    def split(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the name and the Hugging Face tensor of every part. The reverse of `fuse`."""
        sizes = [part.block[self.axis] for part in self.parts]
        blocks = np.split(array, np.cumsum(sizes)[:-1], self.axis)
        for part, block in zip(self.parts, blocks, strict=True):
            yield part.name, np.ascontiguousarray(block).reshape(part.shape)


def parameters(config: LlamaConfig) -> list[Parameter]:
    """Returns every parameter of `llama.abstract_params(config)`.

    Their order is that in which checkpoints are read and written.
    """
    V, D = config.vocab_size, config.hidden_size
    result = [_single(("embed_VD",), EMBEDDING, (V, D))]
    for layer in range(config.num_layers):
        result += _layer_parameters(config, layer)
    result.append(_single(("final_norm_D",), "model.norm.weight", (D,)))
    if not config.tie_word_embeddings:
        result.append(_single(("lm_head_VD",), HEAD, (V, D)))
    return result


def num_parameters(config: LlamaConfig) -> int:
    """Returns the number of values in a model's parameters."""
    one_layer = dataclasses.replace(config, num_layers=1)
    layer_size = _num_values(_layer_parameters(config, 0))
    return _num_values(parameters(one_layer)) + (config.num_layers - 1) * layer_size


def _num_values(parameters: list[Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _layer_parameters(config: LlamaConfig, layer: int) -> list[Parameter]:
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K, G = config.num_heads, config.num_kv_heads, config.group_size
    prefix = f"model.layers.{layer}"
    attention = ("layers", layer, "attention")
    mlp = ("layers", layer, "mlp")
    out = f"{prefix}.self_attn.o_proj"
    down = f"{prefix}.mlp.down_proj"

    result = [
        _single((*attention, "norm_D"), f"{prefix}.input_layernorm.weight", (D,)),
        _qkv(config, (*attention, "qkv_KGHD"), f"{prefix}.self_attn", "weight", (D,)),
        _single((*attention, "out_DKGH"), f"{out}.weight", (D, N * H), block=(D, K, G, H)),
    ]
    if config.attention_bias:
        result += [
            _qkv(config, (*attention, "qkv_bias_KGH"), f"{prefix}.self_attn", "bias", ()),
            _single((*attention, "out_bias_D"), f"{out}.bias", (D,)),
        ]
    result += [
        _single((*mlp, "norm_D"), f"{prefix}.post_attention_layernorm.weight", (D,)),
        _gate_up(config, (*mlp, "gate_up_2FD"), f"{prefix}.mlp", "weight", (D,)),
        _single((*mlp, "down_DF"), f"{down}.weight", (D, F)),
    ]
    if config.mlp_bias:
        result += [
            _gate_up(config, (*mlp, "gate_up_bias_2F"), f"{prefix}.mlp", "bias", ()),
            _single((*mlp, "down_bias_D"), f"{down}.bias", (D,)),
        ]
    return result


def _single(
    path: Path, name: str, shape: tuple[int, ...], block: tuple[int, ...] | None = None
) -> Parameter:
    """A parameter that is one tensor, in another shape if `block` is given."""
    return Parameter(path, 0, (Part(name, shape, block or shape),))


def _qkv(
    config: LlamaConfig, path: Path, prefix: str, suffix: str, tail: tuple[int, ...]
) -> Parameter:
    """Queries, keys and values: per kv head its G query heads, its key head and its value head."""
    H, K, G = config.head_dim, config.num_kv_heads, config.group_size
    parts = []
    for letter, group in (("q", G), ("k", 1), ("v", 1)):
        name = f"{prefix}.{letter}_proj.{suffix}"
        parts.append(Part(name, (K * group * H, *tail), (K, group, H, *tail)))
    return Parameter(path, 1, tuple(parts))


def _gate_up(
    config: LlamaConfig, path: Path, prefix: str, suffix: str, tail: tuple[int, ...]
) -> Parameter:
    F = config.intermediate_size
    parts = []
    for half in ("gate", "up"):
        parts.append(Part(f"{prefix}.{half}_proj.{suffix}", (F, *tail), (1, F, *tail)))
    return Parameter(path, 0, tuple(parts))


def check_num_layers(config: LlamaConfig, count: int, unit: str, where: object) -> None:
    """Rejects more layers than a checkpoint can hold, before anything is built for each of them.

    Args:
      config: configuration of the model.
      count: number of tensors or files of the checkpoint.
      unit: what `count` counts, for the error message.
      where: file or folder, for the error message.
    """
    if config.num_layers > count:
        raise SpecJAXError(
            f"{where}: the configuration has {config.num_layers} layers, but there are only "
            f"{count} {unit}"
        )


def check_tensors(source: TensorSource, config: LlamaConfig, where: object) -> None:
    """Compares the name, shape and dtype of every tensor with the table.

    Beyond the table, a model with tied embeddings may have an `lm_head.weight` that equals the
    embedding, and nothing else.

    Raises:
      SpecJAXError: naming the first tensor that is missing, surplus or unsuitable.
    """
    check_num_layers(config, len(source.tensors), "tensors", where)
    expected = {}
    for parameter in parameters(config):
        for part in parameter.parts:
            expected[part.name] = part.shape
    for name in expected:
        if name not in source.tensors:
            raise SpecJAXError(f"{where}: tensor {source.own_name(name)} is missing")
    has_tied_head = config.tie_word_embeddings and HEAD in source.tensors
    if has_tied_head:
        expected[HEAD] = expected[EMBEDDING]
    for name, info in source.tensors.items():
        fault = _tensor_fault(info, expected.get(name))
        if fault is not None:
            raise SpecJAXError(f"{info.where}: tensor {source.own_name(name)} {fault}")
    if has_tied_head and not _equal_rows(source, config.vocab_size):
        raise SpecJAXError(
            f"{source.tensors[HEAD].where}: tensor {source.own_name(HEAD)} differs from the "
            "embedding, but the configuration has tie_word_embeddings"
        )


def _tensor_fault(info: TensorInfo, shape: tuple[int, ...] | None) -> str | None:
    if shape is None:
        return "is not part of this model (surplus)"
    if info.shape != shape:
        return f"has shape {list(info.shape)}, the configuration requires {list(shape)}"
    if info.dtype not in DTYPES:
        return f"is stored as {info.dtype}; supported: {', '.join(DTYPES)}"
    return None


def _equal_rows(source: TensorSource, num_rows: int) -> bool:
    """Whether the output head and the embedding have the same bits."""
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = (slice(start, min(start + ROWS_AT_ONCE, num_rows)),)
        if source.read(HEAD, rows).tobytes() != source.read(EMBEDDING, rows).tobytes():
            return False
    return True


def reachable_eos_ids(
    eos_ids: set[int], config: LlamaConfig, tokenizer: Tokenizer | None, where: object
) -> tuple[int, ...]:
    """Returns the ids that end a sequence, sorted, without those that stand for "none".

    Args:
      eos_ids: ids of the checkpoint; negative ones, and -1 as an unsigned number, mean "none".
      config: configuration of the model.
      tokenizer: the tokenizer; a model never emits ids that it lacks.
      where: file or folder, for the error message.

    Raises:
      SpecJAXError: an id that the model can never emit, so that sequences would not end.
    """
    limit, owner = config.vocab_size, "model"
    if tokenizer is not None and tokenizer.vocab_size < limit:
        limit, owner = tokenizer.vocab_size, "tokenizer"
    result = []
    for id_ in sorted(eos_ids):
        if id_ < 0 or id_ == NO_TOKEN:
            continue
        if id_ >= limit:
            raise SpecJAXError(
                f"{where}: end-of-sequence token {id_} can never be emitted: the {owner} has "
                f"{limit} tokens; add the token to the tokenizer, or remove the id"
            )
        result.append(id_)
    return tuple(result)


def read_parameters(
    source: TensorSource, config: LlamaConfig, dtype: str, shardings: Any = None
) -> Iterator[tuple[Path, Array]]:
    """Reads, casts and fuses one parameter after the other; see `CheckpointReader.parameters`.

    The tensors must have passed `check_tensors`.
    """

    def read(name, index):
        return cast(source.read(name, index), dtype, source.own_name(name))

    for parameter in parameters(config):
        sharding = None if shardings is None else leaf(shardings, parameter.path)
        read_slice = functools.partial(parameter.fuse, read)
        yield parameter.path, make_array(read_slice, parameter.shape, sharding)


def leaf(tree: Any, path: Path) -> Any:
    """Returns the leaf at `path` of a tree like that of the parameters."""
    return functools.reduce(operator.getitem, path, tree)


def make_array(
    read: Callable[[Index], np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding | None,
) -> Array:
    """Builds an array from the slices that `read` returns.

    Returns:
      A `jax.Array` of this process's shards, or a whole numpy array if `sharding` is None.
    """
    if sharding is None:
        return read((slice(None),) * len(shape))
    # Devices with equal shards share one read. Python 3.11 cannot hash slices.
    indices = {}
    for index in sharding.addressable_devices_indices_map(shape).values():
        indices[str(index)] = index
    slices = {key: read(index) for key, index in indices.items()}
    # The caller may disallow transfers; this one is explicit, though JAX counts it as implicit.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, lambda index: slices[str(index)])


def cast(array: Array, dtype: str, name: str) -> Array:
    """Returns `array` as DTYPES[dtype].

    Args:
      array: a numpy array, or a `jax.Array` whose shards are cast one by one.
      dtype: key of DTYPES.
      name: name of the tensor, for the error message.

    Raises:
      SpecJAXError: a finite value becomes infinite.
    """
    if array.dtype == DTYPES[dtype]:
        return array
    if isinstance(array, jax.Array):
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}

        def read(index):
            return cast(np.asarray(shards[str(index)]), dtype, name)

        return make_array(read, array.shape, array.sharding)
    with np.errstate(over="ignore"):
        result = array.astype(DTYPES[dtype])
    # bfloat16 has the range of float32. Only float16 overflows, and the check costs a pass.
    if dtype == "float16" and not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise SpecJAXError(f"tensor {name} does not fit into float16: values above 65504")
    return result
