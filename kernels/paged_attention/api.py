"""Public function of paged attention; the implementations sit beside it."""

from __future__ import annotations

import jax

from specjax.kernels import dispatch
from specjax.kernels.paged_attention import xla


def paged_attention(q_BTNH: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_table_BX: jax.Array,
                    start_B: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Causal attention of T consecutive tokens per sequence over its cached keys and values.

    Token t of sequence b sits in slot `start_B[b] + t` and attends to slots 0 up to and including its own, whose keys
    and values are already in the pools. Query head n reads kv head `n // (N / NKV)`. Scores are scaled by
    1 / sqrt(H) and accumulated in float32. What lies in later slots, or in pages that the sequence does not
    hold, never reaches the output, NaN included. A token that may attend to nothing (a negative slot) gives zeros.

    Args:
      q_BTNH: queries after rotary embedding, `[B, T, N, H]`.
      k_pool: keys, `[P, NKV, Z, H]`.
      v_pool: values, `[P, NKV, Z, H]`.
      block_table_BX: int32 `[B, X]`, page of slots `[x * Z, (x + 1) * Z)`; P where there is none.
      start_B: int32 `[B]`.
      implementation: see `dispatch.choose`.

    Returns:
      `[B, T, N, H]` in the dtype of the queries.

    Raises:
      ValueError: shapes that do not fit together, or an implementation that does not exist.
    """
    B, _, N, H = q_BTNH.shape
    NKV = k_pool.shape[1]
    if k_pool.shape != v_pool.shape or k_pool.shape[3] != H or N % NKV:
        raise ValueError(f"queries {q_BTNH.shape} do not fit pools {k_pool.shape} and {v_pool.shape}")
    if block_table_BX.shape[0] != B or start_B.shape != (B,):
        raise ValueError(f"block table {block_table_BX.shape} and start {start_B.shape} do not fit {B} sequences")
    implementations = {"xla": xla.paged_attention}
    return implementations[dispatch.choose(implementation)](q_BTNH, k_pool, v_pool, block_table_BX, start_B)
