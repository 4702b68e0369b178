"""Paged attention in plain jax.numpy: the reference, and the fallback."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row in which everything is masked must not turn into NaN
# Positions and pages that a CPU reads at a time: a block of keys stays in its second-level cache,
# and each page is an operation in the program.
CPU_BLOCK, CPU_BLOCK_PAGES = 128, 8


def paged_attention(
    q_BTNH, k_pool, v_pool, block_table_BX, start_B, ancestors_BT2=None, *, first_position=0
):
    """See `api.paged_attention`.

    On a CPU the cost depends on the positions that each sequence attends to. Elsewhere it depends
    on X: the pages of a sequence are put side by side, for one product over all of them.
    """
    P, K, Z, H = k_pool.shape
    B, T = q_BTNH.shape[:2]
    end_B = jnp.minimum(start_B + T, Z * pages_held(block_table_BX, P))
    table_BX = jnp.clip(block_table_BX, 0, P - 1)

    def gathered():
        def gather(pool):
            # One run of Z x H numbers per (page, kv head), in the order of the matrix products
            # below: no transpose.
            return pool[table_BX[:, None], jnp.arange(K)[None, :, None]].reshape(B, K, -1, H)

        return attention(
            q_BTNH,
            gather(k_pool),
            gather(v_pool),
            start_B,
            end_B,
            ancestors_BT2,
            first_position=first_position,
        )

    def by_sequence():
        rows = (q_BTNH, table_BX, start_B, end_B, ancestors_BT2)
        one_row_each = jax.tree.map(lambda x: x[:, None], rows)
        attend = functools.partial(_attend_in_blocks, k_pool, v_pool, first_position)
        return jax.lax.map(lambda row: attend(*row), one_row_each)[:, 0]

    # A gathered copy costs a CPU more than the products with few queries, and its time grows with
    # the pages that a sequence could have.
    return jax.lax.platform_dependent(cpu=by_sequence, default=gathered)


def _attend_in_blocks(
    k_pool, v_pool, first_position: int, q_BTNH, table_BX, start_B, end_B, ancestors_BT2
):
    """Returns attention of one sequence (B = 1), block by block of its pages.

    The softmax is that of Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    K, Z, H = k_pool.shape[1:]
    T, X = q_BTNH.shape[1], table_BX.shape[1]
    # Slices of whole pages are copied at the speed of memory, which a gather is not on a CPU. The
    # block does not depend on X, so that the width of the table does not change the rounding.
    block_pages = max(1, min(CPU_BLOCK // Z, CPU_BLOCK_PAGES))
    table_BX = jnp.pad(table_BX, ((0, 0), (0, -X % block_pages)))
    block = block_pages * Z
    q_BKRH = _by_kv_head(q_BTNH, K)

    def add_block(i, carry):
        acc_BKRH, largest_BKR, total_BKR = carry

        def read(pool):
            pages = [table_BX[0, i * block_pages + j] for j in range(block_pages)]
            return jnp.concatenate([pool[page] for page in pages], axis=1)[None]

        position_S = i * block + jnp.arange(block)
        visible_BTS, written_BS = _visible(
            position_S, T, start_B, end_B, ancestors_BT2, first_position
        )
        visible_BKRS = _by_query(visible_BTS, q_BKRH.shape)
        scores_BKRS = _masked_scores(q_BKRH, read(k_pool), visible_BKRS)
        new_largest_BKR = jnp.maximum(largest_BKR, scores_BKRS.max(-1))
        # A block without anything visible adds exact zeros and changes nothing by exact ones.
        weights_BKRS = jnp.exp(scores_BKRS - new_largest_BKR[..., None]) * visible_BKRS
        decay_BKR = jnp.exp(largest_BKR - new_largest_BKR)
        out_BKRH = _weighted_values(weights_BKRS, read(v_pool), written_BS)
        return (
            acc_BKRH * decay_BKR[..., None] + out_BKRH,
            new_largest_BKR,
            total_BKR * decay_BKR + weights_BKRS.sum(-1),
        )

    rows = q_BKRH.shape[:3]
    nothing = (jnp.zeros((*rows, H)), jnp.full(rows, MASKED), jnp.zeros(rows))
    num_blocks = -(-jnp.maximum(end_B[0], 0) // block)
    acc_BKRH, _, total_BKR = jax.lax.fori_loop(0, num_blocks, add_block, nothing)
    out_BKRH = acc_BKRH / jnp.maximum(total_BKR, 1e-30)[..., None]
    return _by_token(out_BKRH, T).astype(q_BTNH.dtype)


def pages_held(block_table_BX, P: int):
    """Returns how many pages each sequence holds, int32 `[B]`.

    These are the pages before the first id that is not a page of the pool.
    """
    X = block_table_BX.shape[1]
    held_BX = (block_table_BX >= 0) & (block_table_BX < P)
    return jnp.where(held_BX, X, jnp.arange(X, dtype=jnp.int32)).min(axis=1)


def attention(
    q_BTNH, k_BKSH, v_BKSH, start_B, end_B, ancestors_BT2=None, *, first_position: int = 0
):
    """Returns attention over contiguous keys and values `[B, K, S, H]`.

    Positions from `end_B` on are not written. For the rest see `api.paged_attention`.
    """
    T = q_BTNH.shape[1]
    position_S = jnp.arange(k_BKSH.shape[2])
    visible_BTS, written_BS = _visible(position_S, T, start_B, end_B, ancestors_BT2, first_position)
    q_BKRH = _by_kv_head(q_BTNH, k_BKSH.shape[1])
    visible_BKRS = _by_query(visible_BTS, q_BKRH.shape)
    scores_BKRS = _masked_scores(q_BKRH, k_BKSH, visible_BKRS)
    weights_BKRS = jnp.exp(scores_BKRS - scores_BKRS.max(-1, keepdims=True)) * visible_BKRS
    weights_BKRS /= jnp.maximum(weights_BKRS.sum(-1, keepdims=True), 1e-30)
    out_BKRH = _weighted_values(weights_BKRS, v_BKSH, written_BS)
    return _by_token(out_BKRH, T).astype(q_BTNH.dtype)


def _visible(position_S, T: int, start_B, end_B, ancestors_BT2, first_position: int):
    """Returns which positions each new token attends to and which are written.

    Their shapes are `[B, T, S]` and `[B, S]`.
    """
    written_BS = position_S < end_B[:, None]
    if first_position:
        written_BS &= position_S >= first_position
    # The index of the new token at each position; negative for older tokens.
    new_B1S = (position_S - start_B[:, None])[:, None]
    if ancestors_BT2 is None:
        visible_BTS = new_B1S <= jnp.arange(T)[:, None]
    else:
        word_BTS = jnp.where(new_B1S < 32, ancestors_BT2[..., :1], ancestors_BT2[..., 1:])
        visible_BTS = (new_B1S < 0) | (jax.lax.shift_right_logical(word_BTS, new_B1S & 31) & 1 == 1)
    return visible_BTS & written_BS[:, None], written_BS


def _masked_scores(q_BKRH, k_BKSH, visible_BKRS):
    scores_BKRS = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH, preferred_element_type=jnp.float32)
    return jnp.where(visible_BKRS, scores_BKRS * q_BKRH.shape[-1] ** -0.5, MASKED)


def _weighted_values(weights_BKRS, v_BKSH, written_BS):
    # 0 * NaN is NaN: the values of unwritten positions must be zeroed too, not only their weights.
    v_BKSH = jnp.where(written_BS[:, None, :, None], v_BKSH, 0)
    return jnp.einsum(
        "bkrs,bksh->bkrh",
        weights_BKRS.astype(v_BKSH.dtype),
        v_BKSH,
        preferred_element_type=jnp.float32,
    )


def _by_query(visible_BTS, q_shape: tuple[int, ...]):
    """Returns visibility for the R = G * T queries of a kv head, `[B, 1, R, S]`."""
    B, T, S = visible_BTS.shape
    G = q_shape[2] // T
    return jnp.broadcast_to(visible_BTS[:, None, None], (B, 1, G, T, S)).reshape(B, 1, G * T, S)


def _by_kv_head(q_BTNH, K: int):
    """Returns the R = G * T queries of each kv head, `[B, K, R, H]`."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)


def _by_token(out_BKRH, T: int):
    """Returns the inverse of `_by_kv_head`."""
    B, K, R, H = out_BKRH.shape
    out_BTKGH = out_BKRH.reshape(B, K, R // T, T, H).transpose(0, 3, 1, 2, 4)
    return out_BTKGH.reshape(B, T, K * R // T, H)
