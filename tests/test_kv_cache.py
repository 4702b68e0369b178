"""Pools and block tables: what is written lies where the table says, and nowhere else."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kv_cache
from specjax.errors import SpecJAXError
from support.models import tiny

CONFIG = tiny(0).config
K, H = CONFIG.num_kv_heads, CONFIG.head_dim


def test_a_table_in_order_gives_every_page_to_one_sequence():
    table = np.asarray(kv_cache.in_order(3, 9, 4))
    assert table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and table.dtype == np.int32


@pytest.mark.parametrize("shape", [(K, 4, H), (4, 6)], ids=["keys", "features"])
def test_what_is_written_lies_where_locate_says_and_nowhere_else(shape):
    """Pages in any order. Positions before 0, beyond the table and in pages not held, whichever way
    the table says so, are dropped: none wraps round to another page."""
    table_BX = jnp.array([[2, 0], [3, 4], [-1, 1]])
    positions_BT = jnp.array([[-1, 0, 4, 7, 8], [-4, 2, 4, 9, -1], [0, 3, 4, 12, -8]])
    page_BT, offset_BT = kv_cache.locate(table_BX, positions_BT, 4, 4)
    assert (np.asarray(page_BT) < 4).tolist() == [
        [False, True, True, True, False],
        [False, True, False, False, False],
        [False, False, True, False, False],
    ]
    kept = {(2, 0): 2, (0, 0): 3, (0, 3): 4, (3, 2): 7, (1, 0): 13}
    is_keys = len(shape) == 3
    entry = (shape[0], shape[2]) if is_keys else shape[1:]
    number_BT = jnp.arange(1.0, 16).reshape(3, 5)
    new = jnp.broadcast_to(number_BT.reshape(3, 5, *[1] * len(entry)), (3, 5, *entry))
    pool = kv_cache.write(jnp.zeros((4, *shape)), page_BT, offset_BT, new)
    expected = np.zeros((4, *shape))
    for (page, offset), number in kept.items():
        expected[(page, slice(None), offset) if is_keys else (page, offset)] = number
    np.testing.assert_array_equal(pool, expected)
    # And is read back from there; where there is no page, zeros are.
    numbers = np.where(np.asarray(page_BT) < 4, number_BT, 0)
    got = np.asarray(kv_cache.read(pool, page_BT, offset_BT)).reshape(3, 5, -1)
    np.testing.assert_array_equal(got, np.broadcast_to(numbers[..., None], got.shape))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: kv_cache.init(CONFIG, 1, page_size=0), "page_size"),
        (lambda: kv_cache.init(CONFIG, 0, page_size=2), "num_pages"),
        (lambda: kv_cache.in_order(0, 4, 2), "batch_size"),
        (lambda: kv_cache.in_order(1, 0, 2), "max_seq_len"),
    ],
)
def test_sizes_below_one_are_refused_by_name(make, name):
    with pytest.raises(SpecJAXError, match=f"{name} must be at least 1, got 0"):
        make()
