"""Loading the models of a command."""

from __future__ import annotations

from specjax import devices
from specjax.cli.flags import Decoding
from specjax.drafters import registry
from specjax.engine import generate as generation
from specjax.engine import load
from specjax.engine.load import LoadedDraft, Model
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError


def load_models(decoding: Decoding) -> tuple[Setup, dict[str, Speculation]]:
    """Loads the target, and the draft model or EAGLE head of the drafters, onto the devices.

    Returns:
      The target and how it is run; and every drafter but "none" by its name.

    Raises:
      SpecJAXError: incompatible models, drafters or degrees, before anything is loaded if headers
        show it.
    """
    names = decoding.drafters
    if decoding.drafter_options and len(names) > 1:
        raise SpecJAXError("--drafter_options apply to one --drafter, got several")
    target, draft = _load(decoding)
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


def _load(decoding: Decoding) -> tuple[Model, LoadedDraft | None]:
    """Loads the target, and the one draft that the drafters share."""
    names = [name for name in decoding.drafters if name != "none"]
    types = set()
    with_draft = []
    for name in names:
        of_name = set(registry.draft_config_types(name)) - {None}
        types |= of_name
        if of_name:
            with_draft.append(name)
    if len(types) > 1:
        raise SpecJAXError(
            f"--drafter: {' and '.join(names)} need different drafts; only one can be given"
        )
    _, draft_tensor_parallel, _ = decoding.degrees
    if draft_tensor_parallel != 1 and not with_draft:
        raise SpecJAXError(
            f"--draft_tensor_parallel={draft_tensor_parallel}, but no --drafter uses a draft"
        )
    mesh = devices.make_mesh(*decoding.degrees)
    drafter = with_draft[0] if with_draft else decoding.drafters[0]
    return load.load_with_drafter(
        decoding.target, drafter, decoding.draft, dtype=decoding.dtype, mesh=mesh
    )
