"""Tiny random models, drafters for them, and passes over a whole text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache, llama
from specjax.config import LlamaConfig, Runtime
from specjax.drafters import base, eagle, registry
from specjax.drafters.eagle import EagleConfig
from specjax.train import eagle as eagle_training


class Model(NamedTuple):
    """A model in memory."""

    config: LlamaConfig
    params: Any


@functools.cache
def tiny(seed: int, vocab_size: int = 32, num_layers: int = 1, scale: float = 0.5) -> Model:
    """A random Llama with grouped queries. Wide weights: its distributions are far from flat, its
    text varied."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )
    return Model(config, llama.init(jax.random.key(seed), config, scale=scale))


@functools.cache
def similar(seed: int, noise: float = 0.15, **kwargs) -> Model:
    """`tiny` with noise on its weights: as a draft model it is often right and often wrong."""
    model = tiny(seed, **kwargs)
    other = tiny(seed + 1000, **kwargs)
    return Model(model.config, jax.tree.map(lambda a, b: a + noise * b, model.params, other.params))


def tiny_head(target: Model, aux_layers: tuple[int, ...] = (), num_draft_tokens: int | None = None):
    """A head for a tiny target, as training begins with it: its configuration and the parameters
    for decoding."""
    config = eagle_training.make_config(target.config, aux_layers, num_draft_tokens)
    params = eagle_training.initial_params(config, target.params, jax.random.key(0))
    V = target.config.vocab_size
    ids_U = (
        None
        if num_draft_tokens is None
        else jnp.arange(num_draft_tokens, dtype=jnp.int32) * 2 % (V - 1 + V % 2)
    )
    return config, eagle.for_decoding(params, ids_U, target.params)


def make_drafter(name: str, K: int, target: Model, draft: Model, **options):
    """The drafter called `name` and the params to give to the loop: none, the draft model's, or
    those of a head: one of some layers that guesses some tokens, or behind another drafter one of
    the last layer that guesses all."""
    needs = registry.draft_config_types(name)
    config, params = None, None
    if EagleConfig in needs:
        L, V = target.config.num_layers, target.config.vocab_size
        config, params = (
            tiny_head(target) if "," in name else tiny_head(target, tuple({0, L - 1}), V * 2 // 3)
        )
    elif LlamaConfig in needs:
        config, params = draft
    params = tuple(params if kind else None for kind in needs)
    return registry.make(name, K, target.config, config, options=options), params[0] if len(
        needs
    ) == 1 else params


def full_logits(model: Model, tokens_BS) -> np.ndarray:
    """Next-token logits after every token, from one forward pass over the whole text and a fresh
    cache."""
    return _full_pass(model.params, model.config, jnp.asarray(tokens_BS), ())[0]


def full_aux_hidden(model: Model, tokens_BS, aux_layers: tuple[int, ...]):
    """The residual stream after some layers, from one forward pass over the whole text."""
    return _full_pass(model.params, model.config, jnp.asarray(tokens_BS), aux_layers)[1]


@functools.partial(jax.jit, static_argnums=(1, 3))
def _full_pass(params, config, tokens_BS, aux_layers):
    B, S = tokens_BS.shape
    runtime = Runtime(llama.params_dtype(params), page_size=S)
    table_BX, cache = kv_cache.in_order(B, S, S), llama.init_cache(config, runtime, B)
    start_B = jnp.zeros(B, jnp.int32)
    output = llama.forward(
        params, config, runtime, tokens_BS, start_B, table_BX, cache, aux_layers=aux_layers
    )
    return llama.logits(params, output.hidden_BTD), output.aux_hidden


class OracleParams(NamedTuple):
    """What an oracle says: for each absolute position a token, and whether it has nothing to say
    there."""

    tokens_BS: jax.Array
    empty_BS: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(base.Drafter):
    """A drafter that reads its tokens from its params: tests decide what is accepted, and when.

    Its state keeps the aux hidden states it got: for every position the residual streams, and how
    many columns of the last round were not all zero.
    """

    aux_layers: tuple[int, ...] = ()

    def init(self, params, context):
        shape = context.tokens_BS.shape
        zeros_BSD = jnp.zeros((*shape, context.target_config.hidden_size))
        aux_hidden_BSD = tuple(zeros_BSD for _ in self.aux_layers)
        return jnp.copy(context.length_B), aux_hidden_BSD, jnp.zeros(shape, jnp.int32)

    def prefill(self, params, state, context, chunk):
        length_B, aux_hidden_BSD, width_BS = state
        stored = self._stored(aux_hidden_BSD, chunk.start_B, chunk.aux_hidden_BTD)
        return length_B, stored, width_BS

    def _stored(self, aux_hidden_BSD, start_B, aux_hidden_BTD):
        row_B1, updated = jnp.arange(start_B.shape[0])[:, None], []
        for old, new in zip(aux_hidden_BSD, aux_hidden_BTD, strict=True):
            position_BT = start_B[:, None] + jnp.arange(new.shape[1])
            updated.append(old.at[row_B1, position_BT].set(new, mode="drop"))
        return tuple(updated)

    def propose(self, params, state, context, sample):
        index_BM = context.length_B[:, None] + jnp.arange(self.num_tokens)
        index_BM = jnp.minimum(index_BM, params.tokens_BS.shape[1] - 1)
        tokens_BM = jnp.take_along_axis(params.tokens_BS, index_BM, axis=1)
        is_empty_B1 = jnp.take_along_axis(params.empty_BS, index_BM[:, :1], axis=1)
        count_B = jnp.where(is_empty_B1[:, 0], 0, self.num_tokens)
        return base.Draft(tokens_BM, count_B=count_B), state

    def update(self, params, state, context, verified, aux_hidden_BTD):
        length_B, aux_hidden_BSD, width_BS = state
        row_B1 = jnp.arange(length_B.shape[0])[:, None]
        stored = self._stored(aux_hidden_BSD, length_B - 1, aux_hidden_BTD)
        if self.aux_layers:
            width_B = (aux_hidden_BTD[0] != 0).any(-1).sum(-1)
            width_BS = width_BS.at[row_B1, length_B[:, None]].set(width_B[:, None], mode="drop")
        return context.length_B, stored, width_BS


def oracle(num_tokens: int, aux_layers: tuple[int, ...] = ()) -> Oracle:
    return Oracle(num_tokens=num_tokens, aux_layers=aux_layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording(base.Drafter):
    """A drafter, with its last proposal in the state."""

    drafter: base.Drafter

    @property
    def aux_layers(self):
        return self.drafter.aux_layers

    def init(self, params, context):
        state = self.drafter.init(params, context)
        return state, jnp.zeros((len(context.length_B), self.num_tokens), jnp.int32)

    def prefill(self, params, state, *others):
        return self.drafter.prefill(params, state[0], *others), state[1]

    def propose(self, params, state, context, sample):
        draft, inner = self.drafter.propose(params, state[0], context, sample)
        return draft, (inner, draft.tokens_BM)

    def update(self, params, state, *others):
        return self.drafter.update(params, state[0], *others), state[1]


def recording(drafter):
    return Recording(num_tokens=drafter.num_tokens, drafter=drafter)
