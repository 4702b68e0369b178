"""Paged key/value cache: a pool of pages per layer, a block table per sequence, and a free list,
all on the device.

The cache knows nothing of how long a sequence is: that is `DecodeState.length_B`, once. It only
knows which page holds which *positions* (position = absolute position of a token in its sequence). Positions at
or beyond a sequence's length may hold anything at all; attention never lets them through. Rolling
back after a rejection therefore moves and changes nothing.

On a mesh every part of the batch has a cache of its own, whose page ids count its own pages: a page
never leaves the devices of its sequence. The kv heads are split like the model's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError


@struct.dataclass
class PagedKVCache:
    """Pools and their bookkeeping. P pages of Z positions serve B sequences of at most X pages each.

    Attributes:
      k_PKZH: per layer, the pool of keys after rotary embedding, `[P, K, Z, H]`.
      v_PKZH: per layer, values, `[P, K, Z, H]`.
      block_table_BX: int32, page that holds positions `[x * Z, (x + 1) * Z)` of a sequence; P (no such
        page) where none.
      free_P: int32 stack of page ids; its first `num_free_C` entries are the free pages.
      num_free_C: int32 `[1]`, how many; on a mesh the C caches of the parts of the batch have one
        each.
    """

    k_PKZH: list[jax.Array]
    v_PKZH: list[jax.Array]
    block_table_BX: jax.Array
    free_P: jax.Array
    num_free_C: jax.Array

    @property
    def page_size(self) -> int:
        """Z, positions per page."""
        return self.k_PKZH[0].shape[2]


def pages_for(max_seq_len: int, page_size: int) -> int:
    """How many pages `max_seq_len` positions need."""
    return -(-max_seq_len // page_size)


def init(
    cfg: LlamaConfig,
    batch_size: int,
    max_seq_len: int,
    *,
    page_size: int,
    num_pages: int | None = None,
    num_kv_heads: int | None = None,
    dtype=jnp.float32,
) -> PagedKVCache:
    """An empty cache.

    Args:
      cfg: model whose keys and values it holds.
      batch_size: B.
      max_seq_len: most positions that one sequence may use.
      page_size: Z.
      num_pages: P; by default as many as all sequences need at `max_seq_len` each.
      num_kv_heads: of the shard, where kv heads are split; by default all of the model's.
      dtype: of the pools.

    Raises:
      SpecJAXError: a size that is not positive.
    """
    max_pages = pages_for(max_seq_len, page_size) if page_size > 0 else 0
    num_pages = batch_size * max_pages if num_pages is None else num_pages
    for name, value in (
        ("batch_size", batch_size),
        ("max_seq_len", max_seq_len),
        ("page_size", page_size),
        ("num_pages", num_pages),
    ):
        if value < 1:
            raise SpecJAXError(f"{name} must be at least 1, got {value}")
    shape = (num_pages, num_kv_heads or cfg.num_kv_heads, page_size, cfg.head_dim)
    return PagedKVCache(
        k_PKZH=[jnp.zeros(shape, dtype) for _ in range(cfg.num_layers)],
        v_PKZH=[jnp.zeros(shape, dtype) for _ in range(cfg.num_layers)],
        block_table_BX=jnp.full((batch_size, max_pages), num_pages, jnp.int32),
        free_P=jnp.arange(num_pages, dtype=jnp.int32),
        num_free_C=jnp.array([num_pages], jnp.int32),
    )


def reserve(cache: PagedKVCache, positions_B: jax.Array) -> PagedKVCache:
    """Gives each sequence pages for its first `positions_B` positions; those it already has stay where they
    are.

    A sequence that asks for more than X pages gets X. When the free list runs dry, the sequences
    last in the batch get fewer pages than they asked for (their table keeps P there, and what is
    written to such positions is dropped). With as many pages as `init` makes by default this cannot
    happen.
    """
    num_pages = cache.free_P.shape[0]
    max_pages = cache.block_table_BX.shape[1]
    wanted_BX = jnp.arange(max_pages) < -(-positions_B[:, None] // cache.page_size)
    missing_BX = wanted_BX & (cache.block_table_BX == num_pages)
    rank_BX = jnp.cumsum(missing_BX.ravel()).reshape(
        missing_BX.shape
    )  # 1 for the first missing page, and so on
    granted_BX = missing_BX & (rank_BX <= cache.num_free_C[0])
    page_BX = cache.free_P[jnp.clip(cache.num_free_C[0] - rank_BX, 0, num_pages - 1)]
    return cache.replace(
        block_table_BX=jnp.where(granted_BX, page_BX, cache.block_table_BX),
        num_free_C=cache.num_free_C - granted_BX.sum(dtype=jnp.int32),
    )


def release(cache: PagedKVCache, rows_B: jax.Array) -> PagedKVCache:
    """Returns all pages of the sequences where `rows_B` (bool) to the free list."""
    num_pages = cache.free_P.shape[0]
    freed_BX = rows_B[:, None] & (cache.block_table_BX < num_pages)
    rank_BX = jnp.cumsum(freed_BX.ravel()).reshape(freed_BX.shape)
    place_BX = jnp.where(freed_BX, cache.num_free_C[0] + rank_BX - 1, num_pages)
    return cache.replace(
        block_table_BX=jnp.where(rows_B[:, None], num_pages, cache.block_table_BX),
        free_P=cache.free_P.at[place_BX].set(cache.block_table_BX, mode="drop"),
        num_free_C=cache.num_free_C + freed_BX.sum(dtype=jnp.int32),
    )


def locate(cache: PagedKVCache, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each position, int32 `[B, T]`; the page is P for positions that no page holds
    (negative ones too)."""
    num_pages = cache.free_P.shape[0]
    max_pages = cache.block_table_BX.shape[1]
    index_BT = positions_BT // cache.page_size
    page_BT = jnp.take_along_axis(
        cache.block_table_BX, jnp.clip(index_BT, 0, max_pages - 1), axis=1
    )
    held_BT = (positions_BT >= 0) & (index_BT < max_pages)
    return jnp.where(held_BT, page_BT, num_pages), positions_BT % cache.page_size


def write(
    pool: jax.Array, page_BT: jax.Array, offset_BT: jax.Array, new_BTKH: jax.Array
) -> jax.Array:
    """Writes new keys or values `[B, T, K, H]` to their pages and offsets in a pool `[P, K, Z,
    H]`, in place when the pool is donated. Entries whose page is P are dropped."""
    return pool.at[page_BT, :, offset_BT].set(new_BTKH.astype(pool.dtype), mode="drop")
