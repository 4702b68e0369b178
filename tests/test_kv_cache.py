"""The page pool: who holds which page, and that none is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kv_cache
from specjax.errors import SpecJAXError
from support.models import tiny

CONFIG = tiny(0).config


def owned(cache) -> list[int]:
    """Pages in block tables, after checking that table and free list together hold every page
    exactly once."""
    P = cache.free_P.shape[0]
    table = np.asarray(cache.block_table_BX)
    pages = table[table < P].tolist()
    free = np.asarray(cache.free_P)[: int(cache.num_free)].tolist()
    assert sorted(pages + free) == list(range(P))
    return pages


def test_a_thousand_short_requests_leave_every_page_free():
    """Random starts, growth and ends of 1,000 requests in 5 rows of a pool that is often nearly
    full."""
    B, Z, max_seq_len = 5, 3, 17
    cache = kv_cache.init(CONFIG, B, max_seq_len, page_size=Z)
    P = int(cache.num_free)

    @jax.jit
    def turn(cache, positions_B, ended_B):
        reserved = kv_cache.reserve(cache, positions_B)
        return reserved, kv_cache.release(reserved, ended_B)

    rng = np.random.default_rng(0)
    length_B, finished, fullest = np.zeros(B, int), 0, 0
    while finished < 1000:
        grown_B = np.minimum(length_B + rng.integers(0, 7, B), max_seq_len)
        ended_B = (rng.random(B) < 0.4) & (grown_B > 0)
        before = np.asarray(cache.block_table_BX)
        # A row that is done asks for nothing, as in the decode loop.
        reserved, cache = turn(cache, grown_B, ended_B)
        table = np.asarray(reserved.block_table_BX)
        assert ((table < P).sum(axis=1) == -(-grown_B // Z)).all()
        assert (table == before)[before < P].all(), "a page moved"
        fullest = max(fullest, len(owned(reserved)))
        owned(cache)
        length_B = np.where(ended_B, 0, grown_B)
        finished += ended_B.sum()
    assert fullest > 0.7 * P
    cache = kv_cache.release(cache, jnp.ones(B, bool))
    assert int(cache.num_free) == P and not owned(cache)


def test_an_empty_free_list_gives_no_page_twice():
    cache = kv_cache.init(CONFIG, 3, 8, page_size=2, num_pages=7)
    cache = kv_cache.reserve(cache, jnp.array([8, 8, 8]))
    assert int(cache.num_free) == 0 and len(owned(cache)) == 7
    assert (np.asarray(cache.block_table_BX) == 7).sum(axis=1).tolist() == [0, 1, 4]
    cache = kv_cache.reserve(
        kv_cache.release(cache, jnp.array([True, False, False])), jnp.array([0, 8, 5])
    )
    assert (np.asarray(cache.block_table_BX) < 7).sum(axis=1).tolist() == [0, 4, 3] and len(
        owned(cache)
    ) == 7


def test_more_positions_than_a_row_can_hold_get_the_pages_there_are():
    cache = kv_cache.reserve(kv_cache.init(CONFIG, 2, 8, page_size=4), jnp.array([100, 1]))
    assert (np.asarray(cache.block_table_BX) < 4).sum(axis=1).tolist() == [2, 1]


def test_releasing_twice_frees_once():
    cache = kv_cache.reserve(kv_cache.init(CONFIG, 2, 8, page_size=4), jnp.array([8, 8]))
    for _ in range(2):
        cache = kv_cache.release(cache, jnp.array([True, False]))
        assert int(cache.num_free) == 2 and len(owned(cache)) == 2


def test_what_is_written_lies_where_locate_says_and_nowhere_else():
    """Positions before 0, beyond the table and in pages not held are dropped: none wraps round to
    another page."""
    cache = kv_cache.reserve(kv_cache.init(CONFIG, 2, 8, page_size=4), jnp.array([5, 3]))
    positions_BT = jnp.array([[-1, 0, 4, 7, 8], [-4, 2, 4, 9, -1]])
    page_BT, offset_BT = kv_cache.locate(cache, positions_BT)
    assert (np.asarray(page_BT) < 4).tolist() == [
        [False, True, True, True, False],
        [False, True, False, False, False],
    ]
    new_BTKH = jnp.arange(1.0, 11)[:, None, None] * jnp.ones(
        (10, CONFIG.num_kv_heads, CONFIG.head_dim)
    )
    new_BTKH = new_BTKH.reshape(2, 5, CONFIG.num_kv_heads, CONFIG.head_dim)
    pool = np.asarray(kv_cache.write(cache.k_PKZH[0], page_BT, offset_BT, new_BTKH))
    table = np.asarray(cache.block_table_BX)
    expected = np.zeros_like(pool)
    expected[table[0, 0], :, 0], expected[table[0, 1], :, 0], expected[table[0, 1], :, 3] = 2, 3, 4
    expected[table[1, 0], :, 2] = 7
    np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(page_size=0), "page_size"),
        (dict(num_pages=0), "num_pages"),
        (dict(batch_size=0), "batch_size"),
        (dict(max_seq_len=0), "max_seq_len"),
    ],
)
def test_sizes_below_one_are_refused_by_name(changes, name):
    sizes = dict(batch_size=1, max_seq_len=4, page_size=2) | changes
    with pytest.raises(SpecJAXError, match=f"{name} must be at least 1, got 0"):
        kv_cache.init(CONFIG, **sizes)
