"""Loading the models of a command."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from specjax import parallel
from specjax.bench.setup import Setup, Speculation
from specjax.cli import processes
from specjax.cli.flags import Decoding
from specjax.config import LlamaConfig
from specjax.drafters import registry
from specjax.drafters.eagle import EagleConfig
from specjax.engine import eagle_heads, load
from specjax.engine import generate as generation
from specjax.engine.eagle_heads import EagleHead
from specjax.engine.load import Model
from specjax.errors import SpecJAXError


def load_models(decoding: Decoding) -> tuple[Setup, dict[str, Speculation]]:
    """Loads the target, and the draft model or EAGLE head of the drafters, onto the devices.

    Returns:
      The target and how it is run; and every drafter but "none" by its name.

    Raises:
      SpecJAXError: models, drafters or degrees that do not go together, where headers tell before
        anything is loaded.
    """
    names = decoding.drafters
    if decoding.drafter_options and len(names) > 1:
        raise SpecJAXError("--drafter_options apply to one --drafter, got several")
    target, draft = _load(decoding.target, names, decoding.draft, decoding.dtype, decoding.degrees)
    speculations = {}
    for name in names:
        uses_draft = len(names) == 1 or any(registry.draft_config_types(name))
        speculations[name] = Speculation(
            name,
            draft if uses_draft else None,
            num_speculative_tokens(name, decoding.num_speculative_tokens),
            decoding.drafter_options,
        )
    setup = Setup(target, decoding.verify, decoding.page_size, decoding.implementation)
    return setup, speculations


def num_speculative_tokens(drafter: str, given: int | None) -> int | None:
    """K of a drafter: the given number, else the default of the drafter; None for "none"."""
    if given is None and drafter != "none":
        return generation.default_num_speculative_tokens(drafter)
    return given


def check_benchmark(decoding: Decoding) -> None:
    """Raises SpecJAXError for drafters that a benchmark cannot compare with plain decoding."""
    names = decoding.drafters
    if "none" in names:
        raise SpecJAXError("--drafter=none: bench compares drafters with plain decoding")
    uses_draft = any(kind for name in names for kind in registry.draft_config_types(name))
    if decoding.draft and not uses_draft:
        raise SpecJAXError(
            f"--draft={decoding.draft}: {' and '.join(names)} uses no draft model and no head"
        )


def _load(
    target_path: str,
    names: Sequence[str],
    draft_path: str | None,
    dtype: str | None,
    degrees: tuple[int, int, int],
) -> tuple[Model, Model | EagleHead | None]:
    kinds = set()
    for name in names:
        if name != "none":
            kinds |= set(registry.draft_config_types(name)) - {None}
    if len(kinds) > 1:
        raise SpecJAXError(
            f"--drafter: {' and '.join(names)} need a draft model and a head; there is one --draft"
        )
    if LlamaConfig in kinds and not draft_path:
        raise SpecJAXError(f"--drafter={','.join(names)} requires a draft model: --draft")
    uses_head = EagleConfig in kinds
    has_draft = bool(draft_path) or uses_head
    if degrees[1] != 1 and not has_draft:
        raise SpecJAXError(f"--draft_tensor_parallel={degrees[1]}, but there is no --draft")
    mesh = processes.make_mesh(*degrees)
    if not has_draft:
        return load.load(target_path, dtype=dtype, mesh=mesh), None
    # What cannot be used or split is rejected before the other one is read.
    if uses_head:
        target_config = load.open_source(target_path).config
        path = draft_path or eagle_heads.shipped(target_config)
        eagle_heads.check(path, target_config, mesh)
    elif mesh:
        _check_shardable(target_path, mesh, "target")
        _check_shardable(draft_path, mesh, "draft")
    target = load.load(target_path, dtype=dtype, mesh=mesh)
    if uses_head:
        return target, eagle_heads.load(draft_path, target)
    return target, load.load(draft_path, dtype=dtype, mesh=mesh, role="draft")


def _check_shardable(path: str, mesh: Mesh, role: str) -> None:
    config = load.open_source(path).config
    parallel.check_shardable(config, parallel.degree(mesh, role), role)
