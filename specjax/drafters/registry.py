"""Finds drafters by their names: the name of a drafter is that of its module in this folder.

Such a module has

    DRAFT_CONFIG   the class of its draft's configuration; None for a drafter without parameters
    FORMAT         the module that loads its checkpoints, by its dotted name; None where it has no
                   checkpoint, or where that is a Llama model
    OBJECTIVE      the module with its training objective, by its dotted name; None for none
    make(num_tokens, target_config, draft_config, **options) -> Drafter

and where vLLM has other names for it

    VLLM_METHODS   names of this method
    VLLM_OPTIONS   names of its options there, and here

Every option is a keyword-only argument of `make` with a default that is a number or a string.
Nothing needs to be registered.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from specjax import drafters
from specjax.config import LlamaConfig
from specjax.drafters.base import Drafter
from specjax.drafters.first_of import FirstOf
from specjax.errors import SpecJAXError

DEFAULT = "ngram"  # for commands and functions without a given drafter
DEFAULT_TRAINED = "eagle"  # for `specjax train`
NOT_DRAFTERS = ("base", "registry", "first_of")


def names() -> list[str]:
    """Returns the names of all drafters."""
    modules = pkgutil.iter_modules(drafters.__path__)
    return sorted(module.name for module in modules if module.name not in NOT_DRAFTERS)


def modules(name: str) -> list[ModuleType]:
    """Returns the modules of the drafters in `name`, several with commas between them.

    Raises:
      SpecJAXError: for an unknown drafter, or the same one twice.
    """
    parts = name.split(",")
    for part in parts:
        if part not in names():
            choices = ", ".join(["none", *names()])
            raise SpecJAXError(f"unknown drafter {part!r}; choose from {choices}")
    if len(set(parts)) < len(parts):
        raise SpecJAXError(f"{name!r} names the same drafter twice")
    return [importlib.import_module(f"{drafters.__name__}.{part}") for part in parts]


def from_vllm(method: str) -> str:
    """Returns the name of the drafter that vLLM calls `method`; other names stay as they are."""
    for name in names():
        (module,) = modules(name)
        if method in getattr(module, "VLLM_METHODS", ()):
            return name
    return method


def options_from_vllm(name: str) -> dict[str, str]:
    """Returns vLLM's names of options of the drafters in `name`, and ours.

    Raises:
      SpecJAXError: for an unknown drafter.
    """
    found = {}
    for module in modules(name):
        found |= getattr(module, "VLLM_OPTIONS", {})
    return found


def draft_config_types(name: str) -> list[type | None]:
    """Returns the class of configuration that each drafter in `name` needs; None for no draft.

    Raises:
      SpecJAXError: for an unknown drafter.
    """
    return [module.DRAFT_CONFIG for module in modules(name)]


def option_types(name: str) -> dict[str, type]:
    """Returns the options of the drafters in `name`, and the types of their values.

    Raises:
      SpecJAXError: for an unknown drafter.
    """
    found = {}
    for module in modules(name):
        for option, default in _options(module).items():
            found[option] = type(default)
    return found


def make(
    name: str,
    num_tokens: int,
    target_config: LlamaConfig,
    draft_config: Any = None,
    options: dict[str, Any] | None = None,
) -> Drafter:
    """Returns the drafter called `name`, or several in one.

    Args:
      name: one of `names()`, or several separated by commas; then each row takes the first that has
        a proposal (see `first_of`), and parameters and state are tuples.
      num_tokens: number of speculative tokens per round, at least 1.
      target_config: configuration of the target.
      draft_config: configuration of the draft model or EAGLE head, for the drafter that needs one.
      options: options of the drafters, by name; each drafter gets its own.

    Raises:
      SpecJAXError: for an unknown drafter or option, an option of another type than its default, a
        number of tokens below 1, a draft that is missing, of the wrong kind or not needed, or a
        drafter that cannot follow another one.
    """
    found = modules(name)
    if not isinstance(num_tokens, int):
        raise SpecJAXError(f"num_speculative_tokens must be an integer, got {num_tokens!r}")
    if num_tokens < 1:
        raise SpecJAXError(
            f"num_speculative_tokens must be at least 1, got {num_tokens}; the drafter 'none' "
            "decodes without speculation"
        )
    _check_draft_config(name, found, draft_config)
    options = options or {}
    _check_options(name, options)
    made = []
    for module in found:
        used = {option: options[option] for option in _options(module) if option in options}
        config = draft_config if module.DRAFT_CONFIG else None
        made.append(module.make(num_tokens, target_config, config, **used))
    if len(made) == 1:
        return made[0]
    first, *others = made
    resting = []
    for part, drafter in zip(name.split(",")[1:], others, strict=True):
        try:
            resting.append(drafter.resting())
        except SpecJAXError as error:
            raise SpecJAXError(f"{name!r}: {part!r} cannot follow another drafter") from error
    return FirstOf(num_tokens=num_tokens, drafters=(first, *resting))


def _check_draft_config(name: str, found: list[ModuleType], draft_config: Any) -> None:
    kinds = {module.DRAFT_CONFIG for module in found} - {None}
    if len(kinds) > 1:
        both = " and ".join(sorted(map(_kind, kinds)))
        raise SpecJAXError(f"the drafters {name!r} need {both}; only one draft can be given")
    if kinds and not isinstance(draft_config, tuple(kinds)):
        got = "none" if draft_config is None else _kind(type(draft_config))
        raise SpecJAXError(f"the drafter {name!r} requires {_kind(*kinds)}, got {got}")
    if draft_config is not None and not kinds:
        raise SpecJAXError(f"the drafter {name!r} uses no draft model, but one was given")


def _kind(config_type: type) -> str:
    if config_type is LlamaConfig:
        return "a draft model"
    return getattr(config_type, "KIND", f"a {config_type.__name__}")


def _check_options(name: str, options: dict[str, Any]) -> None:
    known = option_types(name)
    for option, value in options.items():
        if option not in known:
            choices = ", ".join(sorted(known)) or "none"
            raise SpecJAXError(f"drafter {name!r} has no option {option!r}; choose from: {choices}")
        wanted = int | float if known[option] is float else known[option]
        if not isinstance(value, wanted):
            raise SpecJAXError(
                f"option {option!r} of the drafter {name!r} must be of type "
                f"{known[option].__name__}, got {value!r}"
            )


def _options(module: ModuleType) -> dict[str, Any]:
    """Returns the options of a drafter, and their defaults."""
    parameters = inspect.signature(module.make).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
