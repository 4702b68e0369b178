"""A smaller Llama with the target's vocabulary guesses one token after the other (Leviathan et al.
2023)."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax import kv_cache, llama
from specjax.config import LlamaConfig
from specjax.drafters.base import Drafter, chain

DRAFT = LlamaConfig


@functools.lru_cache
def make(
    num_speculative_tokens: int,
    target: LlamaConfig,
    draft: LlamaConfig,
    *,
    implementation: str | None = None,
) -> Drafter:
    """Drafts with the model `draft`; the params that the loop passes are that model's.

    The state is the draft model's own paged cache. Its first pass of a round reads the last *two*
    committed tokens: after a round in which everything was accepted, the last draft has not been
    read by the draft model yet; otherwise the same keys and values are written once more.
    """
    K = num_speculative_tokens

    def init(params, prefill):
        batch_size, max_seq_len = prefill.tokens_BS.shape
        cache = llama.init_cache(params, draft, batch_size, max_seq_len, prefill.page_size)
        cache, _ = llama.prefill(
            params,
            draft,
            prefill.tokens_BS,
            prefill.length_B - 1,
            cache,
            prefill.chunk_size,
            implementation=implementation,
            role="draft",
        )
        return cache

    def propose(params, cache, context, draw):
        length_B = context.length_B
        cache = kv_cache.reserve(cache, jnp.where(context.active_B, length_B + K - 1, 0))
        last_B2 = length_B[:, None] + jnp.array([-2, -1])
        tokens_BT = jnp.take_along_axis(context.tokens_BS, jnp.maximum(last_B2, 0), axis=1)
        start_B = length_B - 2
        tokens, distributions = [], []
        for i in range(K):
            output = llama.forward(
                params,
                draft,
                tokens_BT,
                start_B,
                cache,
                implementation=implementation,
                role="draft",
            )
            cache = output.cache
            token_B, distribution = draw(
                llama.logits(params, output.hidden_BTD[:, -1:])[:, 0], length_B + i
            )
            tokens.append(token_B)
            distributions.append(distribution)
            tokens_BT, start_B = token_B[:, None], length_B + i
        return chain(tokens, distributions), cache

    def update(params, cache, context, verified, aux_hidden_BTD):
        del params, verified, aux_hidden_BTD
        return kv_cache.release(cache, ~context.active_B)

    return Drafter(K, propose, (), init, update)
