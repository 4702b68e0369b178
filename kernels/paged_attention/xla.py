"""Paged attention in plain jax.numpy: the reference, and the fallback."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row in which everything is masked must not turn into NaN


def paged_attention(q_BTNH, k_pool, v_pool, block_table_BX, start_B, ancestors_BT2=None):
    """See `api.paged_attention`.

    The cost depends on X, the most pages that a sequence could hold, not on those that it holds.
    """
    B, T, N, H = q_BTNH.shape
    P, K, Z, _ = k_pool.shape
    X = block_table_BX.shape[1]
    held_B = pages_held(block_table_BX, P)
    held_BX = jnp.arange(X) < held_B[:, None]
    held_BS = jnp.arange(X * Z) < Z * held_B[:, None]

    def gathered():
        def gather(pool):
            # One run of Z x H numbers per (page, kv head), in the order of the matrix products
            # below: no transpose.
            pages_BKX = jnp.clip(block_table_BX, 0, P - 1)[:, None, :]
            return pool[pages_BKX, jnp.arange(K)[None, :, None]].reshape(B, K, -1, H)

        return attention(q_BTNH, gather(k_pool), gather(v_pool), held_BS, start_B, ancestors_BT2)

    def in_place():
        return _in_place(q_BTNH, k_pool, v_pool, block_table_BX, held_BX, start_B, ancestors_BT2)

    # On a CPU a gathered copy of the keys and values costs more than the products with few queries.
    # On a GPU reading in place would write the values again, with unwritten positions zeroed.
    if P <= B * X and T * N // K <= H // 2:
        return jax.lax.platform_dependent(cpu=in_place, default=gathered)
    return gathered()


def _in_place(q_BTNH, k_pool, v_pool, block_table_BX, held_BX, start_B, ancestors_BT2):
    """Returns attention that reads every page of the pools once, in place.

    Queries and weights move to the pages, not keys and values to the sequences. This is correct
    because a page belongs to one sequence.
    """
    B, T, N, H = q_BTNH.shape
    P, K, Z, _ = k_pool.shape
    X = block_table_BX.shape[1]
    R = N // K * T
    page_BX = jnp.where(held_BX, block_table_BX, P)
    entry_BX = jnp.arange(B * X, dtype=jnp.int32)
    entry_P = jnp.zeros(P, jnp.int32).at[page_BX.ravel()].set(entry_BX, mode="drop")
    owner_P, x_P = entry_P // X, entry_P % X
    page_BX = jnp.minimum(page_BX, P - 1)

    visible_BTS, _ = _visible(T, jnp.repeat(held_BX, Z, axis=1), start_B, ancestors_BT2)
    q_PKRH = _by_kv_head(q_BTNH, K)[owner_P]
    scores_PKZR = jnp.einsum("pkrh,pkzh->pkzr", q_PKRH, k_pool, preferred_element_type=jnp.float32)
    scores_BKRS = scores_PKZR[page_BX].transpose(0, 2, 4, 1, 3).reshape(B, K, R, X * Z)
    weights_BKRS = _softmax(scores_BKRS, visible_BTS, H)
    weights_BXKRZ = weights_BKRS.reshape(B, K, R, X, Z).transpose(0, 3, 1, 2, 4)
    weights_PKRZ = weights_BXKRZ.reshape(B * X, K, R, Z)[entry_P]
    # 0 * NaN is NaN: the values of unwritten positions must be zeroed too, not only their weights.
    written_PZ = jnp.arange(Z) + (x_P * Z)[:, None] < (start_B + T)[owner_P][:, None]
    v_PKZH = jnp.where(written_PZ[:, None, :, None], v_pool, 0)
    out_PKRH = jnp.einsum(
        "pkrz,pkzh->pkrh",
        weights_PKRZ.astype(v_pool.dtype),
        v_PKZH,
        preferred_element_type=jnp.float32,
    )
    out_BXKRH = jnp.where(held_BX[..., None, None, None], out_PKRH[page_BX], 0)
    # The sum over pages as a product: XLA's CPU compiler (JAX 0.10.2) uses the first row for all
    # where it fuses a sum with the product that follows it.
    rows = out_BXKRH.reshape(B, X, -1)
    out_BKRH = jnp.einsum("bx,bxi->bi", jnp.ones((B, X)), rows, precision="highest")
    return _by_token(out_BKRH.reshape(B, K, R, H), T).astype(q_BTNH.dtype)


def pages_held(block_table_BX, P: int):
    """Returns how many pages each sequence holds, int32 `[B]`.

    These are the pages before the first id that is not a page of the pool.
    """
    X = block_table_BX.shape[1]
    held_BX = (block_table_BX >= 0) & (block_table_BX < P)
    return jnp.where(held_BX, X, jnp.arange(X, dtype=jnp.int32)).min(axis=1)


def attention(q_BTNH, k_BKSH, v_BKSH, held_BS, start_B, ancestors_BT2=None):
    """Returns attention over contiguous keys and values `[B, K, S, H]`.

    `held_BS` are the positions that exist.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    visible_BTS, written_BS = _visible(T, held_BS, start_B, ancestors_BT2)
    q_BKRH = _by_kv_head(q_BTNH, k_BKSH.shape[1])
    scores_BKRS = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH, preferred_element_type=jnp.float32)
    weights_BKRS = _softmax(scores_BKRS, visible_BTS, H)
    v_BKSH = jnp.where(written_BS[:, None, :, None], v_BKSH, 0)  # as above
    out_BKRH = jnp.einsum(
        "bkrs,bksh->bkrh",
        weights_BKRS.astype(v_BKSH.dtype),
        v_BKSH,
        preferred_element_type=jnp.float32,
    )
    return _by_token(out_BKRH, T).astype(q_BTNH.dtype)


def _visible(T: int, held_BS, start_B, ancestors_BT2):
    """Returns which positions each new token attends to and which are written.

    Their shapes are `[B, T, S]` and `[B, S]`.
    """
    position_S = jnp.arange(held_BS.shape[1])
    written_BS = (position_S < (start_B + T)[:, None]) & held_BS
    # The index of the new token at each position; negative for older tokens.
    new_B1S = (position_S - start_B[:, None])[:, None]
    if ancestors_BT2 is None:
        visible_BTS = new_B1S <= jnp.arange(T)[:, None]
    else:
        word_BTS = jnp.where(new_B1S < 32, ancestors_BT2[..., :1], ancestors_BT2[..., 1:])
        visible_BTS = (new_B1S < 0) | (jax.lax.shift_right_logical(word_BTS, new_B1S & 31) & 1 == 1)
    return visible_BTS & written_BS[:, None], written_BS


def _by_kv_head(q_BTNH, K: int):
    """Returns the R = G * T queries of each kv head, `[B, K, R, H]`."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)


def _by_token(out_BKRH, T: int):
    """Returns the inverse of `_by_kv_head`."""
    B, K, R, H = out_BKRH.shape
    out_BTKGH = out_BKRH.reshape(B, K, R // T, T, H).transpose(0, 3, 1, 2, 4)
    return out_BTKGH.reshape(B, T, K * R // T, H)


def _softmax(scores_BKRS, visible_BTS, H: int):
    """Returns weights of the visible positions; all 0 where there are none."""
    B, K, R, S = scores_BKRS.shape
    T = visible_BTS.shape[1]
    visible = visible_BTS[:, None, None]
    scores = jnp.where(visible, scores_BKRS.reshape(B, K, R // T, T, S) * (H**-0.5), MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * visible
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return weights.reshape(B, K, R, S)
