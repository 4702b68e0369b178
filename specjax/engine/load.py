"""Loading, converting and exporting models: our Orbax folders, Hugging Face folders and GGUF files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import files, llama, parallel
from specjax.checkpoints_convert import gguf, hf, orbax, table
from specjax.config import LlamaConfig, Runtime
from specjax.devices import check_platform
from specjax.errors import SpecJAXError
from specjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in memory.

    Attributes:
      config: shape and constants.
      params: pytree of `jax.Array`s with the structure and shapes of
        `llama.abstract_params(config)`.
      tokenizer: None where the checkpoint has none; then only token ids go in and out.
      eos_ids: sorted ids that end a sequence; may be empty.
      path: where it was loaded from.
      mesh: the devices that the parameters are split over; None where they are whole, on one
        device.
    """

    config: LlamaConfig
    params: Any
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    path: str
    mesh: Mesh | None = None

    @property
    def dtype(self) -> np.dtype:
        """dtype of the parameters."""
        return llama.params_dtype(self.params)

    def runtime(self, page_size: int = 64, implementation: str | None = None) -> Runtime:
        """Returns how this model runs; see `config.Runtime`."""
        return Runtime(self.dtype, page_size, self.num_valid_tokens, implementation, self.mesh)

    @property
    def num_valid_tokens(self) -> int:
        """Ids at and above this number are padding of the embedding, which the model must never
        emit."""
        if self.tokenizer is None:
            return self.config.vocab_size
        return min(self.tokenizer.vocab_size, self.config.vocab_size)


def open_source(path: str | os.PathLike) -> table.Opened:
    """Checks a checkpoint of any format by its headers, without reading its data.

    EOS ids outside of the vocabulary are dropped: some configurations say -1 for "none".
    Raises SpecJAXError, naming the file or tensor at fault, for anything that cannot be used.
    """
    opened = _open(pathlib.Path(path))
    return opened._replace(
        eos_ids=tuple(id_ for id_ in opened.eos_ids if 0 <= id_ < opened.config.vocab_size)
    )


def _open(source: pathlib.Path) -> table.Opened:
    if source.is_file() and source.suffix == ".gguf":
        return gguf.open_file(source)
    if not source.exists():
        raise SpecJAXError(f"{source} does not exist")
    if not source.is_dir():
        raise SpecJAXError(f"{source} is neither a folder nor a .gguf file")
    files.refuse_incomplete(source)
    if not (source / "config.json").exists():
        raise SpecJAXError(
            f"{source}: no config.json: neither a SpecJAX checkpoint nor a Hugging Face folder"
        )
    reader = orbax if orbax.is_checkpoint(files.read_json(source / "config.json")) else hf
    return reader.open_folder(source)


def load(
    path: str | os.PathLike, *, dtype=None, mesh: Mesh | None = None, role: str = "target"
) -> Model:
    """Loads a checkpoint straight into its shards, one parameter or layer at a time.

    Every process reads what its own devices hold of each parameter, and waits for no other process.

    Args:
      path: a folder written by `convert`, or a Hugging Face Llama folder (config.json and
        safetensors).
      dtype: float32, float16 or bfloat16, to cast every parameter to. By default float32 on a CPU,
        whose bfloat16 matmul is slow, and the stored dtype elsewhere.
      mesh: from `parallel.make_mesh`; by default everything lies on the default device.
      role: what the model is on the mesh, "target" or "draft".

    Raises:
      SpecJAXError: naming the file, tensor or value at fault, before anything is allocated if
        headers tell; a model that cannot be split over so many devices. A .gguf file has to be
        converted first.
    """
    check_platform()
    if role not in parallel.RULES:
        raise SpecJAXError(f"role {role!r} does not exist; there are: {', '.join(parallel.RULES)}")
    if pathlib.Path(path).suffix == ".gguf" and pathlib.Path(path).is_file():
        raise SpecJAXError(
            f"{path} is a GGUF file; convert it first: specjax convert --source={path} --output=DIR"
        )
    opened = open_source(path)
    parallel.check_shardable(opened.config, parallel.degree(mesh, role), role)
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else opened.dtype
    dtype = table.dtype_key(dtype)
    params = llama.abstract_params(opened.config, table.DTYPES[dtype])
    here = jax.device_put(0).sharding  # the default device
    shardings = (
        jax.tree.map(lambda _: here, params)
        if mesh is None
        else parallel.shardings(params, mesh, role)
    )
    for (*parents, name), array in opened.parameters(dtype, shardings):
        branch = table.leaf(params, parents)
        assert (array.shape, array.dtype) == (branch[name].shape, branch[name].dtype), (
            parents,
            name,
            array.shape,
        )
        branch[name] = jax.block_until_ready(array)  # or more than this one would be in host memory
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(params))
    return Model(opened.config, params, opened.tokenizer, opened.eos_ids, str(path), mesh)


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    dtype=None,
    progress: Callable[[int, int], None] | None = None,
) -> table.Opened:
    """Writes any checkpoint as our Orbax folder; peak host memory is a layer or the embedding,
    whichever is larger.

    Args:
      source: a Hugging Face Llama folder, a .gguf file, or one of our folders (to change its
        dtype).
      output: a folder that does not exist yet. It appears, complete, as the last act.
      dtype: dtype of the result; by default the stored one (float32 for quantised GGUF).
      progress: called with (parameters written, parameters in all).

    Returns:
      What was read, with `dtype` the one written.

    Raises:
      SpecJAXError: for a source that cannot be used or an output that exists. Nothing is left
        behind.
    """
    return _write(orbax, source, output, dtype, progress)


def export(
    source: str | os.PathLike,
    output: str | os.PathLike,
    dtype=None,
    progress: Callable[[int, int], None] | None = None,
) -> table.Opened:
    """Writes any checkpoint as a Hugging Face folder (safetensors in shards of 5 GB); otherwise as
    `convert`.

    In the stored dtype, every tensor equals that of the converted source bit for bit.
    """
    return _write(hf, source, output, dtype, progress)


def save(output: str | os.PathLike, model: Model) -> None:
    """Writes a model in memory as our Orbax folder, in the dtype of its parameters; otherwise as
    `convert`."""
    dtype = table.dtype_key(model.dtype)

    def parameters(dtype, shardings=None):
        del shardings
        for parameter in table.parameters(model.config):
            array = parallel.get(table.leaf(model.params, parameter.path))
            yield parameter.path, table.cast(array, dtype, ".".join(map(str, parameter.path)))

    opened = table.Opened(model.config, dtype, parameters, model.tokenizer, model.eos_ids)
    with files.new_folder(output) as folder:
        orbax.write_folder(folder, opened, dtype)


def _write(writer, source, output, dtype, progress) -> table.Opened:
    files.refuse_existing(output)
    opened = open_source(source)
    dtype = opened.dtype if dtype is None else table.dtype_key(dtype)
    with files.new_folder(output) as folder:
        writer.write_folder(folder, opened, dtype, progress)
    return opened._replace(dtype=dtype)


def check_same_vocabulary(target: Model, draft: Model) -> None:
    """Raises SpecJAXError unless a token id means the same to both models.

    The sizes must agree, padding included, and where both have tokenizers every token must have the
    same id.
    """
    sizes = f"target {target.config.vocab_size}, draft {draft.config.vocab_size}"
    if target.config.vocab_size != draft.config.vocab_size:
        raise SpecJAXError(f"target and draft have different vocabularies: {sizes} tokens")
    if target.tokenizer is None or draft.tokenizer is None:
        return
    target_ids, draft_ids = target.tokenizer.token_ids, draft.tokenizer.token_ids
    differing = {token for token, _ in target_ids.items() ^ draft_ids.items()}
    if differing:
        token = min(
            differing,
            key=lambda token: min(ids[token] for ids in (target_ids, draft_ids) if token in ids),
        )
        raise SpecJAXError(
            f"target and draft have different vocabularies ({sizes} tokens; tokenizers {len(target_ids)} and "
            f"{len(draft_ids)}): {token!r} is {target_ids.get(token, 'absent')} in the target and "
            f"{draft_ids.get(token, 'absent')} in the draft"
        )
