"""Loading, converting and exporting models and their drafts.

Formats of models: our Orbax folders, Hugging Face folders, GGUF files. The format of a draft that
is no Llama model belongs to its drafter, whose module names it (`FORMAT`, see
`specjax.drafters.registry`). Such a format module has

    is_checkpoint(path) -> bool        whether a folder is of this format
    check(path, target_config, mesh)   raises SpecJAXError unless the headers fit such a target
    load(path, target_config, target_params, *, dtype, mesh) -> LoadedDraft

where path None stands for the bundled draft.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import dtypes, files, llama, parallel
from specjax.checkpoints_convert import gguf, hf, orbax, table
from specjax.config import LlamaConfig, Runtime
from specjax.devices import check_platform
from specjax.drafters import registry
from specjax.engine import hub
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in memory.

    Attributes:
      config: shape and constants.
      params: pytree of `jax.Array`s with the structure and shapes of
        `llama.abstract_params(config)`.
      tokenizer: None if the checkpoint has none; then prompts and completions are token ids only.
      eos_ids: sorted ids that end a sequence; may be empty.
      path: where it was loaded from.
      mesh: devices that the parameters are split over; None for one device.
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

    @property
    def num_valid_tokens(self) -> int:
        """Number of ids that the model may emit; ids from there on pad the embedding."""
        if self.tokenizer is None:
            return self.config.vocab_size
        return min(self.tokenizer.vocab_size, self.config.vocab_size)

    def runtime(self, page_size: int = 64, implementation: str | None = None) -> Runtime:
        """Returns how this model runs; see `config.Runtime`."""
        return Runtime(self.dtype, page_size, self.num_valid_tokens, implementation, self.mesh)

    def is_placed(self, role: str) -> bool:
        """Returns whether the parameters are split over the mesh as those of a "target" or "draft"
        are."""
        return parallel.is_placed(self.params["embed_VD"], self.mesh, role)


@runtime_checkable
class LoadedDraft(Protocol):
    """The result of `load_drafter`: a `Model`, or the result of a drafter's own format.

    Attributes:
      config: of the type that the drafter requires.
      params: parameters for the drafter.
      path: where it was loaded from.
      mesh: devices of its target.
    """

    config: Any
    params: Any
    path: str
    mesh: Mesh | None


# --- Models ---------------------------------------------------------------------------------------


def open_source(path: str | os.PathLike) -> table.CheckpointReader:
    """Checks a checkpoint of any format by its headers, without reading its data.

    Args:
      path: a folder or file, or the name of a Hugging Face repository, see `hub.resolve`.

    Raises:
      SpecJAXError: for a checkpoint that cannot be used, naming the file or tensor at fault.
    """
    source = hub.resolve(path)
    if source.is_file() and source.suffix == ".gguf":
        return gguf.open_file(source)
    if not source.is_dir():
        raise SpecJAXError(f"{source} is neither a folder nor a .gguf file")
    files.check_complete(source)
    config_path = source / "config.json"
    if not files.exists(config_path):
        raise SpecJAXError(
            f"{source}: no config.json; neither a SpecJAX checkpoint nor a Hugging Face folder"
        )
    if orbax.is_checkpoint(files.read_json(config_path)):
        return orbax.open_folder(source)
    return hf.open_folder(source)


def read_model_config(path: str | os.PathLike) -> LlamaConfig:
    """Returns the configuration of a checkpoint or Hugging Face folder; weights are not needed.

    Args:
      path: a folder, or the name of a Hugging Face repository, of which only this is downloaded.

    Raises:
      SpecJAXError: for a folder without a configuration that can be used.
    """
    folder = hub.resolve(path, has_weights=False)
    fields = files.read_json(folder / "config.json")
    if not orbax.is_checkpoint(fields):
        return hf.read_config(folder)
    with files.parsing(folder / "config.json"):
        return LlamaConfig.from_dict(fields["model"])


def load(
    path: str | os.PathLike, *, dtype=None, mesh: Mesh | None = None, role: str = "target"
) -> Model:
    """Loads a checkpoint straight into its shards, one parameter or layer at a time.

    Every process reads what its own devices hold of each parameter, and does not wait for others.

    Args:
      path: a folder written by `convert`, or a Hugging Face Llama folder (config.json and
        safetensors); or the name of a Hugging Face repository, see `hub.resolve`.
      dtype: float32, float16 or bfloat16, to cast every parameter to. By default float32 on a CPU,
        whose bfloat16 matmul is slow, and the stored dtype elsewhere.
      mesh: from `parallel.make_mesh`; by default everything is on the default device.
      role: the model's role on the mesh, "target" or "draft".

    Raises:
      SpecJAXError: for a checkpoint that cannot be used, naming the file, tensor or value at fault,
        before anything is allocated if headers show it; for a model that cannot be split over so
        many devices; or if JAX finds no device. A .gguf file must be converted first.
    """
    check_platform()
    if role not in parallel.RULES:
        raise SpecJAXError(f"unknown role {role!r}; choose from {', '.join(parallel.RULES)}")
    source = hub.resolve(path)
    if source.suffix == ".gguf" and source.is_file():
        raise SpecJAXError(
            f"{path} is a GGUF file; convert it first: specjax convert --source={path} --output=DIR"
        )
    reader = open_source(source)
    parallel.check_shardable(reader.config, parallel.degree(mesh, role), role)
    return _read(reader, source, dtype, mesh, role)


def _read(
    reader: table.CheckpointReader, source: pathlib.Path, dtype, mesh: Mesh | None, role: str
) -> Model:
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else reader.dtype
    name = dtypes.dtype_name(dtype)
    params = llama.abstract_params(reader.config, dtypes.DTYPES[name])
    if mesh is None:
        default_device = jax.device_put(0).sharding
        shardings = jax.tree.map(lambda _: default_device, params)
    else:
        shardings = parallel.shardings(params, mesh, role)
    for path, array in reader.parameters(name, shardings):
        *parents, leaf = path
        branch = table.leaf(params, parents)
        expected = branch[leaf]
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype), (path, array.shape)
        # Waits, so that not more than one parameter is in host memory.
        branch[leaf] = jax.block_until_ready(array)
    assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(params))
    return Model(reader.config, params, reader.tokenizer, reader.eos_ids, str(source), mesh)


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    dtype=None,
    progress: Callable[[int, int], None] | None = None,
) -> table.CheckpointReader:
    """Writes any checkpoint as our Orbax folder.

    Peak host memory is a layer or the embedding, whichever is larger.

    Args:
      source: a Hugging Face Llama folder, a .gguf file, or one of our folders (to change its
        dtype).
      output: a folder that does not exist yet. It appears, complete, at the very end.
      dtype: dtype of the result; by default the stored one (float32 for quantised GGUF).
      progress: called with (parameters written, number of parameters).

    Returns:
      The checkpoint that was read, with `dtype` set to the one written.

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
) -> table.CheckpointReader:
    """Writes any checkpoint as a Hugging Face folder, with safetensors in shards of 5 GB.

    In the stored dtype, every tensor equals that of the converted source bit for bit. Arguments and
    errors as for `convert`.
    """
    return _write(hf, source, output, dtype, progress)


def save(output: str | os.PathLike, model: Model) -> None:
    """Writes a model in memory as our Orbax folder, in the dtype of its parameters.

    Raises:
      SpecJAXError: the output exists or cannot be written. Nothing is left behind.
    """

    def parameters(dtype, shardings=None):
        del shardings
        for parameter in table.parameters(model.config):
            array = parallel.get(table.leaf(model.params, parameter.path))
            name = ".".join(map(str, parameter.path))
            yield parameter.path, table.cast(array, dtype, name)

    dtype = dtypes.dtype_name(model.dtype)
    reader = table.CheckpointReader(
        model.config, dtype, parameters, model.tokenizer, model.eos_ids, generation={}
    )
    with files.new_folder(output) as folder:
        orbax.write_folder(folder, reader, dtype)


def _write(writer: ModuleType, source, output, dtype, progress) -> table.CheckpointReader:
    files.check_not_exists(output)
    reader = open_source(source)
    name = reader.dtype if dtype is None else dtypes.dtype_name(dtype)
    with files.new_folder(output) as folder:
        writer.write_folder(folder, reader, name, progress)
    return reader._replace(dtype=name)


# --- Drafts ---------------------------------------------------------------------------------------


def load_with_drafter(
    path: str | os.PathLike,
    drafter: str,
    draft_path: str | os.PathLike | None = None,
    *,
    dtype=None,
    mesh: Mesh | None = None,
) -> tuple[Model, LoadedDraft | None]:
    """Loads a target and what its drafter needs, and checks both by headers before reading either.

    Args:
      path: checkpoint of the target.
      drafter, draft_path: see `load_drafter`; the drafter may be "none".
      dtype, mesh: see `load`.

    Raises:
      SpecJAXError: see `load` and `load_drafter`.
    """
    check_drafter(drafter, draft_path, open_source(path), mesh)
    target = load(path, dtype=dtype, mesh=mesh)
    return target, load_drafter(drafter, draft_path, target)


def find_drafter(path: str | os.PathLike) -> str:
    """Returns the name of the drafter that a checkpoint is for.

    A checkpoint of no drafter's own format is that of a model.
    """
    for_models = None
    for name in registry.names():
        (module,) = registry.modules(name)
        if module.FORMAT is not None:
            if importlib.import_module(module.FORMAT).is_checkpoint(path):
                return name
        elif module.DRAFT_CONFIG is LlamaConfig:
            for_models = name
    assert for_models is not None
    return for_models


def load_drafter(name: str, path: str | os.PathLike | None, target: Model) -> LoadedDraft | None:
    """Loads the draft model or head of a drafter, in the dtype and on the mesh of its target.

    Args:
      name: name of the drafter, or several separated by commas, see `specjax.generate`.
      path: checkpoint of the draft, see `load`; None for the one bundled for this target, if there
        is one.
      target: the model that it drafts for.

    Returns:
      The `draft` of `specjax.generate`; None if the drafter needs none.

    Raises:
      SpecJAXError: for a checkpoint that cannot be read, or a draft for another target, naming what
        differs.
    """
    check_drafter(name, path, target, target.mesh)
    module = _draft_module(name)
    if module is None:
        return None
    if module.FORMAT is None:
        return load(path, dtype=target.dtype, mesh=target.mesh, role="draft")
    draft_format = importlib.import_module(module.FORMAT)
    return draft_format.load(
        resolve_draft(path), target.config, target.params, dtype=target.dtype, mesh=target.mesh
    )


def check_drafter(
    name: str,
    path: str | os.PathLike | None,
    target: Model | table.CheckpointReader,
    mesh: Mesh | None = None,
) -> None:
    """Checks by headers alone that `load_drafter` can load a draft.

    Args:
      name, path: see `load_drafter`.
      target: the model that it drafts for, or its checkpoint from `open_source`.
      mesh: devices of both models.

    Raises:
      SpecJAXError: see `load_drafter`.
    """
    module = _draft_module(name)
    if module is None:
        if path is not None:
            raise SpecJAXError(f"the drafter {name!r} uses no draft, got {path}")
        return
    if module.FORMAT is not None:
        importlib.import_module(module.FORMAT).check(resolve_draft(path), target.config, mesh)
        return
    if path is None:
        raise SpecJAXError(f"the drafter {name!r} requires the path of a draft model, got None")
    draft = open_source(path)
    parallel.check_shardable(draft.config, parallel.degree(mesh, "draft"), "draft")
    check_same_vocabulary(target, draft)


def resolve_draft(path: str | os.PathLike | None) -> pathlib.Path | None:
    """Returns the local folder of a draft, see `hub.resolve`; None for the bundled one."""
    return None if path is None else hub.resolve(path)


def _draft_module(name: str) -> ModuleType | None:
    """Returns the module of the drafter that needs a draft, among those in `name`."""
    if name == "none":
        return None
    found = {module.DRAFT_CONFIG: module for module in registry.modules(name)}
    found.pop(None, None)
    if len(found) > 1:
        raise SpecJAXError(f"the drafters {name!r} need different drafts; only one can be given")
    return next(iter(found.values()), None)


# --- Compatibility of target and draft ------------------------------------------------------------


def check_same_vocabulary(
    target: Model | table.CheckpointReader, draft: Model | table.CheckpointReader
) -> None:
    """Checks that both models have the same token for each id.

    The sizes must agree, padding included. If both have tokenizers, every token must have the same
    id in both, except special tokens that only one of them has: no text contains those. Issues a
    `SpecJAXWarning` that lists such tokens and other differences that lower acceptance: the chat
    template, BOS and EOS.

    Raises:
      SpecJAXError: an id stands for different tokens.
    """
    sizes = f"target {target.config.vocab_size}, draft {draft.config.vocab_size}"
    if target.config.vocab_size != draft.config.vocab_size:
        raise SpecJAXError(f"target and draft have different vocabularies: {sizes} tokens")
    if target.tokenizer is None or draft.tokenizer is None:
        return
    target_ids, draft_ids = target.tokenizer.token_ids, draft.tokenizer.token_ids
    special_of_one = _special_tokens(target.tokenizer) - draft_ids.keys()
    special_of_one |= _special_tokens(draft.tokenizer) - target_ids.keys()
    differing = {token for token, _ in target_ids.items() ^ draft_ids.items()} - special_of_one
    if differing:
        token = min(differing, key=lambda token: (target_ids | draft_ids)[token])
        raise SpecJAXError(
            f"target and draft have different vocabularies ({sizes} tokens; tokenizers "
            f"{len(target_ids)} and {len(draft_ids)}): {token!r} is "
            f"{target_ids.get(token, 'absent')} in the target and "
            f"{draft_ids.get(token, 'absent')} in the draft"
        )
    differences = _other_differences(target, draft)
    if special_of_one:
        differences.append(f"special tokens ({_listed(special_of_one)})")
    if differences:
        warnings.warn(
            "target and draft differ, so that fewer drafts may be accepted: "
            f"{'; '.join(differences)}",
            SpecJAXWarning,
            stacklevel=2,
        )


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    added = tokenizer.backend.get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


def _other_differences(
    target: Model | table.CheckpointReader, draft: Model | table.CheckpointReader
) -> list[str]:
    """Lists differences in the chat template and in the BOS and EOS tokens."""
    found = []
    target_template, draft_template = (model.tokenizer.chat_template for model in (target, draft))
    if target_template != draft_template:
        lacking = {target_template: "the target", draft_template: "the draft"}.get(None)
        found.append("chat template" + (f" ({lacking} has none)" if lacking else ""))
    target_bos, draft_bos = target.tokenizer.bos_id, draft.tokenizer.bos_id
    if target_bos != draft_bos:
        found.append(f"BOS (id {target_bos} and {draft_bos})")
    if set(target.eos_ids) != set(draft.eos_ids):
        found.append(f"EOS (ids {_listed(target.eos_ids)} and {_listed(draft.eos_ids)})")
    return found


def _listed(values: Iterable[Any]) -> str:
    """Lists at most four values."""
    ordered = sorted(values)
    shown = ", ".join(str(value) for value in ordered[:4])
    if len(ordered) > 4:
        shown += f" and {len(ordered) - 4} more"
    return shown or "none"
