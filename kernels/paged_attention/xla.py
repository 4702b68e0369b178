"""Paged attention in plain jax.numpy: the reference, and what runs where there is no kernel of our own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row in which everything is masked must not turn into NaN


def paged_attention(q_BTNH, k_pool, v_pool, block_table_BX, start_B):
    """See `api.paged_attention`. Cost follows X, the pages that a sequence could have, not those that it has."""
    B, T, N, H = q_BTNH.shape
    P, NKV, Z, _ = k_pool.shape
    G, S = N // NKV, block_table_BX.shape[1] * Z
    slot_S = jnp.arange(S)
    written_BS = (slot_S < (start_B + T)[:, None]) & jnp.repeat(block_table_BX < P, Z, axis=1)
    visible_BTS = (slot_S <= (start_B[:, None] + jnp.arange(T))[:, :, None]) & written_BS[:, None]

    def gather(pool):
        # One run of Z x H numbers per (page, kv head), put where the matrix products below want them: no transpose.
        pages_BKX = jnp.minimum(block_table_BX, P - 1)[:, None, :]
        return pool[pages_BKX, jnp.arange(NKV)[None, :, None]].reshape(B, NKV, S, H)

    q_BKGTH = q_BTNH.reshape(B, T, NKV, G, H).transpose(0, 2, 3, 1, 4).reshape(B, NKV, G * T, H)
    scores = jnp.einsum("bkrh,bksh->bkrs", q_BKGTH, gather(k_pool), preferred_element_type=jnp.float32)
    scores = scores.reshape(B, NKV, G, T, S) * (H**-0.5)
    scores = jnp.where(visible_BTS[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * visible_BTS[:, None, None]
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # 0 * NaN is NaN: values of slots that hold nothing must be zeroed themselves, not only their weights.
    v_BKSH = jnp.where(written_BS[:, None, :, None], gather(v_pool), 0)
    out = jnp.einsum("bkrs,bksh->bkrh", weights.reshape(B, NKV, G * T, S).astype(v_BKSH.dtype), v_BKSH,
                     preferred_element_type=jnp.float32)
    return out.reshape(B, NKV, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)
