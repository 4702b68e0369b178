"""Our own checkpoint folder: Orbax arrays, one item per layer, config.json and the tokenizer.

    config.json                 format and version, the model, dtype, EOS ids, special tokens, and
                                the size of every file in params/
    tokenizer.json, chat_template.jinja, generation_config.json   if the model has them
    params/embed_VD  params/layers/000 ...  params/final_norm_D  params/lm_head_VD

An item is what `orbax.checkpoint.PyTreeCheckpointer` saves and restores. There is one per layer, so
that reading and writing hold at most a layer in host memory. Arrays are not compressed: trained
weights barely shrink. They are divided into small chunks, the unit that TensorStore reads, so that
a device that needs a slice reads little else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.traverse_util
import numpy as np
import orbax.checkpoint

from specjax import tokenizer as tokenizer_lib
from specjax.checkpoints_convert import table
from specjax.config import LlamaConfig
from specjax.dtypes import DTYPES, dtype_name
from specjax.errors import SpecJAXError
from specjax.files import exists, one_line, parsing, read_json, read_text, write_json, writing

FORMAT, VERSION = "specjax", 1
GENERATION = "generation_config.json"
MAX_CHUNKS, CHUNK_BYTES = 64, 2**20  # most chunks of an array, and the least size of one


def is_checkpoint(fields: dict) -> bool:
    """Whether the fields of a config.json are those of our format."""
    return fields.get("format") == FORMAT


def _file_sizes(folder: pathlib.Path) -> dict[str, int]:
    """The size of every file in params/, by its path in the folder."""
    sizes = {}
    for path in sorted((folder / "params").rglob("*")):
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes


def _item_of(path: table.Path) -> tuple[str, table.Path]:
    """The folder in params/ of a parameter's item, and the parameter's path inside the item."""
    if path[0] == "layers":
        return f"layers/{path[1]:03d}", path[2:]
    return str(path[0]), path


def _items(config: LlamaConfig) -> Iterator[tuple[str, dict[table.Path, table.Parameter]]]:
    """Yields the folder of every item, and its parameters by their paths inside it."""
    by_item = itertools.groupby(
        table.parameters(config), lambda parameter: _item_of(parameter.path)[0]
    )
    for item, group in by_item:
        yield item, {_item_of(parameter.path)[1]: parameter for parameter in group}


def _save_args(path: table.Path, array: np.ndarray) -> orbax.checkpoint.SaveArgs:
    """How an array is divided: between kv heads, or along its longest axis, F or V.

    Orbax divides the longest axis first.
    """
    axes = str(path[-1]).rpartition("_")[2]
    if "K" in axes:
        return orbax.checkpoint.SaveArgs(shard_axes=(axes.index("K"),))
    # Orbax would make a chunk of every row of a vocabulary with no other divisors.
    length = max(array.shape)
    num_chunks = max(n for n in range(1, MAX_CHUNKS + 1) if length % n == 0)
    chunk_bytes = max(CHUNK_BYTES, array.nbytes // num_chunks)
    return orbax.checkpoint.SaveArgs(chunk_byte_size=chunk_bytes)


class _IgnoreClosedLoop:
    """A `sys.unraisablehook` without the tracebacks of reads and writes that Orbax abandons."""

    def __init__(self, previous: Callable):
        self.previous = previous

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.previous(unraisable)


@contextlib.contextmanager
def _quiet_when_abandoned() -> Iterator[None]:
    """Keeps Orbax from printing tracebacks beside the exception that it raises.

    When one read or write fails, Orbax closes its event loop, and TensorStore prints a traceback
    for every other one that ends later. After a failure, the hook that drops these therefore stays.
    """
    previous = sys.unraisablehook
    if not isinstance(previous, _IgnoreClosedLoop):
        sys.unraisablehook = _IgnoreClosedLoop(previous)
    yield
    sys.unraisablehook = previous


def write_folder(
    folder: pathlib.Path,
    reader: table.CheckpointReader,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a checkpoint.

    Args:
      folder: an empty folder.
      reader: the checkpoint to write.
      dtype: key of DTYPES.
      progress: called with (parameters written, parameters in all) after every item.
    """
    total = len(table.parameters(reader.config))
    done = 0
    (folder / "params" / "layers").mkdir(parents=True)
    by_item = itertools.groupby(reader.parameters(dtype), lambda entry: _item_of(entry[0])[0])
    with orbax.checkpoint.PyTreeCheckpointer(use_compression=False) as checkpointer:
        for item, group in by_item:
            arrays = {_item_of(path)[1]: array for path, array in group}
            done += len(arrays)
            save_args = {path: _save_args(path, array) for path, array in arrays.items()}
            with writing(), _quiet_when_abandoned():
                checkpointer.save(
                    (folder / "params" / item).absolute(),
                    flax.traverse_util.unflatten_dict(arrays),
                    save_args=flax.traverse_util.unflatten_dict(save_args),
                )
            del arrays  # or this layer would stay while the next one is read
            if progress:
                progress(done, total)
    tokenizer = reader.tokenizer
    if tokenizer is not None:
        tokenizer.save(folder)
    if reader.generation:
        write_json(folder / GENERATION, reader.generation)
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "eos_ids": list(reader.eos_ids),
        "special_tokens": {} if tokenizer is None else tokenizer.special_tokens,
        "model": reader.config.to_dict(),
        "files": _file_sizes(folder),
    }
    write_json(folder / "config.json", fields)


def open_folder(folder: pathlib.Path) -> table.CheckpointReader:
    """Opens a folder that `write_folder` wrote, and checks its files and headers.

    Raises:
      SpecJAXError: for another version, for missing, surplus or truncated files, and for arrays
        that do not match the configuration.
    """
    path = folder / "config.json"
    fields = read_json(path)
    with parsing(path):
        version = fields.get("version")
        if version != VERSION:
            raise SpecJAXError(
                f"checkpoint version {version!r} is not supported; supported: {VERSION}"
            )
        config = LlamaConfig.from_dict(fields["model"])
        dtype = dtype_name(fields["dtype"])
        eos_ids = {int(id_) for id_ in fields["eos_ids"]}
        expected_sizes = dict(fields["files"])
        special_tokens = dict(fields["special_tokens"])
    _check_files(folder, config, expected_sizes)
    _check_headers(folder / "params", config, dtype)
    # Arrays are not compressed.
    num_bytes = table.num_parameters(config) * DTYPES[dtype].itemsize
    file_bytes = sum(expected_sizes.values())
    if num_bytes > file_bytes:
        raise SpecJAXError(
            f"{folder}: the parameters have {num_bytes} bytes, but the files only {file_bytes}"
        )
    tokenizer = None
    if exists(folder / "tokenizer.json"):
        tokenizer = _read_tokenizer(folder, special_tokens)
    eos_ids = table.reachable_eos_ids(eos_ids, config, tokenizer, path)
    read_parameters = functools.partial(_read_parameters, folder / "params", config)
    path = folder / GENERATION
    generation = read_json(path) if exists(path) else {}
    return table.CheckpointReader(config, dtype, read_parameters, tokenizer, eos_ids, generation)


def _check_files(folder: pathlib.Path, config: LlamaConfig, expected_sizes: dict[str, int]) -> None:
    """Compares the files in params/ with their recorded sizes and with the items of the model.

    An array that is cut short would otherwise fail late, deep inside of TensorStore.
    """
    sizes = _file_sizes(folder)
    for name in sorted(sizes.keys() | expected_sizes.keys()):
        size, expected_size = sizes.get(name), expected_sizes.get(name)
        if size is None:
            raise SpecJAXError(f"{folder / name} is missing")
        if expected_size is None:
            raise SpecJAXError(f"{folder / name} is not part of this checkpoint (surplus)")
        if size != expected_size:
            raise SpecJAXError(f"{folder / name} is {size} bytes long instead of {expected_size}")
    table.check_num_layers(config, len(sizes), "files", folder)
    params = folder / "params"
    expected = {_item_of(parameter.path)[0] for parameter in table.parameters(config)}
    paths = [*params.glob("*"), *params.glob("layers/*")]
    present = {path.relative_to(params).as_posix() for path in paths} - {"layers"}
    for item in sorted(expected ^ present):
        fault = "missing" if item in expected else "not part of this model (surplus)"
        raise SpecJAXError(f"{params / item} is {fault}")


def _read_tokenizer(
    folder: pathlib.Path, special_tokens: dict[str, str]
) -> tokenizer_lib.Tokenizer:
    backend = tokenizer_lib.load_backend(folder / "tokenizer.json")
    template_path = folder / "chat_template.jinja"
    template = read_text(template_path) if exists(template_path) else None
    with parsing(folder / "config.json"):
        return tokenizer_lib.Tokenizer(backend, special_tokens, template, str(template_path))


def _call(method: Callable, item: pathlib.Path, **options) -> Any:
    """Calls a method of Orbax's handler, which unlike its checkpointer waits for no other process.

    Raises:
      SpecJAXError: in place of any exception.
    """
    try:
        with _quiet_when_abandoned():
            return method(item.absolute(), **options)
    except Exception as error:  # Orbax and TensorStore share no base class
        raise SpecJAXError(f"cannot read {item}: {one_line(error)}") from error


def _check_headers(params: pathlib.Path, config: LlamaConfig, dtype: str) -> None:
    """Compares the shape and dtype of every array with the model's."""
    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    for item, expected in _items(config):
        tree = _call(lambda path: handler.metadata(path).tree, params / item)
        found = flax.traverse_util.flatten_dict(tree)
        for path in expected | found:
            name = f"{params / item}: parameter {'.'.join(path)}"
            if path not in found:
                raise SpecJAXError(f"{name} is missing")
            if path not in expected:
                raise SpecJAXError(f"{name} is not part of this model (surplus)")
            shape, required = list(found[path].shape), list(expected[path].shape)
            if shape != required:
                raise SpecJAXError(
                    f"{name} has shape {shape}, the configuration requires {required}"
                )
            stored = str(found[path].dtype)
            if stored != dtype:
                raise SpecJAXError(f"{name} has dtype {stored}, the configuration requires {dtype}")


def _read_parameters(
    params: pathlib.Path, config: LlamaConfig, dtype: str, shardings: Any = None
) -> Iterator[tuple[table.Path, table.Array]]:
    """Reads one item after the other; see `CheckpointReader.parameters`."""
    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    restore_args = None
    for item, parameters in _items(config):
        if shardings is not None:
            restore_args = _restore_args(parameters, shardings)
        tree = _call(handler.restore, params / item, restore_args=restore_args)
        arrays = flax.traverse_util.flatten_dict(tree)
        del tree  # or the arrays of this item would stay until the last of them is cast
        for path, parameter in parameters.items():
            name = f"{params / item}: parameter {'.'.join(path)}"
            yield parameter.path, table.cast(arrays.pop(path), dtype, name)


def _restore_args(parameters: dict[table.Path, table.Parameter], shardings: Any) -> Any:
    """The tree of shardings of an item's arrays."""
    args = {}
    for path, parameter in parameters.items():
        sharding = table.leaf(shardings, parameter.path)
        args[path] = orbax.checkpoint.ArrayRestoreArgs(sharding=sharding)
    return flax.traverse_util.unflatten_dict(args)
