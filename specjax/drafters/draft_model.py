"""A smaller Llama with the target's vocabulary drafts one token after the other.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax import kv_cache, llama
from specjax.config import LlamaConfig, Runtime
from specjax.drafters.base import Drafter, chain

DRAFT_CONFIG = LlamaConfig
FORMAT = None
OBJECTIVE = "specjax.train.distill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter(Drafter):
    """Drafts with the model `config`, whose parameters the loop passes.

    The state is the draft model's own paged cache. The first pass of a round reads the last *two*
    committed tokens: after a round in which everything was accepted, the draft model has not read
    the last draft yet; otherwise the same keys and values are written once more.
    """

    config: LlamaConfig

    def init(self, params, context, aux_hidden_BSD, chunk_size):
        runtime = _runtime(params, context.runtime)
        B, S = context.tokens_BS.shape
        cache = llama.init_cache(self.config, runtime, B, S, role="draft")
        cache, _ = llama.prefill(
            params,
            self.config,
            runtime,
            context.tokens_BS,
            context.length_B - 1,
            cache,
            chunk_size,
            role="draft",
        )
        return cache

    def propose(self, params, cache, context, sample):
        runtime = _runtime(params, context.runtime)
        length_B = context.length_B
        read_B = length_B + self.num_tokens - 1
        cache = kv_cache.reserve(cache, jnp.where(context.active_B, read_B, 0))
        last_B2 = length_B[:, None] + jnp.array([-2, -1])
        tokens_BT = jnp.take_along_axis(context.tokens_BS, jnp.maximum(last_B2, 0), axis=1)
        start_B = length_B - 2
        tokens, distributions = [], []
        for i in range(self.num_tokens):
            output = llama.forward(
                params, self.config, runtime, tokens_BT, start_B, cache, role="draft"
            )
            cache = output.cache
            logits_BV = llama.logits(params, output.hidden_BTD[:, -1:])[:, 0]
            token_B, distribution = sample(logits_BV, length_B + i)
            tokens.append(token_B)
            distributions.append(distribution)
            tokens_BT, start_B = token_B[:, None], length_B + i
        return chain(tokens, distributions), cache

    def update(self, params, cache, context, verified, aux_hidden_BTD):
        return kv_cache.release(cache, ~context.active_B)


def _runtime(params, runtime: Runtime) -> Runtime:
    """Returns the draft model's runtime: the target's, but in the dtype of its own parameters."""
    return dataclasses.replace(runtime, dtype=llama.params_dtype(params))


def make(num_tokens: int, target_config: LlamaConfig, draft_config: LlamaConfig) -> ModelDrafter:
    """Returns the drafter; see `ModelDrafter`."""
    return ModelDrafter(num_tokens=num_tokens, config=draft_config)
