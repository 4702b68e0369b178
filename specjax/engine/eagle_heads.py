"""Heads for the drafter "eagle" on disk: a folder with config.json and head.safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import safetensors.flax
from jax.sharding import Mesh

from specjax import files, parallel
from specjax.config import LlamaConfig
from specjax.drafters import eagle
from specjax.drafters.eagle import EagleConfig
from specjax.engine.load import Model
from specjax.errors import SpecJAXError

FORMAT = "specjax_head"
SHIPPED = (
    pathlib.Path(__file__).parents[1] / "data" / "heads"
)  # a folder of each head that comes with the package


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """A head in memory, beside its target.

    Attributes:
      config: its shape.
      params: for the drafter, see `eagle.for_decoding`.
      path: where it was loaded from.
      mesh: the target's.
    """

    config: EagleConfig
    params: Any
    path: str
    mesh: Mesh | None


def save(
    folder: str | os.PathLike,
    cfg: EagleConfig,
    params,
    draft_ids_U: jax.Array | None,
    dtype=jnp.bfloat16,
) -> None:
    """Writes a folder, which appears whole or not at all.

    Args:
      folder: must not exist.
      cfg: shape of the head.
      params: see `eagle.abstract_params`.
      draft_ids_U: the tokens that it can guess, None for all.
      dtype: to store them in.
    """
    arrays = {name: x.astype(dtype) for name, x in _named(params)}
    if draft_ids_U is not None:
        arrays["draft_ids_U"] = jnp.asarray(draft_ids_U, jnp.int32)
    with files.new_folder(folder) as path:
        files.write_json(path / "config.json", {"format": FORMAT, **dataclasses.asdict(cfg)})
        with files.writing():
            safetensors.flax.save_file(arrays, path / "head.safetensors")


def shipped(target: LlamaConfig) -> pathlib.Path:
    """The folder of the head that comes with the package for models of this shape. Raises
    SpecJAXError where there is none."""
    for config in sorted(SHIPPED.glob("*/config.json")):
        with contextlib.suppress(SpecJAXError):
            check(config.parent, target)
            return config.parent
    raise SpecJAXError(
        "no head comes with SpecJAX for a model of this shape: name one (specjax train makes them)"
    )


def load(path: str | os.PathLike | None, target: Model) -> EagleHead:
    """Loads a head for a target, in the dtype of its parameters and on its mesh.

    Args:
      path: a folder that `save` has written; None for the head that comes with the package, see
        `shipped`.
      target: the model that it drafts for.

    Raises:
      SpecJAXError: for files that cannot be read, or a head for another target, naming what
        differs.
    """
    path = shipped(target.config) if path is None else path
    cfg = check(path, target.config, target.mesh)
    _, params, draft_ids_U = read(path)
    dtype = target.dtype
    params = eagle.for_decoding(
        jax.tree.map(lambda x: x.astype(dtype), params), draft_ids_U, target.params
    )
    return EagleHead(cfg, parallel.place(params, target.mesh, "draft"), str(path), target.mesh)


def read(path: str | os.PathLike) -> tuple[EagleConfig, Any, jax.Array | None]:
    """What `save` has written: configuration, parameters in the stored dtype, and the tokens that
    can be guessed.

    Raises:
      SpecJAXError: for files that cannot be read, naming the tensor at fault.
    """
    folder = pathlib.Path(path)
    cfg = read_config(folder)
    shapes = eagle.abstract_params(cfg)
    wanted = dict(_named(shapes))
    if cfg.num_draft_tokens is not None:
        wanted["draft_ids_U"] = jax.ShapeDtypeStruct((cfg.num_draft_tokens,), jnp.int32)
    with files.parsing(folder / "head.safetensors"):
        arrays = safetensors.flax.load_file(folder / "head.safetensors")
    for name in sorted(wanted.keys() ^ arrays.keys()):
        raise SpecJAXError(
            f"{folder}: tensor {name!r} is {'missing' if name in wanted else 'not one of a head'}"
        )
    for name, x in arrays.items():
        if x.shape != wanted[name].shape:
            raise SpecJAXError(
                f"{folder}: tensor {name!r} has the shape {x.shape}, and must have {wanted[name].shape}"
            )
        if jnp.issubdtype(x.dtype, jnp.floating) != jnp.issubdtype(
            wanted[name].dtype, jnp.floating
        ):
            raise SpecJAXError(
                f"{folder}: tensor {name!r} has the dtype {x.dtype}, and must have one like "
                f"{wanted[name].dtype}"
            )
    draft_ids_U = arrays.pop("draft_ids_U", None)
    if (
        draft_ids_U is not None
        and not ((draft_ids_U >= 0) & (draft_ids_U < cfg.layer.vocab_size)).all()
    ):
        raise SpecJAXError(f"{folder}: 'draft_ids_U' has ids that are no tokens")
    params = jax.tree.unflatten(
        jax.tree.structure(shapes), [arrays[name] for name, _ in _named(shapes)]
    )
    return cfg, params, draft_ids_U


def check(path: str | os.PathLike, target: LlamaConfig, mesh: Mesh | None = None) -> EagleConfig:
    """The shape of the head at `path`, see `load`, by its header. Raises SpecJAXError where it is
    not for the target or the mesh."""
    cfg = read_config(pathlib.Path(path))
    try:
        cfg.check_target(target)
        parallel.check_shardable(cfg.layer, parallel.degree(mesh, "draft"), "head")
    except SpecJAXError as error:
        raise SpecJAXError(f"{path}: {error}") from error
    return cfg


def read_config(folder: pathlib.Path) -> EagleConfig:
    """The shape of a head. Raises SpecJAXError for a folder that has none."""
    files.refuse_incomplete(folder)
    if not (folder / "config.json").exists():
        raise SpecJAXError(f"{folder}: no config.json: not the folder of a head")
    fields = files.read_json(folder / "config.json")
    if fields.pop("format", None) != FORMAT:
        raise SpecJAXError(f"{folder} is not the folder of a head (one that specjax train wrote)")
    if "taps" in fields:  # the name before 0.1.0
        fields["aux_layers"] = fields.pop("taps")
    with files.parsing(folder / "config.json"):
        return EagleConfig(
            LlamaConfig.from_dict(fields.pop("layer")), tuple(fields.pop("aux_layers")), **fields
        )


def _named(params) -> list[tuple[str, Any]]:
    """Parameters with names like "layers.0.attention.qkv_KGHD", in the order of the tree's leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [
        (".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path), x)
        for path, x in leaves
    ]
