"""A smaller Llama with the target's vocabulary drafts one token after the other.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from specjax import llama
from specjax.config import LlamaConfig, Runtime
from specjax.drafters.base import Context, Drafter, chain
from specjax.kv_cache import PagedKVCache

DRAFT_CONFIG = LlamaConfig
FORMAT = None
OBJECTIVE = "specjax.train.distill"


CATCH_UP = 32  # tokens of skipped rounds that are read at a time


@struct.dataclass
class ModelDrafterState:
    """State of the draft model between rounds.

    Attributes:
      read_B: int32, how many of the first positions of the cache hold committed tokens.
      cache: keys and values of the draft model.
    """

    read_B: jax.Array
    cache: PagedKVCache


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter(Drafter):
    """Drafts with the model `config`, whose parameters the loop passes.

    The first pass of a round reads the committed tokens that the cache lacks. Alone there are one
    or two of them: after a round in which everything was accepted, the draft model has not read the
    last draft yet. With `may_rest` it may rest, and other drafts than its own are accepted: there
    are up to `num_tokens` + 1 after a round, and it catches up where there are more.
    """

    config: LlamaConfig
    may_rest: bool = False

    def resting(self) -> ModelDrafter:
        return dataclasses.replace(self, may_rest=True)

    def init(self, params, context):
        runtime = _runtime(params, context.runtime)
        cache = llama.init_cache(self.config, runtime, context.num_pages, role="draft")
        return ModelDrafterState(jnp.zeros_like(context.length_B), cache)

    def begin(self, state, is_new_B, start_B):
        return state.replace(read_B=jnp.where(is_new_B, start_B, state.read_B))

    def complete_B(self, state):
        return state.read_B

    def prefill(self, params, state, context, chunk):
        output = self._forward(params, context, state.cache, chunk.tokens_BT, chunk.start_B)
        read_B = jnp.where(context.active_B, chunk.end_B, state.read_B)
        return ModelDrafterState(read_B, output.cache)

    def propose(self, params, state, context, sample):
        M, length_B = self.num_tokens, context.length_B
        T = M + 1 if self.may_rest else 2
        if self.may_rest:
            state = self._catch_up(params, state, context, missing=T)
        output = self._read(params, state, context, T)
        index_B = jnp.clip(length_B - 1 - state.read_B, 0, T - 1)
        hidden_B1D = jnp.take_along_axis(output.hidden_BTD, index_B[:, None, None], axis=1)
        tokens, distributions = [], []
        for i in range(M):
            if i:
                token_B1, start_B = tokens[-1][:, None], length_B - 1 + i
                output = self._forward(params, context, output.cache, token_B1, start_B)
                hidden_B1D = output.hidden_BTD
            logits_BV = llama.logits(params, hidden_B1D)[:, 0]
            token_B, distribution = sample(logits_BV, length_B + i)
            tokens.append(token_B)
            distributions.append(distribution)
        read_B = jnp.where(context.active_B, length_B, state.read_B)
        return chain(tokens, distributions), ModelDrafterState(read_B, output.cache)

    def update(self, params, state, context, verified, aux_hidden_BTD):
        if self.may_rest:
            return state  # another drafter's tokens may have been accepted
        # Of the drafts, which follow the `read_B` committed tokens, all but the last one were read;
        # the last committed token was not.
        right_B = jnp.minimum(state.read_B + self.num_tokens - 1, context.length_B - 1)
        return state.replace(read_B=jnp.where(context.active_B, right_B, state.read_B))

    def _forward(self, params, context: Context, cache, tokens_BT, start_B) -> llama.Output:
        runtime = _runtime(params, context.runtime)
        return llama.forward(
            params,
            self.config,
            runtime,
            tokens_BT,
            start_B,
            context.block_table_BX,
            cache,
            role="draft",
        )

    def _read(self, params, state: ModelDrafterState, context: Context, T: int) -> llama.Output:
        """Runs the model on the next T tokens of each row; the output after them is undefined."""
        index_BT = state.read_B[:, None] + jnp.arange(T)
        tokens_BT = jnp.take_along_axis(context.tokens_BS, index_BT, axis=1, mode="clip")
        return self._forward(params, context, state.cache, tokens_BT, state.read_B)

    def _catch_up(self, params, state: ModelDrafterState, context: Context, missing: int):
        """Reads chunks until no row that takes part lacks more than `missing` tokens."""
        T = max(missing, CATCH_UP)

        def is_behind_B(state):
            return context.active_B & (context.length_B - state.read_B > missing)

        def read_chunk(state):
            output = self._read(params, state, context, T)
            next_B = jnp.minimum(state.read_B + T, context.length_B - 1)
            read_B = jnp.where(is_behind_B(state), next_B, state.read_B)
            return ModelDrafterState(read_B, output.cache)

        return jax.lax.while_loop(lambda state: jnp.any(is_behind_B(state)), read_chunk, state)


def _runtime(params, runtime: Runtime) -> Runtime:
    """Returns the draft model's runtime: the target's, but in the dtype of its own parameters."""
    return dataclasses.replace(runtime, dtype=llama.params_dtype(params))


def make(num_tokens: int, target_config: LlamaConfig, draft_config: LlamaConfig) -> ModelDrafter:
    """Returns the drafter; see `ModelDrafter`."""
    return ModelDrafter(num_tokens=num_tokens, config=draft_config)
