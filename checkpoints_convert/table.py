"""The one table that ties the names of Hugging Face Llama tensors to our fused parameters, for both
directions."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np

from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

Path = tuple[str | int, ...]
Index = tuple[slice, ...]
Array = np.ndarray | jax.Array


class TensorInfo(NamedTuple):
    """What a header says of a tensor. `dtype` is a key of DTYPES, or else the file's own name for
    it."""

    shape: tuple[int, ...]
    dtype: str
    where: str  # file and, where it differs, the file's own name of the tensor: for messages


class TensorSource(Protocol):
    """Named tensors of a file or folder, under their Hugging Face names; nothing is read before
    `read`."""

    tensors: dict[str, TensorInfo]

    def own_name(self, name: str) -> str: ...

    def read(self, name: str, index: Index = ()) -> np.ndarray: ...


class Opened(NamedTuple):
    """A checkpoint in any format, checked by its headers, whose data are not read yet.

    Attributes:
      config: the model.
      dtype: key of DTYPES: what `parameters` should be read as to lose nothing.
      parameters: (dtype, shardings) -> iterator over (path in `llama.abstract_params`, array). With
        a tree of shardings like that of the parameters these are `jax.Array`s, of which this
        process reads its own shards; without, they are numpy's and whole. No more than a parameter,
        or a layer, is in host memory beside them.
      tokenizer: None where the source has none.
      eos_ids: every id that ends a sequence.
    """

    config: LlamaConfig
    dtype: str
    parameters: Callable[..., Iterator[tuple[Path, Array]]]
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]


class Part(NamedTuple):
    """A Hugging Face tensor: its name and shape there, and the shape of its block in our fused
    parameter."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, ...]

    def cut(self, index: Index) -> tuple[Index, list[int]]:
        """The slice `index` of the block: the slice of the tensor that it is, and its shape.

        An axis of the tensor is one or several of the block, of which only the first can be cut.
        """
        result, sizes = [slice(None)] * len(self.shape), []
        boundaries = [math.prod(self.shape[:axis]) for axis in range(len(self.shape))]
        for axis, (along, size) in enumerate(zip(index, self.block, strict=True)):
            start, stop, _ = along.indices(size)
            sizes.append(stop - start)
            if stop - start < size:
                theirs = boundaries.index(math.prod(self.block[:axis]))
                step, rest = divmod(self.shape[theirs], size)
                assert not rest, (self, index)
                result[theirs] = slice(start * step, stop * step)
        return tuple(result), sizes


class Parameter(NamedTuple):
    """One of our parameters: the blocks of its parts concatenated along `axis`."""

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
        """The slice `index` of our parameter, of slices that `read` gives of tensors in their
        Hugging Face shapes."""
        assert len(self.parts) == 1 or index[self.axis] == slice(None), (self, index)
        cuts = [(part.name, *part.cut(index)) for part in self.parts]
        blocks = [read(name, theirs).reshape(sizes) for name, theirs, sizes in cuts]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, self.axis)

    def split(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Our parameter -> (name, tensor in its Hugging Face shape), the reverse of `fuse`."""
        ends = np.cumsum([part.block[self.axis] for part in self.parts])[:-1]
        for part, block in zip(self.parts, np.split(array, ends, self.axis), strict=True):
            yield part.name, np.ascontiguousarray(block).reshape(part.shape)


def parameters(cfg: LlamaConfig) -> list[Parameter]:
    """Every parameter of `llama.abstract_params(cfg)`, in the order in which checkpoints are read
    and written."""
    V, D, F, H, N = (
        cfg.vocab_size,
        cfg.hidden_size,
        cfg.intermediate_size,
        cfg.head_dim,
        cfg.num_heads,
    )
    K, G = cfg.num_kv_heads, cfg.group_size

    def plain(
        path: Path, name: str, shape: tuple[int, ...], block: tuple[int, ...] | None = None
    ) -> Parameter:
        return Parameter(path, 0, (Part(name, shape, block or shape),))

    def qkv(path: Path, prefix: str, suffix: str, *tail: int) -> Parameter:
        parts = (("q", N, G), ("k", K, 1), ("v", K, 1))
        return Parameter(
            path,
            1,
            tuple(
                Part(f"{prefix}.{letter}_proj.{suffix}", (heads * H, *tail), (K, group, H, *tail))
                for letter, heads, group in parts
            ),
        )

    def gate_up(path: Path, prefix: str, suffix: str, *tail: int) -> Parameter:
        return Parameter(
            path,
            0,
            tuple(
                Part(f"{prefix}.{half}_proj.{suffix}", (F, *tail), (1, F, *tail))
                for half in ("gate", "up")
            ),
        )

    table = [plain(("embed_VD",), "model.embed_tokens.weight", (V, D))]
    for i in range(cfg.num_layers):
        layer, attention, mlp = (
            f"model.layers.{i}",
            ("layers", i, "attention"),
            ("layers", i, "mlp"),
        )
        table += [
            plain((*attention, "norm_D"), f"{layer}.input_layernorm.weight", (D,)),
            qkv((*attention, "qkv_KGHD"), f"{layer}.self_attn", "weight", D),
            plain(
                (*attention, "out_DKGH"),
                f"{layer}.self_attn.o_proj.weight",
                (D, N * H),
                (D, K, G, H),
            ),
        ]
        if cfg.attention_bias:
            table += [
                qkv((*attention, "qkv_bias_KGH"), f"{layer}.self_attn", "bias"),
                plain((*attention, "out_bias_D"), f"{layer}.self_attn.o_proj.bias", (D,)),
            ]
        table += [
            plain((*mlp, "norm_D"), f"{layer}.post_attention_layernorm.weight", (D,)),
            gate_up((*mlp, "gate_up_2FD"), f"{layer}.mlp", "weight", D),
            plain((*mlp, "down_DF"), f"{layer}.mlp.down_proj.weight", (D, F)),
        ]
        if cfg.mlp_bias:
            table += [
                gate_up((*mlp, "gate_up_bias_2F"), f"{layer}.mlp", "bias"),
                plain((*mlp, "down_bias_D"), f"{layer}.mlp.down_proj.bias", (D,)),
            ]
    table.append(plain(("final_norm_D",), "model.norm.weight", (D,)))
    if not cfg.tie_word_embeddings:
        table.append(plain(("lm_head_VD",), "lm_head.weight", (V, D)))
    return table


def check(source: TensorSource, cfg: LlamaConfig, where: object) -> None:
    """Compares every name, shape and dtype of the headers with the table; raises SpecJAXError
    naming the first fault.

    The one tensor that a tied model may carry beyond the table is an `lm_head.weight` equal to the
    embedding.
    """
    expected = {part.name: part.shape for parameter in parameters(cfg) for part in parameter.parts}
    for name in expected:
        if name not in source.tensors:
            raise SpecJAXError(f"{where}: tensor {source.own_name(name)} is missing")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied_copy = cfg.tie_word_embeddings and head in source.tensors
    for name, info in source.tensors.items():
        shape = expected[embedding] if tied_copy and name == head else expected.get(name)
        if shape is None:
            raise SpecJAXError(
                f"{info.where}: tensor {source.own_name(name)} is not part of this model (surplus)"
            )
        if info.shape != shape:
            raise SpecJAXError(
                f"{info.where}: tensor {source.own_name(name)} has shape {list(info.shape)}, "
                f"the configuration requires {list(shape)}"
            )
        if info.dtype not in DTYPES:
            raise SpecJAXError(
                f"{info.where}: tensor {source.own_name(name)} is stored as {info.dtype}; "
                f"supported: {', '.join(DTYPES)}"
            )
    # A few rows at a time: an embedding is large.
    V = cfg.vocab_size
    rows = [(slice(start, min(start + 4096, V)),) for start in range(0, V, 4096)]
    if tied_copy and any(
        source.read(head, row).tobytes() != source.read(embedding, row).tobytes() for row in rows
    ):
        raise SpecJAXError(
            f"{source.tensors[head].where}: tensor {source.own_name(head)} differs from the embedding, "
            "but the configuration says tie_word_embeddings"
        )


def fused(
    source: TensorSource, cfg: LlamaConfig, dtype: str, shardings: Any = None
) -> Iterator[tuple[Path, Array]]:
    """Reads, casts and fuses one parameter after the other: `Opened.parameters`. Call `check`
    first."""

    def read(name, index):
        return cast(source.read(name, index), dtype, source.own_name(name))

    for parameter in parameters(cfg):
        yield (
            parameter.path,
            make_array(
                functools.partial(parameter.fuse, read),
                parameter.shape,
                shardings and leaf(shardings, parameter.path),
            ),
        )


def leaf(tree: Any, path: Path) -> Any:
    """What lies at `path` in a tree like that of the parameters."""
    return functools.reduce(operator.getitem, path, tree)


def make_array(
    read: Callable[[Index], np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding | None,
):
    """The array of which `read` gives slices: this process's shards, or numpy's and whole if there
    is no sharding."""
    if sharding is None:
        return read((slice(None),) * len(shape))
    # Devices that hold the same share one reading of it. Python 3.11 cannot hash slices.
    wanted = {
        str(index): index for index in sharding.addressable_devices_indices_map(shape).values()
    }
    slices = {key: read(index) for key, index in wanted.items()}
    return jax.make_array_from_callback(shape, sharding, lambda index: slices[str(index)])


def dtype_key(dtype) -> str:
    """Anything numpy or jax accepts as a dtype -> its key in DTYPES; raises SpecJAXError for
    others."""
    try:
        name = np.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise SpecJAXError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def cast(array: Array, dtype: str, name: str) -> Array:
    """`array` as DTYPES[dtype]; raises SpecJAXError where a finite value of tensor `name` becomes
    infinite."""
    if array.dtype == DTYPES[dtype]:
        return array
    if isinstance(array, jax.Array):
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}
        return make_array(
            lambda index: cast(np.asarray(shards[str(index)]), dtype, name),
            array.shape,
            array.sharding,
        )
    with np.errstate(over="ignore"):
        result = array.astype(DTYPES[dtype])
    # bfloat16 has the range of float32: only float16 can overflow in practice, and the check costs
    # a pass.
    if dtype == "float16" and not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise SpecJAXError(f"tensor {name} does not fit into float16: values above 65504")
    return result


def widest(dtypes) -> str:
    """The smallest key of DTYPES that holds every one of `dtypes` exactly."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else "float32"


def num_values(cfg: LlamaConfig) -> int:
    """How many numbers a model holds."""
    return sum(math.prod(parameter.shape) for parameter in parameters(cfg))
