"""Several drafters in one: in each row, the first that has a proposal makes it.

`--drafter=ngram,eagle` copies where the text repeats itself and thinks where it does not.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import lax_utils
from specjax.drafters.base import Draft, Drafter, Draw


@functools.lru_cache
def make(drafters: tuple[Drafter, ...]) -> Drafter:
    """Asks the drafters in turn; one that no row needs is not run, and has to be able to miss
    rounds.

    Parameters and state are tuples, one entry for each. All have the same `num_tokens`.
    """
    aux_layers = tuple(sorted({layer for drafter in drafters for layer in drafter.aux_layers}))

    def own(drafter, all_aux_hidden):
        return tuple(all_aux_hidden[aux_layers.index(layer)] for layer in drafter.aux_layers)

    def init(params, prefill):
        return tuple(
            drafter.init(p, prefill.replace(aux_hidden_BSD=own(drafter, prefill.aux_hidden_BSD)))
            for drafter, p in zip(drafters, params, strict=True)
        )

    def propose(params, state, context, draw):
        states = list(state)
        draft, states[0] = _counted(drafters[0], params[0], states[0], context, draw)
        for i in range(1, len(drafters)):
            needed_B = context.active_B & (draft.count_B == 0)

            def ask(_, state, i=i):
                return _counted(drafters[i], params[i], state, context, draw)

            silence = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(ask, None, states[i])[0]
            )
            other, states[i] = lax_utils.cond_in_place(jnp.any(needed_B), ask, (silence, states[i]))
            draft = _merge(draft, other, needed_B, draw)
        return draft, tuple(states)

    def update(params, state, context, verified, aux_hidden_BTD):
        return tuple(
            drafter.update(p, s, context, verified, own(drafter, aux_hidden_BTD))
            for drafter, p, s in zip(drafters, params, state, strict=True)
        )

    return Drafter(drafters[0].num_tokens, propose, aux_layers, init, update)


def _counted(drafter: Drafter, params, state, context, draw: Draw):
    """A proposal that says how many of its guesses are real."""
    draft, state = drafter.propose(params, state, context, draw)
    if draft.count_B is None:
        draft = draft._replace(
            count_B=jnp.full(len(context.length_B), drafter.num_tokens, jnp.int32)
        )
    return draft, state


def _merge(draft: Draft, other: Draft, other_B, draw: Draw) -> Draft:
    """The other's proposal in some of the rows."""

    def choose(b, a):
        return jnp.where(other_B.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    def distributions(draft):
        return draft.distribution or tuple(draw.certain(token_B) for token_B in draft.tokens_BM.T)

    distribution = (
        jax.tree.map(choose, distributions(other), distributions(draft))
        if draft.distribution or other.distribution
        else None
    )
    return Draft(
        choose(other.tokens_BM, draft.tokens_BM), choose(other.count_B, draft.count_B), distribution
    )
