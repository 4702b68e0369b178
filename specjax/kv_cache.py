"""Paged caches: pools of pages on the device, and which page holds which positions of a sequence.

The device never allocates. Pools have P pages of Z positions. A block table, int32 `[B, X]`, names
the page of positions `[x * Z, (x + 1) * Z)` of each sequence; an entry that is not a page of the
pool, such as P or -1, is no page. One table serves every pool that is indexed by position: keys and
values of the target, of a draft model and of an EAGLE head, and the head's features. `in_order`
makes a table for callers that need no allocator; `engine.pages` allocates between calls, and
sequences may then share pages.

No lengths are stored here: those are in `DecodeState.length_B` alone. Positions at or beyond a
sequence's length may hold anything; attention never reads them. Rolling back after a rejection
therefore moves and changes nothing.

On a mesh every data-parallel replica has pools of its own, whose page ids count its own pages: a
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
    """Keys and values of a model: for each layer two pools of P pages with Z positions each.

    Attributes:
      k_PKZH: per layer, the pool of keys after rotary embedding, `[P, K, Z, H]`.
      v_PKZH: per layer, the pool of values, `[P, K, Z, H]`.
    """

    k_PKZH: list[jax.Array]
    v_PKZH: list[jax.Array]

    @property
    def page_size(self) -> int:
        """Z, positions per page."""
        return self.k_PKZH[0].shape[2]

    @property
    def num_pages(self) -> int:
        """P, pages per pool."""
        return self.k_PKZH[0].shape[0]


def pages_for(num_positions: int, page_size: int) -> int:
    """Returns how many pages `num_positions` positions need."""
    return -(-num_positions // page_size)


def init(
    config: LlamaConfig,
    num_pages: int,
    *,
    page_size: int,
    num_kv_heads: int | None = None,
    dtype=jnp.float32,
) -> PagedKVCache:
    """Returns empty pools. `llama.init_cache` makes them for a model on a mesh.

    Args:
      config: configuration of the model.
      num_pages: P.
      page_size: Z.
      num_kv_heads: K of this device's shard; by default all of the model's.
      dtype: dtype of the pools.

    Raises:
      SpecJAXError: for a size that is not positive.
    """
    _check_sizes(num_pages=num_pages, page_size=page_size)
    shape = (num_pages, num_kv_heads or config.num_kv_heads, page_size, config.head_dim)
    return PagedKVCache(
        k_PKZH=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
        v_PKZH=[jnp.zeros(shape, dtype) for _ in range(config.num_layers)],
    )


def in_order(batch_size: int, max_seq_len: int, page_size: int) -> jax.Array:
    """Returns a block table that gives each sequence its pages in order, int32 `[B, X]`.

    The pools need B * X pages; X is what `max_seq_len` positions take.

    Raises:
      SpecJAXError: for a size that is not positive.
    """
    _check_sizes(batch_size=batch_size, max_seq_len=max_seq_len, page_size=page_size)
    pages = batch_size * pages_for(max_seq_len, page_size)
    return jnp.arange(pages, dtype=jnp.int32).reshape(batch_size, -1)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise SpecJAXError(f"{name} must be at least 1, got {value}")


@with_standard_promotion
def locate(
    block_table_BX: jax.Array, positions_BT: jax.Array, page_size: int, num_pages: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the page and the offset in it of each position, int32 `[B, T]`.

    The page is P for positions that no page holds, negative ones among them.
    """
    max_pages = block_table_BX.shape[1]
    index_BT = positions_BT // page_size
    page_BT = jnp.take_along_axis(block_table_BX, jnp.clip(index_BT, 0, max_pages - 1), axis=1)
    is_inside_BT = (positions_BT >= 0) & (index_BT < max_pages)
    # A negative index would count from the end of the pool.
    exists_BT = is_inside_BT & (page_BT >= 0)
    return jnp.where(exists_BT, page_BT, num_pages), positions_BT % page_size


@with_standard_promotion
def write(pool: jax.Array, page_BT: jax.Array, offset_BT: jax.Array, new: jax.Array) -> jax.Array:
    """Writes new entries into a pool.

    `[B, T, K, H]` go into a pool `[P, K, Z, H]`, `[B, T, D]` into `[P, Z, D]`. The update happens
    in place where the pool is donated. Entries whose page is P are dropped.
    """
    return pool.at[page_BT, ..., offset_BT, :].set(new.astype(pool.dtype), mode="drop")


@with_standard_promotion
def read(pool: jax.Array, page_BT: jax.Array, offset_BT: jax.Array) -> jax.Array:
    """Returns entries of a pool, of the shapes that `write` takes; 0 where the page is P."""
    return pool.at[page_BT, ..., offset_BT, :].get(mode="fill", fill_value=0)
