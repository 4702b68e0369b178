"""Which drafter an engine uses, from the options that vLLM has for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.drafters import registry
from specjax.engine import hub, load
from specjax.errors import SpecJAXError

PLAIN = "none"
# Names of vLLM for ways of verifying, and ours.
VERIFY_METHODS = {"standard": "rejection"}
KEYS = (
    "method",
    "model",
    "revision",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "rejection_sample_method",
    "draft_sample_method",
)


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """A drafter, by its name, with what it needs.

    Attributes:
      drafter: name, or several separated by commas; "none" for plain decoding.
      draft: path of its draft model or head; None where it needs none, or for a bundled one.
      num_speculative_tokens: K; None for the default.
      options: options of the drafter.
      draft_tensor_parallel_size: devices that share a copy of the draft.
      verify: the method of verification that was asked for; None for the default.
    """

    drafter: str = PLAIN
    draft: str | None = None
    num_speculative_tokens: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    draft_tensor_parallel_size: int = 1
    verify: str | None = None

    def __post_init__(self):
        if self.drafter == PLAIN:
            return
        needs_draft = any(registry.draft_config_types(self.drafter))
        if self.draft_tensor_parallel_size != 1 and not needs_draft:
            raise SpecJAXError(
                f"the drafter {self.drafter!r} has no draft model, so that the tensor parallelism "
                f"of drafts must be 1, got {self.draft_tensor_parallel_size}"
            )


def from_model(
    model: str | None,
    num_speculative_tokens: int | None = None,
    draft_tensor_parallel_size: int | None = None,
    revision: str | None = None,
) -> SpeculativeConfig:
    """Returns the drafter that `speculative_model` names.

    Args:
      model: the name of a drafter, or several separated by commas; else the path or the Hugging
        Face name of a draft model or head. None, and "none", for plain decoding.
      num_speculative_tokens: K; None for the default.
      draft_tensor_parallel_size: devices that share a copy of the draft; 1 by default.
      revision: of a draft on Hugging Face.

    Raises:
      SpecJAXError: for what is neither, or options without a drafter.
    """
    if model is None or model == PLAIN:
        given = {
            "num_speculative_tokens": num_speculative_tokens,
            "the tensor parallelism of drafts": draft_tensor_parallel_size,
            "the revision of a draft": revision,
        }
        for name, value in given.items():
            if value is not None:
                raise SpecJAXError(f"{name} is {value!r}, but no speculative model is given")
        return SpeculativeConfig()
    drafter, draft = model, None
    if not is_drafter(model):
        draft = _resolve(model, revision)
        drafter = load.find_drafter(draft)
    elif revision is not None:
        raise SpecJAXError(f"revision {revision!r} is for a draft, but {model!r} is a drafter")
    return SpeculativeConfig(
        drafter,
        draft,
        num_speculative_tokens,
        draft_tensor_parallel_size=_size(draft_tensor_parallel_size),
    )


def from_dict(fields: Mapping[str, Any]) -> SpeculativeConfig:
    """Returns the drafter that vLLM's `speculative_config` describes.

    Args:
      fields: values for `KEYS`, and options of the drafter under our names or vLLM's.

    Raises:
      SpecJAXError: for an unknown key, or a value that is not supported, naming those that are.
    """
    if not isinstance(fields, Mapping):
        raise SpecJAXError(f"speculative_config must be a dict, got {fields!r}")
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in ("method", "model"):
        if not isinstance(fields.get(name, ""), str):
            raise SpecJAXError(f"{name} of speculative_config must be a string, got {fields!r}")
    method, model, revision = (fields.get(name) for name in ("method", "model", "revision"))
    num_tokens = fields.get("num_speculative_tokens")
    size = fields.get("draft_tensor_parallel_size")
    if method is None and model is None:
        raise SpecJAXError(f"speculative_config requires a method or a model, got {fields!r}")
    if method == PLAIN:
        raise SpecJAXError("speculative_config must be None for plain decoding, got method 'none'")
    if method is None:
        config = from_model(model, num_tokens, size, revision)
    elif model is None and revision is not None:
        raise SpecJAXError(f"speculative_config: revision {revision!r} requires a model")
    else:
        draft = None if model is None else str(hub.resolve(model, revision))
        config = SpeculativeConfig(
            registry.from_vllm(method),
            draft,
            num_tokens,
            draft_tensor_parallel_size=_size(size),
        )
    others = {name: value for name, value in fields.items() if name not in KEYS}
    options = _options(config.drafter, others)
    return dataclasses.replace(config, options=options, verify=_verify(fields))


def is_drafter(name: Any) -> bool:
    """Returns whether a speculative model is the name of a drafter, or of several."""
    parts = name.split(",") if isinstance(name, str) else ()
    return any(part in registry.names() for part in parts)


def _resolve(model: str, revision: str | None) -> str:
    """Returns the path of a draft.

    Raises:
      SpecJAXError: there is none; the message has the drafters where a name may be meant for one.
    """
    try:
        return str(hub.resolve(model, revision))
    except SpecJAXError as error:
        if not isinstance(model, str) or "/" in model:
            raise
        drafters = ", ".join(registry.names())
        raise SpecJAXError(f"{model!r} is not a drafter ({drafters}), and {error}") from error


def _size(value: Any) -> int:
    """Returns the tensor parallelism of a draft, 1 by default."""
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecJAXError(
            f"the tensor parallelism of drafts must be an integer of at least 1, got {value!r}"
        )
    return value


def _options(drafter: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns options of a drafter under our names."""
    known, aliases = {}, {}
    if drafter != PLAIN:
        known, aliases = registry.option_types(drafter), registry.options_from_vllm(drafter)
    options = {}
    for name, value in given.items():
        ours = aliases.get(name, name)
        if ours not in known:
            choices = ", ".join((*KEYS, *known, *aliases))
            raise SpecJAXError(
                f"speculative_config: unknown key {name!r} for the drafter {drafter!r}; choose "
                f"from {choices}"
            )
        options[ours] = value
    return options


def _verify(fields: Mapping[str, Any]) -> str | None:
    """Returns the method of verification that is asked for; None for the default."""
    sampling = fields.get("draft_sample_method")
    if sampling not in (None, "probabilistic"):
        raise SpecJAXError(
            "speculative_config: draft_sample_method must be 'probabilistic', since drafts are "
            f"sampled from the drafter's distribution; got {sampling!r}"
        )
    method = fields.get("rejection_sample_method")
    if method is None:
        return None
    if method not in VERIFY_METHODS:
        choices = ", ".join(map(repr, VERIFY_METHODS))
        raise SpecJAXError(
            f"speculative_config: rejection_sample_method must be one of {choices}, got {method!r}"
        )
    return VERIFY_METHODS[method]
