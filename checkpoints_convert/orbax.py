"""Our own checkpoint folder: Orbax arrays, one item a layer, beside config.json and the tokenizer.

    config.json           format and version, the model, dtype, EOS ids, special tokens, size of
    every file in params/ tokenizer.json, chat_template.jinja   where the model has them
    params/embed_VD  params/layers/000 ...  params/final_norm_D  params/lm_head_VD

An item is what `orbax.checkpoint.PyTreeCheckpointer` saves and restores. There is one a layer, so
that neither writing nor reading holds more than a layer in host memory. Arrays are not compressed:
trained weights barely shrink. They are cut into small chunks, which are what TensorStore reads: a
device that needs a slice then reads little else.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.traverse_util
import numpy as np
import orbax.checkpoint

from specjax import tokenizer as tokenizer_lib
from specjax.checkpoints_convert import table
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.files import parsing, read_json, read_text, write_json, writing

FORMAT, VERSION = "specjax", 1
CHUNKS, CHUNK_BYTES = 64, 2**20  # not more of them, and none smaller


def is_checkpoint(fields: dict) -> bool:
    """Whether the fields of a config.json are those of our format."""
    return fields.get("format") == FORMAT


def _file_sizes(folder: pathlib.Path) -> dict[str, int]:
    files = [path for path in (folder / "params").rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}


def _split(path: table.Path) -> tuple[str, table.Path]:
    """Path of a parameter -> (folder of its item under params/, path inside the item)."""
    if path[0] == "layers":
        return f"layers/{path[1]:03d}", path[2:]
    return str(path[0]), path


def _save_args(path: table.Path, array: np.ndarray) -> orbax.checkpoint.SaveArgs:
    """How an array is cut: between kv heads, or across its longest axis, F or V, which Orbax
    divides first."""
    axes = str(path[-1]).rpartition("_")[2]
    if "K" in axes:
        return orbax.checkpoint.SaveArgs(shard_axes=(axes.index("K"),))
    # Of a vocabulary that has no other divisors Orbax would make a chunk of each row.
    chunks = max(n for n in range(1, CHUNKS + 1) if max(array.shape) % n == 0)
    return orbax.checkpoint.SaveArgs(chunk_byte_size=max(CHUNK_BYTES, array.nbytes // chunks))


def write_folder(
    folder: pathlib.Path, opened: table.Opened, dtype: str, progress: Callable | None = None
) -> None:
    """Writes a checkpoint into the empty `folder`; `progress(done, total)` is called after every
    layer."""
    total, done = len(table.parameters(opened.config)), 0
    (folder / "params" / "layers").mkdir(parents=True)
    with orbax.checkpoint.PyTreeCheckpointer(use_compression=False) as checkpointer:
        for item, group in itertools.groupby(
            opened.parameters(dtype), lambda entry: _split(entry[0])[0]
        ):
            arrays = {_split(path)[1]: array for path, array in group}
            done += len(arrays)
            save_args = flax.traverse_util.unflatten_dict(
                {path: _save_args(path, arrays[path]) for path in arrays}
            )
            with writing():
                checkpointer.save(
                    (folder / "params" / item).absolute(),
                    flax.traverse_util.unflatten_dict(arrays),
                    save_args=save_args,
                )
            del arrays  # or this layer stays while the next one is read
            if progress:
                progress(done, total)
    tokenizer = opened.tokenizer
    if tokenizer is not None:
        tokenizer.save(folder)
    write_json(
        folder / "config.json",
        {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype,
            "eos_ids": list(opened.eos_ids),
            "special_tokens": {} if tokenizer is None else tokenizer.special_tokens,
            "model": opened.config.to_dict(),
            "files": _file_sizes(folder),
        },
    )


def open_folder(folder: pathlib.Path) -> table.Opened:
    """Reverses `write_folder`.

    Raises SpecJAXError for another version, for missing, surplus or truncated files, and for arrays
    whose headers are not what the configuration says.
    """
    fields = read_json(folder / "config.json")
    with parsing(folder / "config.json"):
        if fields.get("version") != VERSION:
            raise SpecJAXError(
                f"checkpoint version {fields.get('version')!r} is not supported; supported: {VERSION}"
            )
        cfg = LlamaConfig.from_dict(fields["model"])
        dtype, eos_ids = table.dtype_key(fields["dtype"]), tuple(map(int, fields["eos_ids"]))
        expected_sizes, special_tokens = dict(fields["files"]), dict(fields["special_tokens"])
    # Asked here, where the answer is cheap and clear: an array that is cut short fails deep inside
    # of TensorStore.
    sizes = _file_sizes(folder)
    for name in sorted(sizes.keys() | expected_sizes.keys()):
        if sizes.get(name) != expected_sizes.get(name):
            fault = f"{sizes.get(name)} bytes long instead of {expected_sizes.get(name)}"
            if name not in sizes or name not in expected_sizes:
                fault = (
                    "missing" if name in expected_sizes else "not part of this checkpoint (surplus)"
                )
            raise SpecJAXError(f"{folder / name} is {fault}")
    params = folder / "params"
    expected = {_split(parameter.path)[0] for parameter in table.parameters(cfg)}
    items = [*params.glob("*"), *params.glob("layers/*")]
    present = {path.relative_to(params).as_posix() for path in items} - {"layers"}
    for item in sorted(expected ^ present):
        fault = "missing" if item in expected else "not part of this model (surplus)"
        raise SpecJAXError(f"{params / item} is {fault}")
    _check_headers(params, cfg, dtype)
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        template, backend = (
            folder / "chat_template.jinja",
            tokenizer_lib.load_backend(folder / "tokenizer.json"),
        )
        chat_template = read_text(template) if template.exists() else None
        with parsing(folder / "config.json"):
            tokenizer = tokenizer_lib.Tokenizer(backend, special_tokens, chat_template)
    return table.Opened(cfg, dtype, functools.partial(_read, params, cfg), tokenizer, eos_ids)


def _items(cfg: LlamaConfig) -> Iterator[tuple[str, dict[table.Path, table.Parameter]]]:
    """Folder of every item, and its parameters by their path inside it."""
    for item, group in itertools.groupby(
        table.parameters(cfg), lambda parameter: _split(parameter.path)[0]
    ):
        yield item, {_split(parameter.path)[1]: parameter for parameter in group}


def _ask(function: Callable, item: pathlib.Path, **options) -> dict[table.Path, Any]:
    """What a method of Orbax's handler, which waits for no other process as its checkpointer does,
    says of an item."""
    try:
        return flax.traverse_util.flatten_dict(function(item.absolute(), **options))
    except Exception as error:  # Orbax and TensorStore have no common one
        raise SpecJAXError(f"cannot read {item}: {str(error).splitlines()[0]}") from error


def _check_headers(params: pathlib.Path, cfg: LlamaConfig, dtype: str) -> None:
    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    for item, expected in _items(cfg):
        found = _ask(lambda path: handler.metadata(path).tree, params / item)
        for path in expected | found:
            name = f"{params / item}: parameter {'.'.join(path)}"
            if path not in found:
                raise SpecJAXError(f"{name} is missing")
            if path not in expected:
                raise SpecJAXError(f"{name} is not part of this model (surplus)")
            for what, theirs, ours in (
                ("shape", list(found[path].shape), list(expected[path].shape)),
                ("dtype", str(found[path].dtype), dtype),
            ):
                if theirs != ours:
                    raise SpecJAXError(
                        f"{name} has {what} {theirs}, the configuration requires {ours}"
                    )


def _read(
    params: pathlib.Path, cfg: LlamaConfig, dtype: str, shardings: Any = None
) -> Iterator[tuple[table.Path, table.Array]]:
    handler, args = orbax.checkpoint.PyTreeCheckpointHandler(), None
    for item, parameters in _items(cfg):
        if shardings is not None:
            args = flax.traverse_util.unflatten_dict(
                {
                    path: orbax.checkpoint.ArrayRestoreArgs(
                        sharding=table.leaf(shardings, parameter.path)
                    )
                    for path, parameter in parameters.items()
                }
            )
        arrays = _ask(handler.restore, params / item, restore_args=args)
        for path, parameter in parameters.items():
            yield (
                parameter.path,
                table.cast(arrays.pop(path), dtype, f"{params / item}: parameter {'.'.join(path)}"),
            )
