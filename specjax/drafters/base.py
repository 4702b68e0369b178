"""The contract between the decode loop and a drafter, and how drafters are found by their names.

A drafter is a NamedTuple of pure functions and an explicit state, like an optax
`GradientTransformation`. Its module in this folder has a function

    make(num_speculative_tokens, target, draft, **options) -> Drafter

and the class `DRAFT` of `draft`: None for a drafter without parameters, `LlamaConfig` for one that
runs a draft model, `EagleConfig` for a head. `target` is a `LlamaConfig`, and every option is a
keyword with a default that is a number or a text. One that runs a model also has the keyword
`implementation`, for `llama.forward`. A keyword `skippable` says that it can miss rounds, which it
has to where it comes after another drafter. The module's name is the drafter's name. Nothing needs
to be registered.

`make` must return the same functions for the same arguments (`functools.lru_cache` does it): a
Drafter is a static argument of `jax.jit`, and new functions mean a new compilation.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import drafters
from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.kernels.sampling import Distribution

FORWARDED = (
    "implementation",
    "skippable",
)  # keywords of `make` in drafter modules that are no options


class Draft(NamedTuple):
    """A proposal: a chain of guesses of the tokens that follow the pending one.

    Attributes:
      tokens_BM: int32.
      count_B: int32, how many of the K guesses are real in each row; None where all always are.
        When no row of the batch has any, the round is a plain one-token step.
      distribution: the K distributions that the tokens were drawn from, as `draw` returned them; None for
        deterministic guesses.
    """

    tokens_BM: jax.Array
    count_B: jax.Array | None = None
    distribution: tuple[Distribution, ...] | None = None


def chain(tokens: list[jax.Array], distributions: list[Distribution]) -> Draft:
    """The proposal of K tokens that were drawn one after the other: what K calls of `draw`
    returned."""
    return Draft(jnp.stack(tokens, axis=1), distribution=tuple(distributions))


class Context(NamedTuple):
    """What the loop knows at the start of a round, or after it.

    Attributes:
      tokens_BS: int32, committed tokens, prompt and output; what lies at or beyond the length means
        nothing.
      length_B: int32, number of committed tokens. The last one is *pending*: the target has not
        read it yet.
      active_B: bool, rows that still generate.
      target: the target's parameters, on a mesh this device's shards of them.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array
    target: Any


@struct.dataclass
class Prefill:
    """What a drafter's `init` gets to work with.

    Attributes:
      tokens_BS: prompts. S is also the most positions that a row can come to need.
      length_B: int32, number of prompt tokens.
      aux_hidden_BSD: for each layer, the target's residual stream at every prompt token but the last.
      target: the target's parameters, on a mesh this device's shards of them.
      page_size: Z of the caches (static).
      chunk_size: tokens of a prompt to read at a time (static).
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    aux_hidden_BSD: tuple[jax.Array, ...]
    target: Any
    page_size: int = struct.field(pytree_node=False)
    chunk_size: int = struct.field(pytree_node=False)


class Draw(NamedTuple):
    """How a drafter comes from logits to tokens; it knows nothing of temperatures, filters, noise
    or shards.

    Attributes:
      sample: `(logits_BV, position_B) -> (token_B, distribution)`, a draw for an absolute position; so is a
        call of this object.
      certain: `token_B -> distribution`, the distribution of a guess that was not drawn, where others of its batch
        were.
    """

    sample: Callable[[jax.Array, jax.Array], tuple[jax.Array, Distribution]]
    certain: Callable[[jax.Array], Distribution]

    def __call__(
        self, logits_BV: jax.Array, position_B: jax.Array
    ) -> tuple[jax.Array, Distribution]:
        """See `sample`."""
        return self.sample(logits_BV, position_B)


def _stateless(params, prefill):
    return ()


def _unchanged(params, state, context, verified, aux_hidden_BTD):
    return state


class Drafter(NamedTuple):
    """Pure functions that propose tokens; one that keeps no state and wants no aux_layers is `Drafter(K,
    propose)`.

    What a drafter proposes may depend on committed tokens and on earlier guesses of the same round,
    never on drafts
    that were rejected: their noise is used again, and the output would no longer follow the
      target's distribution.

    On a mesh these functions see one device's shards: of the batch, and of parameters and state
    whose names end with letters of `parallel.RULES` (K is kv heads there, so name no state
    `..._BK`). Logits for `draw` are whole, or the draft model's own shard of the vocabulary, or the
    target's. A scalar of the state must be the same on all devices.

    Attributes:
      num_tokens: K, how many tokens it proposes at most (static).
      propose: (params, state, context: Context, draw: Draw) -> (Draft, state).
      aux_layers: target layers whose residual stream it wants (static).
      init: (params, prefill: Prefill) -> state pytree; by default there is no state.
      update: (params, state, context: Context, verified: Verified, aux_hidden_BTD) -> state, by default
        the same; the context is the one after the round, and `aux_hidden_BTD` are the target's at the
        pending token and the drafts of that round.
    """

    num_tokens: int
    propose: Callable[[Any, Any, Context, Draw], tuple[Draft, Any]]
    aux_layers: tuple[int, ...] = ()
    init: Callable[[Any, Prefill], Any] = _stateless
    update: Callable[[Any, Any, Context, Any, tuple[jax.Array, ...]], Any] = _unchanged


def names() -> list[str]:
    """Drafters that there are."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(drafters.__path__)
        if module.name not in ("base", "first_of")
    )


def needs(name: str) -> list[type | None]:
    """What each of the drafters in `name` takes as its draft, see `make`: the class of a
      configuration, or None.

    Raises:
      SpecJAXError: no such drafter.
    """
    return [module.DRAFT for module in _modules(name)]


def option_types(name: str) -> dict[str, type]:
    """The options of the drafters in `name`, and what their values are. Raises SpecJAXError for no
    such drafter."""
    return {
        option: type(default)
        for module in _modules(name)
        for option, default in _keywords(module).items()
        if option not in FORWARDED
    }


def make(
    name: str,
    num_speculative_tokens: int,
    target: LlamaConfig,
    draft: Any = None,
    implementation: str | None = None,
    options: dict[str, Any] | None = None,
) -> Drafter:
    """The drafter called `name`, or several in one.

    Args:
      name: one of `names()`, or several with commas between them; then the first that has a
        proposal for a row makes it (see `combined`), and parameters and state are tuples.
      num_speculative_tokens: K.
      target: configuration of the target.
      draft: configuration of the draft model or head, for the drafter that needs one; None where
        there is none.
      implementation: of attention in the drafter's own passes, see `kernels.dispatch.choose`.
      options: of the drafters by name; each gets those that it has.

    Raises:
      SpecJAXError: no such drafter or option, an option of another type than its default, K < 1, a
        draft that is missing, of the wrong kind or of no use, or a drafter that cannot come after
        another one.
    """
    modules = _modules(name)
    if not isinstance(num_speculative_tokens, int):
        raise SpecJAXError(
            f"the number of speculative tokens must be a whole number, got {num_speculative_tokens!r}"
        )
    if num_speculative_tokens < 1:
        raise SpecJAXError(
            f"the number of speculative tokens must be at least 1, got {num_speculative_tokens}"
            " (the drafter 'none' decodes without speculation)"
        )
    kinds = {module.DRAFT for module in modules} - {None}
    if len(kinds) > 1:
        raise SpecJAXError(
            f"the drafter {name!r} needs both a draft model and a head, and there is one draft"
        )
    if kinds and not isinstance(draft, tuple(kinds)):
        kind = {"LlamaConfig": "draft model", "EagleConfig": "head"}
        wanted = kind[next(iter(kinds)).__name__]
        given = (
            "none was given"
            if draft is None
            else f"a {kind.get(type(draft).__name__, type(draft))} was given"
        )
        raise SpecJAXError(f"the drafter {name!r} needs a {wanted}, and {given}")
    if draft is not None and not kinds:
        raise SpecJAXError(f"the drafter {name!r} uses no draft model, but one was given")
    known = option_types(name)
    numbers = {float: int | float}  # what else is taken for a default of that type
    options = options or {}
    for option, value in options.items():
        if option not in known:
            raise SpecJAXError(
                f"drafter {name!r} has no option {option!r}; it has: "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        if not isinstance(value, numbers.get(known[option], known[option])):
            raise SpecJAXError(
                f"option {option!r} of the drafter {name!r} must be of type {known[option].__name__}, "
                f"got {value!r}"
            )
    made = []
    for i, module in enumerate(modules):
        own = _keywords(module)
        if i and "skippable" not in own:
            raise SpecJAXError(
                f"{name!r}: {name.split(',')[i]!r} cannot come after another drafter"
            )
        given = {
            **options,
            "implementation": implementation,
            "skippable": i > 0,
        }  # not every drafter wants all of it
        made.append(
            module.make(
                num_speculative_tokens,
                target,
                draft if module.DRAFT else None,
                **{keyword: given[keyword] for keyword in own if keyword in given},
            )
        )
    return (
        made[0]
        if len(made) == 1
        else importlib.import_module(f"{drafters.__name__}.first_of").make(tuple(made))
    )


def _keywords(module) -> dict[str, Any]:
    """The keywords of a drafter's `make`, and their defaults."""
    return {
        name: parameter.default
        for name, parameter in list(inspect.signature(module.make).parameters.items())[3:]
    }


def _modules(name: str):
    found = name.split(",")
    for one in found:
        if one not in names():
            raise SpecJAXError(
                f"drafter {one!r} does not exist; there is: none, {', '.join(names())}"
            )
    if len(set(found)) < len(found):
        raise SpecJAXError(f"{name!r} has the same drafter twice")
    return [importlib.import_module(f"{drafters.__name__}.{one}") for one in found]
