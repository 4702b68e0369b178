"""Our own checkpoint folder: Orbax arrays, one item a layer, beside config.json and the tokenizer.

    config.json           format and version, the model, dtype, EOS ids, special tokens, size of every file in params/
    tokenizer.json, chat_template.jinja   where the model has them
    params/embed_VD  params/layers/000 ...  params/final_norm_D  params/lm_head_VD

An item is what `orbax.checkpoint.PyTreeCheckpointer` saves and restores. There is one a layer, so that neither writing
nor reading holds more than a layer in host memory. Arrays are not compressed: trained weights barely shrink.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator

import flax.traverse_util
import numpy as np
import orbax.checkpoint

from specjax import tokenizer as tokenizer_lib
from specjax.checkpoints_convert import table
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.files import parsing, read_json, read_text, write_json, writing

FORMAT, VERSION = "specjax", 1


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


def write_folder(folder: pathlib.Path, opened: table.Opened, dtype: str, progress: Callable | None = None) -> None:
    """Writes a checkpoint into the empty `folder`; `progress(done, total)` is called after every layer."""
    total, done = len(table.parameters(opened.config)), 0
    (folder / "params" / "layers").mkdir(parents=True)
    with orbax.checkpoint.PyTreeCheckpointer(use_compression=False) as checkpointer:
        for item, group in itertools.groupby(opened.parameters(dtype), lambda entry: _split(entry[0])[0]):
            arrays = {_split(path)[1]: array for path, array in group}
            done += len(arrays)
            with writing():
                checkpointer.save((folder / "params" / item).absolute(), flax.traverse_util.unflatten_dict(arrays))
            del arrays  # or this layer stays while the next one is read
            if progress:
                progress(done, total)
    tokenizer = opened.tokenizer
    if tokenizer is not None:
        tokenizer.save(folder)
    write_json(folder / "config.json", {
        "format": FORMAT, "version": VERSION, "dtype": dtype, "eos_ids": list(opened.eos_ids),
        "special_tokens": {} if tokenizer is None else tokenizer.special_tokens, "model": opened.config.to_dict(),
        "files": _file_sizes(folder)})


def open_folder(folder: pathlib.Path) -> table.Opened:
    """Reverses `write_folder`. Raises SpecJAXError for another version and for missing, surplus or truncated files."""
    fields = read_json(folder / "config.json")
    with parsing(folder / "config.json"):
        if fields.get("version") != VERSION:
            raise SpecJAXError(f"checkpoint version {fields.get('version')!r} is not supported; supported: {VERSION}")
        cfg = LlamaConfig.from_dict(fields["model"])
        dtype, eos_ids = table.dtype_key(fields["dtype"]), tuple(map(int, fields["eos_ids"]))
        expected_sizes, special_tokens = dict(fields["files"]), dict(fields["special_tokens"])
    # Asked here, where the answer is cheap and clear: an array that is cut short fails deep inside of TensorStore.
    sizes = _file_sizes(folder)
    for name in sorted(sizes.keys() | expected_sizes.keys()):
        if sizes.get(name) != expected_sizes.get(name):
            fault = f"{sizes.get(name)} bytes long instead of {expected_sizes.get(name)}"
            if name not in sizes or name not in expected_sizes:
                fault = "missing" if name in expected_sizes else "not part of this checkpoint (surplus)"
            raise SpecJAXError(f"{folder / name} is {fault}")
    params = folder / "params"
    expected = {_split(parameter.path)[0] for parameter in table.parameters(cfg)}
    items = [*params.glob("*"), *params.glob("layers/*")]
    present = {path.relative_to(params).as_posix() for path in items} - {"layers"}
    for item in sorted(expected ^ present):
        fault = "missing" if item in expected else "not part of this model (surplus)"
        raise SpecJAXError(f"{params / item} is {fault}")
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        template, backend = folder / "chat_template.jinja", tokenizer_lib.load_backend(folder / "tokenizer.json")
        chat_template = read_text(template) if template.exists() else None
        with parsing(folder / "config.json"):
            tokenizer = tokenizer_lib.Tokenizer(backend, special_tokens, chat_template)
    return table.Opened(cfg, dtype, functools.partial(_read, params, cfg), tokenizer, eos_ids)


def _read(params: pathlib.Path, cfg: LlamaConfig, dtype: str) -> Iterator[tuple[table.Path, np.ndarray]]:
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        for item, group in itertools.groupby(table.parameters(cfg), lambda parameter: _split(parameter.path)[0]):
            try:
                arrays = flax.traverse_util.flatten_dict(checkpointer.restore((params / item).absolute()))
            except Exception as error:  # Orbax and TensorStore have no common one
                raise SpecJAXError(f"cannot read {params / item}: {str(error).splitlines()[0]}") from error
            for parameter in group:
                name = f"{params / item}: parameter {'.'.join(_split(parameter.path)[1])}"
                array = arrays.pop(_split(parameter.path)[1], None)
                if array is None:
                    raise SpecJAXError(f"{name} is missing")
                if array.shape != parameter.shape:
                    raise SpecJAXError(f"{name} has shape {list(array.shape)}, the configuration requires "
                                       f"{list(parameter.shape)}")
                yield parameter.path, table.cast(array, dtype, name)
            for path in arrays:
                raise SpecJAXError(f"{params / item}: parameter {'.'.join(path)} is not part of this model (surplus)")
