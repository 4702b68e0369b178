"""Paged attention in plain jax.numpy: the reference, and what runs where there is no kernel of our own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row in which everything is masked must not turn into NaN


def paged_attention(q_BTNH, k_pool, v_pool, block_table_BX, start_B, ancestors_BT2=None):
    """See `api.paged_attention`. Cost follows X, the pages that a sequence could have, not those that it has."""
    B = q_BTNH.shape[0]
    P, NKV, Z, H = k_pool.shape
    X = block_table_BX.shape[1]

    def gather(pool):
        # One run of Z x H numbers per (page, kv head), put where the matrix products below want them: no transpose.
        pages_BKX = jnp.clip(block_table_BX, 0, P - 1)[:, None, :]
        return pool[pages_BKX, jnp.arange(NKV)[None, :, None]].reshape(B, NKV, -1, H)

    held_BS = jnp.arange(X * Z) < Z * pages_held(block_table_BX, P)[:, None]
    return attention(q_BTNH, gather(k_pool), gather(v_pool), held_BS, start_B, ancestors_BT2)


def pages_held(block_table_BX, P: int):
    """How many pages each sequence holds: int32 `[B]`, those before the first id that is no page of the pool."""
    X = block_table_BX.shape[1]
    held_BX = (block_table_BX >= 0) & (block_table_BX < P)
    return jnp.where(held_BX, X, jnp.arange(X, dtype=jnp.int32)).min(axis=1)


def attention(q_BTNH, k_BKSH, v_BKSH, held_BS, start_B, ancestors_BT2=None):
    """Attention over contiguous keys and values `[B, NKV, S, H]`, of which the slots `held_BS` exist."""
    B, T, N, H = q_BTNH.shape
    NKV, S = k_BKSH.shape[1:3]
    G = N // NKV
    slot_S = jnp.arange(S)
    written_BS = (slot_S < (start_B + T)[:, None]) & held_BS
    new_B1S = (slot_S - start_B[:, None])[:, None]  # which new token sits in the slot; negative where an older one does
    if ancestors_BT2 is None:
        visible_BTS = new_B1S <= jnp.arange(T)[:, None]
    else:
        word_BTS = jnp.where(new_B1S < 32, ancestors_BT2[..., :1], ancestors_BT2[..., 1:])
        visible_BTS = (new_B1S < 0) | (jax.lax.shift_right_logical(word_BTS, new_B1S & 31) & 1 == 1)
    visible_BTS &= written_BS[:, None]

    q_BKRH = q_BTNH.reshape(B, T, NKV, G, H).transpose(0, 2, 3, 1, 4).reshape(B, NKV, G * T, H)
    scores = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, NKV, G, T, S) * (H**-0.5)
    scores = jnp.where(visible_BTS[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * visible_BTS[:, None, None]
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # 0 * NaN is NaN: values of slots that hold nothing must be zeroed themselves, not only their weights.
    v_BKSH = jnp.where(written_BS[:, None, :, None], v_BKSH, 0)
    out = jnp.einsum("bkrs,bksh->bkrh", weights.reshape(B, NKV, G * T, S).astype(v_BKSH.dtype), v_BKSH,
                     preferred_element_type=jnp.float32)
    return out.reshape(B, NKV, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)
