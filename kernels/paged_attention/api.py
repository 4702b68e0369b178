"""Public functions of paged attention. The implementations are in this folder."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.kernels import dispatch

# Limits of the Mosaic GPU kernel: widths of heads, sizes of pages, query heads per kv head; and
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
    first_position: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Returns attention of T new tokens per sequence over cached keys and values.

    Attention is causal, or along the branches of a tree. Token t of sequence b has the position
    `start_B[b] + t` and attends to positions `first_position` up to and including its own, whose
    keys and values are already in the pools. With ancestors it attends to all positions before
    `start_B[b]`, and among the new tokens only to those whose bits are set, which must include its
    own to attend to itself. Query head n reads kv head `n // (N / K)`. Scores are scaled by
    1 / sqrt(H) and accumulated in float32. Values at later positions, or in pages that the sequence
    does not hold, never reach the output, NaN included. A token that attends to nothing (a negative
    position) gives zeros.

    Args:
      q_BTNH: queries after rotary embedding, `[B, T, N, H]`.
      k_pool: keys, `[P, K, Z, H]`.
      v_pool: values, `[P, K, Z, H]`.
      block_table_BX: int32 `[B, X]`, page of positions `[x * Z, (x + 1) * Z)`. The first entry
        that is not a page of the pool, such as P or -1, ends the sequence's pages. Sequences may
        share pages: all implementations read the pools through the table alone. X is only a shape;
        a caller may cut the table to the pages in use.
      start_B: int32 `[B]`; -1 makes the first token a placeholder.
      ancestors_BT2: int32 `[B, T, 2]` for at most 64 new tokens, see `pack_ancestors`; None for a
        chain.
      first_position: the first position that is attended to (static), for caches whose first
        entries mean nothing. Their values must be finite.
      implementation: see `dispatch.choose`.

    Returns:
      `[B, T, N, H]` in the dtype of the queries.

    Raises:
      ValueError: for shapes that do not fit together, an unknown implementation, or one that
        cannot run this call.
    """
    _check_pools(q_BTNH, k_pool, v_pool)
    B, T = q_BTNH.shape[:2]
    if block_table_BX.shape[0] != B or start_B.shape != (B,):
        raise ValueError(
            f"block table {block_table_BX.shape} and start {start_B.shape} do not fit {B} sequences"
        )
    if ancestors_BT2 is not None and (T > MAX_NODES or ancestors_BT2.shape != (B, T, 2)):
        raise ValueError(
            f"ancestors {ancestors_BT2.shape} do not fit {B} x {T} new tokens (at most {MAX_NODES})"
        )
    chosen = dispatch.choose(implementation, unsupported(q_BTNH, k_pool))
    attend = dispatch.function(__package__, "paged_attention", chosen)
    return attend(
        q_BTNH,
        k_pool,
        v_pool,
        block_table_BX,
        start_B,
        ancestors_BT2,
        first_position=first_position,
    )


def _check_pools(q_BTNH, k_pool, v_pool) -> None:
    N, H = q_BTNH.shape[2:]
    is_alike = k_pool.shape == v_pool.shape and k_pool.dtype == v_pool.dtype
    if not is_alike or k_pool.shape[3] != H or N % k_pool.shape[1]:
        raise ValueError(
            f"queries {q_BTNH.shape} do not fit pools {k_pool.dtype}{k_pool.shape} and "
            f"{v_pool.dtype}{v_pool.shape}"
        )


def unsupported(q_BTNH: jax.Array, k_pool: jax.Array) -> str | None:
    """Returns why the Mosaic GPU kernel does not support these shapes and dtypes, else None.

    Only shapes and dtypes are read.
    """
    B, _, N, H = q_BTNH.shape
    K, Z = k_pool.shape[1:3]
    if k_pool.dtype not in (jnp.bfloat16, jnp.float16):
        return f"requires keys and values in bfloat16 or float16, got {k_pool.dtype}"
    if q_BTNH.dtype != k_pool.dtype:
        return f"requires queries in the dtype of the pools, {k_pool.dtype}, got {q_BTNH.dtype}"
    if H not in HEADS:
        return f"requires head_dim 64 or 128, got {H}"
    if Z not in PAGES:
        return f"requires page_size 16, 32, 64 or 128, got {Z}"
    if N // K > MAX_GROUP:
        return f"requires at most {MAX_GROUP} query heads per kv head, got {N // K}"
    if B * K > MAX_GRID:
        return f"requires at most {MAX_GRID} sequences x kv heads, got {B * K}"
    return None


def pack_ancestors(mask_BTT: jax.Array) -> jax.Array:
    """Returns the ancestor bits of `paged_attention` for a mask.

    Args:
      mask_BTT: bool `[B, T, T]`, whether a new token (the middle axis) attends to another (the
        last axis).

    Returns:
      int32 `[B, T, 2]`: new token j is bit j % 32 of word j // 32.

    Raises:
      ValueError: if T is more than 64.
    """
    B, T, _ = mask_BTT.shape
    if T > MAX_NODES:
        raise ValueError(f"requires at most {MAX_NODES} new tokens for ancestor bits, got {T}")
    bits = jnp.pad(mask_BTT.astype(jnp.uint32), ((0, 0), (0, 0), (0, MAX_NODES - T)))
    shifted = bits.reshape(B, T, 2, 32) << jnp.arange(32, dtype=jnp.uint32)
    words_BT2 = shifted.sum(-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words_BT2, jnp.int32)
