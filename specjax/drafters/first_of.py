"""Several drafters in one: each row takes the first that has a proposal.

`--drafter=ngram,eagle` copies where the text repeats itself and runs the head where it does not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax import lax_utils
from specjax.drafters.base import Draft, Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstOf(Drafter):
    """Runs drafters in turn. Those after the first rest in rounds where no row needs them.

    Parameters and state are tuples, one entry for each drafter. All have the same `num_tokens`.
    """

    drafters: tuple[Drafter, ...]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        layers = {layer for drafter in self.drafters for layer in drafter.aux_layers}
        return tuple(sorted(layers))

    def _of(self, drafter: Drafter, aux_hidden):
        """Returns the residual streams that one of the drafters reads."""
        return tuple(aux_hidden[self.aux_layers.index(layer)] for layer in drafter.aux_layers)

    def init(self, params, context):
        pairs = zip(self.drafters, params, strict=True)
        return tuple(drafter.init(own_params, context) for drafter, own_params in pairs)

    def begin(self, state, is_new_B, start_B):
        pairs = zip(self.drafters, state, strict=True)
        return tuple(drafter.begin(own_state, is_new_B, start_B) for drafter, own_state in pairs)

    def complete_B(self, state):
        complete_B = None
        for drafter, own_state in zip(self.drafters, state, strict=True):
            own_B = drafter.complete_B(own_state)
            if complete_B is None:
                complete_B = own_B
            elif own_B is not None:
                complete_B = jnp.minimum(complete_B, own_B)
        return complete_B

    def prefill(self, params, state, context, chunk):
        states = []
        for drafter, own_params, own_state in zip(self.drafters, params, state, strict=True):
            own_hidden = self._of(drafter, chunk.aux_hidden_BTD)
            own_chunk = chunk._replace(aux_hidden_BTD=own_hidden)
            states.append(drafter.prefill(own_params, own_state, context, own_chunk))
        return tuple(states)

    def propose(self, params, state, context, sample):
        first, *others = self.drafters
        draft, state_0 = _propose_counted(first, params[0], state[0], context, sample)
        states = [state_0]
        for i, drafter in enumerate(others, 1):
            needed_B = context.active_B & (draft.count_B == 0)

            def run(_, own_state, drafter=drafter, own_params=params[i]):
                return _propose_counted(drafter, own_params, own_state, context, sample)

            shapes, _ = jax.eval_shape(run, None, state[i])
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            other, own_state = lax_utils.cond_in_place(jnp.any(needed_B), run, (nothing, state[i]))
            draft = _merge(draft, other, needed_B)
            states.append(own_state)
        return draft, tuple(states)

    def update(self, params, state, context, verified, aux_hidden_BTD):
        states = []
        for drafter, own_params, own_state in zip(self.drafters, params, state, strict=True):
            own_hidden = self._of(drafter, aux_hidden_BTD)
            states.append(drafter.update(own_params, own_state, context, verified, own_hidden))
        return tuple(states)


def _propose_counted(drafter: Drafter, params, state, context, sample):
    """Returns a proposal whose `count_B` and `sampled_B` are arrays, and the state."""
    draft, state = drafter.propose(params, state, context, sample)
    B = context.length_B.shape[0]
    if draft.count_B is None:
        draft = draft._replace(count_B=jnp.full(B, drafter.num_tokens, jnp.int32))
    if draft.sampled_B is None:
        draft = draft._replace(sampled_B=jnp.full(B, draft.distributions is not None))
    return draft, state


def _merge(draft: Draft, other: Draft, is_other_B) -> Draft:
    """Returns `other` in the rows of `is_other_B`, and `draft` in the rest."""

    def choose(b, a):
        return jnp.where(is_other_B.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    distributions = draft.distributions or other.distributions
    if draft.distributions and other.distributions:
        distributions = jax.tree.map(choose, other.distributions, draft.distributions)
    return Draft(
        choose(other.tokens_BM, draft.tokens_BM),
        choose(other.count_B, draft.count_B),
        choose(other.sampled_B, draft.sampled_B),
        distributions,
    )
