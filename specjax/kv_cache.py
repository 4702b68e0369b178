"""Paged key/value cache: a pool of pages per layer, and a block table per sequence, on the device.

The cache stores which page holds which positions, but no lengths: those are in
`DecodeState.length_B` alone. Positions at or beyond a sequence's length may hold anything;
attention never reads them. Rolling back after a rejection therefore moves and changes nothing.

On a mesh every data-parallel replica has a cache of its own, whose page ids count its own pages: a
page never leaves the devices of its sequence. The kv heads are split like the model's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax.config import LlamaConfig
from specjax.errors import SpecJAXError
from specjax.lax_utils import with_standard_promotion


@struct.dataclass
class PagedKVCache:
    """Pools of P pages with Z positions each, for B sequences of at most X pages each.

    Attributes:
      k_PKZH: per layer, the pool of keys after rotary embedding, `[P, K, Z, H]`.
      v_PKZH: per layer, the pool of values, `[P, K, Z, H]`.
      block_table_BX: int32, page of positions `[x * Z, (x + 1) * Z)` of a sequence; P where the
        sequence has no page there.
      free_P: int32, a stack of page ids; its first `num_free` entries are the free pages.
    """

    k_PKZH: list[jax.Array]
    v_PKZH: list[jax.Array]
    block_table_BX: jax.Array
    free_P: jax.Array

    @property
    def page_size(self) -> int:
        """Z, positions per page."""
        return self.k_PKZH[0].shape[2]

    @property
    def num_pages(self) -> int:
        """P, pages per pool."""
        return self.free_P.shape[0]

    @property
    def num_free(self) -> jax.Array:
        """Number of free pages, int32 scalar: every other page is in the block table.

        On a mesh this holds inside the loop, where each replica sees its own pages.
        """
        held_BX = self.block_table_BX < self.num_pages
        return self.num_pages - held_BX.sum(dtype=jnp.int32)


def pages_for(num_positions: int, page_size: int) -> int:
    """Returns how many pages `num_positions` positions need."""
    return -(-num_positions // page_size)


def init(
    config: LlamaConfig,
    batch_size: int,
    max_seq_len: int,
    *,
    page_size: int,
    num_pages: int | None = None,
    num_kv_heads: int | None = None,
    dtype=jnp.float32,
) -> PagedKVCache:
    """Returns an empty cache. `llama.init_cache` makes one for a model on a mesh.

    Args:
      config: configuration of the model.
      batch_size: B.
      max_seq_len: most positions that one sequence may use.
      page_size: Z.
      num_pages: P; by default as many as all sequences need at `max_seq_len` each.
      num_kv_heads: K of this device's shard; by default all of the model's.
      dtype: dtype of the pools.

    Raises:
      SpecJAXError: for a size that is not positive.
    """
    max_pages = pages_for(max_seq_len, page_size) if page_size > 0 else 0
    num_pages = batch_size * max_pages if num_pages is None else num_pages
    sizes = dict(
        batch_size=batch_size, max_seq_len=max_seq_len, page_size=page_size, num_pages=num_pages
    )
    for name, value in sizes.items():
        if value < 1:
            raise SpecJAXError(f"{name} must be at least 1, got {value}")
    shape = (num_pages, num_kv_heads or config.num_kv_heads, page_size, config.head_dim)
    return PagedKVCache(
        k_PKZH=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        v_PKZH=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        block_table_BX=jnp.full((batch_size, max_pages), num_pages, jnp.int32),
        free_P=jnp.arange(num_pages, dtype=jnp.int32),
    )


@with_standard_promotion
def reserve(cache: PagedKVCache, length_B: jax.Array) -> PagedKVCache:
    """Gives each sequence pages for its first `length_B` positions.

    Pages that it has stay where they are. A sequence gets at most X pages. When no page is free,
    the last sequences of the batch get fewer pages than they need: their table keeps P there, and
    writes to such positions are dropped. With as many pages as `init` makes by default this cannot
    happen.
    """
    num_pages, num_free = cache.num_pages, cache.num_free
    index_X = jnp.arange(cache.block_table_BX.shape[1])
    wanted_BX = index_X < -(-length_B[:, None] // cache.page_size)
    missing_BX = wanted_BX & (cache.block_table_BX == num_pages)
    rank_BX = _count_up_to(missing_BX)
    granted_BX = missing_BX & (rank_BX <= num_free)
    page_BX = cache.free_P[jnp.clip(num_free - rank_BX, 0, num_pages - 1)]
    return cache.replace(block_table_BX=jnp.where(granted_BX, page_BX, cache.block_table_BX))


@with_standard_promotion
def release(cache: PagedKVCache, rows_B: jax.Array) -> PagedKVCache:
    """Frees all pages of the sequences where `rows_B` (bool) is True."""
    num_pages = cache.num_pages
    freed_BX = rows_B[:, None] & (cache.block_table_BX < num_pages)
    stack_index_BX = cache.num_free + _count_up_to(freed_BX) - 1
    stack_index_BX = jnp.where(freed_BX, stack_index_BX, num_pages)
    return cache.replace(
        block_table_BX=jnp.where(rows_B[:, None], num_pages, cache.block_table_BX),
        free_P=cache.free_P.at[stack_index_BX].set(cache.block_table_BX, mode="drop"),
    )


def _count_up_to(flag_BX):
    """Returns for each entry how many flags are set up to and including it, in row-major order."""
    return jnp.cumsum(flag_BX.ravel(), dtype=jnp.int32).reshape(flag_BX.shape)


@with_standard_promotion
def locate(cache: PagedKVCache, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the page and the offset in it of each position, int32 `[B, T]`.

    The page is P for positions that no page holds, negative ones among them.
    """
    max_pages = cache.block_table_BX.shape[1]
    index_BT = positions_BT // cache.page_size
    page_BT = jnp.take_along_axis(
        cache.block_table_BX, jnp.clip(index_BT, 0, max_pages - 1), axis=1
    )
    exists_BT = (positions_BT >= 0) & (index_BT < max_pages)
    return jnp.where(exists_BT, page_BT, cache.num_pages), positions_BT % cache.page_size


@with_standard_promotion
def write(
    pool: jax.Array, page_BT: jax.Array, offset_BT: jax.Array, new_BTKH: jax.Array
) -> jax.Array:
    """Writes new keys or values `[B, T, K, H]` into a pool `[P, K, Z, H]`.

    The update happens in place where the pool is donated. Entries whose page is P are dropped.
    """
    return pool.at[page_BT, :, offset_BT].set(new_BTKH.astype(pool.dtype), mode="drop")
