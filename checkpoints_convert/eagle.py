"""EAGLE heads on disk: a folder with config.json and head.safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import safetensors
import safetensors.flax
from jax.sharding import Mesh

from specjax import files, parallel
from specjax.config import LlamaConfig
from specjax.drafters import eagle
from specjax.drafters.eagle import EagleConfig
from specjax.errors import SpecJAXError

FORMAT = "specjax_head"
WEIGHTS = "head.safetensors"
DRAFT_IDS = "draft_ids_U"
BUNDLED = pathlib.Path(importlib.resources.files("specjax")) / "data" / "heads"
# As safetensors headers call the types that parameters and ids may have.
FLOAT_TYPES, INTEGER_TYPES = ("F32", "F16", "BF16"), ("I32", "I64")


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """An EAGLE head in memory, for the target that it was loaded for.

    Attributes:
      config: its shape.
      params: parameters for the drafter, see `eagle.for_decoding`.
      path: folder it was loaded from.
      mesh: devices of the target; None for one device.
    """

    config: EagleConfig
    params: Any
    path: str
    mesh: Mesh | None


def save(
    folder: str | os.PathLike,
    config: EagleConfig,
    params,
    draft_ids_U: jax.Array | None,
    dtype=jnp.bfloat16,
) -> None:
    """Writes the folder of a head, which appears complete or not at all.

    Args:
      folder: must not exist.
      config: shape of the head.
      params: see `eagle.abstract_params`.
      draft_ids_U: int32 ids of the tokens that it can draft; None for all.
      dtype: dtype to store parameters in.

    Raises:
      SpecJAXError: the folder exists or cannot be written.
    """
    arrays = {name: x.astype(dtype) for name, x in _named(params)}
    if draft_ids_U is not None:
        arrays[DRAFT_IDS] = jnp.asarray(draft_ids_U, jnp.int32)
    fields = {"format": FORMAT, **dataclasses.asdict(config)}
    with files.new_folder(folder) as path:
        files.write_json(path / "config.json", fields)
        with files.writing():
            safetensors.flax.save_file(arrays, path / WEIGHTS)


def is_checkpoint(path: str | os.PathLike) -> bool:
    """Whether a path is the folder of a head, as far as its config.json says so."""
    config_path = files.expand(path) / "config.json"
    return files.exists(config_path) and files.read_json(config_path).get("format") == FORMAT


def bundled(target_config: LlamaConfig) -> pathlib.Path:
    """Returns the path of the bundled head for models of this shape.

    Raises:
      SpecJAXError: there is none.
    """
    for path in sorted(BUNDLED.glob("*/config.json")):
        with contextlib.suppress(SpecJAXError):
            read_config(path.parent).check_target(target_config)
            return path.parent
    raise SpecJAXError(
        "no EAGLE head is bundled for a model of this shape; give the folder of one (made "
        "with specjax train)"
    )


def load(
    path: str | os.PathLike | None,
    target_config: LlamaConfig,
    target_params,
    *,
    dtype,
    mesh: Mesh | None = None,
) -> EagleHead:
    """Loads a head for a target.

    Args:
      path: a folder written by `save`; None for the bundled head.
      target_config: configuration of the target.
      target_params: its parameters, of which a head with fewer tokens copies output rows.
      dtype: dtype of the target's parameters, which the head is cast to.
      mesh: the target's.

    Raises:
      SpecJAXError: for files that cannot be read, naming the file and what is wrong with it, or a
        head for another target, naming what differs.
    """
    folder = _folder(path, target_config)
    check(folder, target_config, mesh)
    config, params, draft_ids_U = read(folder)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    params = eagle.for_decoding(params, draft_ids_U, target_params)
    return EagleHead(config, parallel.place(params, mesh, "draft"), str(folder), mesh)


def check(
    path: str | os.PathLike | None, target_config: LlamaConfig, mesh: Mesh | None = None
) -> EagleConfig:
    """Checks by its headers that a head can be loaded for a target, and returns its shape.

    Arguments and errors as for `load`.
    """
    folder = _folder(path, target_config)
    config = read_config(folder)
    try:
        config.check_target(target_config)
        parallel.check_shardable(config.layer, parallel.degree(mesh, "draft"), "EAGLE head")
    except SpecJAXError as error:
        raise SpecJAXError(f"{folder}: {error}") from error
    _check_header(folder / WEIGHTS, config)
    return config


def read(path: str | os.PathLike) -> tuple[EagleConfig, Any, jax.Array | None]:
    """Returns the head that `save` has written, with parameters in the stored dtype.

    Raises:
      SpecJAXError: for files that cannot be read, naming the file and what is wrong with it.
    """
    folder = files.expand(path)
    config = read_config(folder)
    weights = folder / WEIGHTS
    _check_header(weights, config)
    with _reading(weights):
        arrays = safetensors.flax.load_file(weights)
    draft_ids_U = arrays.pop(DRAFT_IDS, None)
    if draft_ids_U is not None:
        last = config.layer.vocab_size - 1
        if draft_ids_U.min() < 0 or draft_ids_U.max() > last:
            raise SpecJAXError(f"{weights}: {DRAFT_IDS!r} must have ids from 0 to {last}")
    shapes = eagle.abstract_params(config)
    leaves = [arrays[name] for name, _ in _named(shapes)]
    return config, jax.tree.unflatten(jax.tree.structure(shapes), leaves), draft_ids_U


def read_config(folder: pathlib.Path) -> EagleConfig:
    """Returns the shape of a head.

    Raises:
      SpecJAXError: for a folder that is not that of a head.
    """
    if not files.exists(folder):
        raise SpecJAXError(f"{folder} does not exist")
    files.check_complete(folder)
    path = folder / "config.json"
    if not files.exists(path):
        raise SpecJAXError(f"{folder}: no config.json; not the folder of an EAGLE head")
    fields = files.read_json(path)
    if fields.pop("format", None) != FORMAT:
        raise SpecJAXError(
            f"{folder} is not the folder of an EAGLE head, as specjax train writes it"
        )
    if "taps" in fields:  # the name before 0.1.0
        fields["aux_layers"] = fields.pop("taps")
    with files.parsing(path):
        layer = LlamaConfig.from_dict(fields.pop("layer"))
        aux_layers = tuple(fields.pop("aux_layers"))
        for number in (*aux_layers, *fields.values()):
            if number is not None and type(number) is not int:
                raise SpecJAXError(f"{number!r} must be an integer")
        return EagleConfig(layer, aux_layers, **fields)


def _folder(path: str | os.PathLike | None, target_config: LlamaConfig) -> pathlib.Path:
    return bundled(target_config) if path is None else files.expand(path)


def _check_header(path: pathlib.Path, config: EagleConfig) -> None:
    """Checks names, shapes and dtypes of the tensors, and that the file has all of their bytes."""
    if not files.exists(path):
        raise SpecJAXError(f"{path} does not exist")
    expected = {name: (x.shape, FLOAT_TYPES) for name, x in _named(eagle.abstract_params(config))}
    if config.num_draft_tokens is not None:
        expected[DRAFT_IDS] = ((config.num_draft_tokens,), INTEGER_TYPES)
    found = {}
    with _reading(path), safetensors.safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            found[name] = tuple(part.get_shape()), part.get_dtype()
    for name in sorted(expected.keys() ^ found.keys()):
        fault = "is missing" if name in expected else "is not part of this head"
        raise SpecJAXError(f"{path}: tensor {name!r} {fault}")
    for name, (shape, dtype) in found.items():
        expected_shape, expected_types = expected[name]
        if shape != expected_shape:
            raise SpecJAXError(
                f"{path}: tensor {name!r} has shape {list(shape)}, the configuration requires "
                f"{list(expected_shape)}"
            )
        if dtype not in expected_types:
            raise SpecJAXError(
                f"{path}: tensor {name!r} has dtype {dtype}, requires {' or '.join(expected_types)}"
            )


@contextlib.contextmanager
def _reading(path: pathlib.Path):
    """Raises SpecJAXError in place of safetensors' exceptions for a broken file."""
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise SpecJAXError(
            f"{path}: truncated or not a safetensors file: {files.one_line(error)}"
        ) from error


def _named(params) -> list[tuple[str, Any]]:
    """Returns names like "layers.0.attention.qkv_KGHD" and leaves, in the order of the tree."""
    named = []
    for path, leaf in jax.tree.leaves_with_path(params):
        keys = [str(getattr(key, "key", getattr(key, "idx", None))) for key in path]
        named.append((".".join(keys), leaf))
    return named
