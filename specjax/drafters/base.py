"""The contract between the decode loop and a drafter, and how a drafter is found by its name.

A drafter is a NamedTuple of pure functions and an explicit state, like an optax `GradientTransformation`. Its module
in this folder has a function

    make(num_speculative_tokens, target, draft, **options) -> Drafter

where `target` and `draft` are `LlamaConfig`s (`draft` is None where the user named no draft model), and every option is
a keyword with a default. One that runs a model also has the keyword `implementation`, for `llama.forward`. The module's
name is the drafter's name. Nothing needs to be registered.

`make` must return the same functions for the same arguments (`functools.lru_cache` does it): a Drafter is a static
argument of `jax.jit`, and new functions mean a new compilation.
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
from specjax.kernels.verify import Law


class Draft(NamedTuple):
    """A proposal: a chain of guesses of the tokens that follow the pending one.

    Attributes:
      tokens_BK: int32.
      count_B: int32, how many of the K guesses are real in each row; None where all always are. When no row of the
        batch has any, the round is a plain one-token step.
      law: the K laws that the tokens were drawn from, as `draw` returned them; None for deterministic guesses.
    """

    tokens_BK: jax.Array
    count_B: jax.Array | None = None
    law: tuple[Law, ...] | None = None


def chain(tokens: list[jax.Array], laws: list[Law]) -> Draft:
    """The proposal of K tokens that were drawn one after the other: what K calls of `draw` returned."""
    return Draft(jnp.stack(tokens, axis=1), law=tuple(laws))


class Context(NamedTuple):
    """What the loop knows at the start of a round, or after it.

    Attributes:
      tokens_BS: int32, committed tokens, prompt and output; what lies at or beyond the length means nothing.
      length_B: int32, number of committed tokens. The last one is *pending*: the target has not read it yet.
      active_B: bool, rows that still generate.
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    active_B: jax.Array


@struct.dataclass
class Prefill:
    """What a drafter's `init` gets to work with.

    Attributes:
      tokens_BS: prompts. S is also the most slots that a row can come to need.
      length_B: int32, number of prompt tokens.
      taps_BSD: for each tap, the target's residual stream at every prompt token but the last.
      page_size: Z of the caches (static).
      chunk_size: tokens of a prompt to read at a time (static).
    """

    tokens_BS: jax.Array
    length_B: jax.Array
    taps_BSD: tuple[jax.Array, ...]
    page_size: int = struct.field(pytree_node=False)
    chunk_size: int = struct.field(pytree_node=False)


# draw(logits_BV, position_B) -> (token_B, law): draws a draft token for an absolute position. It applies the row's
# temperature and filters and takes the noise that the way of verifying asks for; a drafter knows nothing of these.
Draw = Callable[[jax.Array, jax.Array], tuple[jax.Array, Law]]


class Drafter(NamedTuple):
    """Pure functions that propose tokens.

    What a drafter proposes may depend on committed tokens and on earlier guesses of the same round, never on drafts
    that were rejected: their noise is used again, and the output would no longer follow the target's law.

    On a mesh these functions see one device's shards: of the batch, and of parameters and state whose names end with
    letters of `sharding.RULES` (K is kv heads there, so name no state `..._BK`). Logits for `draw` are whole, or the
    draft model's own shard of the vocabulary. A scalar of the state must be the same on all devices.

    Attributes:
      num_tokens: K, how many tokens it proposes at most (static).
      taps: target layers whose residual stream it wants (static).
      init: (params, prefill: Prefill) -> state pytree.
      propose: (params, state, context: Context, draw: Draw) -> (Draft, state).
      update: (params, state, context: Context, verified: Verified, taps_BTD) -> state; the context is the one after
        the round, and `taps_BTD` are the target's at the pending token and the drafts of that round.
    """

    num_tokens: int
    taps: tuple[int, ...]
    init: Callable[[Any, Prefill], Any]
    propose: Callable[[Any, Any, Context, Draw], tuple[Draft, Any]]
    update: Callable[[Any, Any, Context, Any, tuple[jax.Array, ...]], Any]


def names() -> list[str]:
    """Drafters that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(drafters.__path__) if module.name != "base")


def make(name: str, num_speculative_tokens: int, target: LlamaConfig, draft: LlamaConfig | None = None,
         implementation: str | None = None, **options) -> Drafter:
    """The drafter called `name`.

    Args:
      name: one of `names()`.
      num_speculative_tokens: K.
      target, draft: configurations of the models; None where there is no draft model.
      implementation: of attention in the drafter's own passes, see `kernels.dispatch.choose`.
      **options: of the drafter.

    Raises:
      SpecJAXError: no such drafter or option, K < 1, or a draft model that is missing or of no use to it.
    """
    if name not in names():
        raise SpecJAXError(f"drafter {name!r} does not exist; there is: none, {', '.join(names())}")
    if not isinstance(num_speculative_tokens, int):
        raise SpecJAXError(f"the number of speculative tokens must be a whole number, got {num_speculative_tokens!r}")
    if num_speculative_tokens < 1:
        raise SpecJAXError(f"the number of speculative tokens must be at least 1, got {num_speculative_tokens}"
                           " (the drafter 'none' decodes without speculation)")
    factory = importlib.import_module(f"{drafters.__name__}.{name}").make
    known = list(inspect.signature(factory).parameters)[3:]
    own = {}
    if "implementation" in known:  # not every drafter runs a model
        known.remove("implementation")
        own["implementation"] = implementation
    for option, value in options.items():
        if option not in known:
            raise SpecJAXError(f"drafter {name!r} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        if not isinstance(value, int | float | str):
            raise SpecJAXError(f"option {option!r} of the drafter {name!r} must be a number or a text, got {value!r}")
    return factory(num_speculative_tokens, target, draft, **own, **options)
