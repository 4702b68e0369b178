"""Public function of paged attention; the implementations sit beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels import dispatch

# What the Mosaic GPU kernel can do: widths of heads, sizes of pages, query heads per kv head; and
# CUDA's limit on sequences x kv heads.
HEADS, PAGES, MAX_GROUP, MAX_GRID = (64, 128), (16, 32, 64, 128), 16, 65535
MAX_NODES = 64  # new tokens that a row of ancestor bits has room for


def paged_attention(
    q_BTNH: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table_BX: jax.Array,
    start_B: jax.Array,
    *,
    ancestors_BT2: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of T new tokens per sequence over its cached keys and values, causal or along the
    branches of a tree.

    Token t of sequence b sits in position `start_B[b] + t` and attends to positions 0 up to and including
    its own, whose keys and values are already in the pools. With ancestors it attends to all positions
    before `start_B[b]`, and among the new tokens only to those that its bits name, itself not
    excepted. Query head n reads kv head `n // (N / K)`. Scores are scaled by 1 / sqrt(H) and
    accumulated in float32. What lies in later positions, or in pages that the sequence does not hold,
    never reaches the output, NaN included. A token that may attend to nothing (a negative position)
    gives zeros.

    Args:
      q_BTNH: queries after rotary embedding, `[B, T, N, H]`.
      k_pool: keys, `[P, K, Z, H]`.
      v_pool: values, `[P, K, Z, H]`.
      block_table_BX: int32 `[B, X]`, page of positions `[x * Z, (x + 1) * Z)`. The first entry that is
        no page of the pool, like P or -1, ends the sequence's pages. No page belongs to two
        sequences.
      start_B: int32 `[B]`; -1 makes the first token a placeholder.
      ancestors_BT2: int32 `[B, T, 2]` for at most 64 new tokens, see `pack_ancestors`; None for a
        chain.
      implementation: see `dispatch.choose`.

    Returns:
      `[B, T, N, H]` in the dtype of the queries.

    Raises:
      ValueError: shapes that do not fit together, or an implementation that does not exist or
        cannot do this call.
    """
    B, T, N, H = q_BTNH.shape
    K = k_pool.shape[1]
    if (
        k_pool.shape != v_pool.shape
        or k_pool.dtype != v_pool.dtype
        or k_pool.shape[3] != H
        or N % K
    ):
        raise ValueError(
            f"queries {q_BTNH.shape} do not fit pools {k_pool.dtype}{k_pool.shape} and "
            f"{v_pool.dtype}{v_pool.shape}"
        )
    if block_table_BX.shape[0] != B or start_B.shape != (B,):
        raise ValueError(
            f"block table {block_table_BX.shape} and start {start_B.shape} do not fit {B} sequences"
        )
    if ancestors_BT2 is not None and (T > MAX_NODES or ancestors_BT2.shape != (B, T, 2)):
        raise ValueError(
            f"ancestors {ancestors_BT2.shape} do not fit {B} x {T} new tokens (at most {MAX_NODES})"
        )
    chosen = dispatch.module(
        __package__, dispatch.choose(implementation, unsupported(q_BTNH, k_pool))
    )
    return chosen.paged_attention(q_BTNH, k_pool, v_pool, block_table_BX, start_B, ancestors_BT2)


def unsupported(q_BTNH: jax.Array, k_pool: jax.Array) -> str | None:
    """Why the Mosaic GPU kernel cannot do these shapes and dtypes; None where it can. No value is
    read."""
    B, _, N, H = q_BTNH.shape
    K, Z = k_pool.shape[1:3]
    if k_pool.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs keys and values in bfloat16 or float16, and these are {k_pool.dtype}"
    if q_BTNH.dtype != k_pool.dtype:
        return f"it needs queries in the dtype of the pools, {k_pool.dtype}, and these are {q_BTNH.dtype}"
    if H not in HEADS:
        return f"it needs heads of 64 or 128 channels, and these have {H}"
    if Z not in PAGES:
        return f"it needs pages of 16, 32, 64 or 128 positions, and these have {Z}"
    if N // K > MAX_GROUP:
        return f"it needs at most {MAX_GROUP} query heads per kv head, and here are {N // K}"
    if B * K > MAX_GRID:
        return f"it needs at most {MAX_GRID} sequences x kv heads, and here are {B * K}"
    return None


def pack_ancestors(mask_BTT: jax.Array) -> jax.Array:
    """Bits for `paged_attention` from a mask: may new token t (the middle axis) attend to new token
    j (the last)?

    Args:
      mask_BTT: bool `[B, T, T]`.

    Returns:
      int32 `[B, T, 2]`: bit j % 32 of word j // 32.

    Raises:
      ValueError: T is more than 64.
    """
    B, T, _ = mask_BTT.shape
    if T > MAX_NODES:
        raise ValueError(f"ancestor bits have room for {MAX_NODES} new tokens, and here are {T}")
    bits_BTJ = jnp.pad(mask_BTT.astype(jnp.uint32), ((0, 0), (0, 0), (0, MAX_NODES - T)))
    words_BT2 = (bits_BTJ.reshape(B, T, 2, 32) << jnp.arange(32, dtype=jnp.uint32)).sum(
        -1, dtype=jnp.uint32
    )
    return jax.lax.bitcast_convert_type(words_BT2, jnp.int32)
