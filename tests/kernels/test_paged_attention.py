"""Paged attention against dense attention in float64, one class for every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import dispatch
from specjax.kernels.paged_attention import paged_attention

H = 8
ATTENTION = jax.jit(paged_attention, static_argnames="implementation")


def dense(q_BTNH, k_BSKH, v_BSKH, start_B):
    """Every token over the slots up to its own, in float64; zeros for a token in a negative slot."""
    B, T, N, _ = q_BTNH.shape
    group = N // k_BSKH.shape[2]
    out_BTNH = np.zeros(q_BTNH.shape)
    for b in range(B):
        for t in range(T):
            seen = start_B[b] + t + 1
            for n in range(N if seen > 0 else 0):
                scores_S = k_BSKH[b, :seen, n // group].astype(np.float64) @ q_BTNH[b, t, n] / np.sqrt(H)
                weight_S = np.exp(scores_S - scores_S.max())
                out_BTNH[b, t, n] = weight_S / weight_S.sum() @ v_BSKH[b, :seen, n // group].astype(np.float64)
    return out_BTNH


class Case:
    """Queries, and the keys and values of ragged sequences, both dense and in pages that are scattered over a pool.

    Slots that nothing was written to, and pages that no sequence holds, are NaN.
    """

    def __init__(self, starts, T, *, group=2, NKV=2, Z=4, X=6, spare_pages=3, seed=0):
        rng = np.random.default_rng(seed)
        self.start_B = np.array(starts, np.int32)
        B = len(starts)
        P = B * X + spare_pages
        self.q_BTNH = 2 * rng.standard_normal((B, T, group * NKV, H)).astype(np.float32)
        self.k_BSKH, self.v_BSKH = rng.standard_normal((2, B, X * Z, NKV, H)).astype(np.float32)
        self.k_pool, self.v_pool = np.full((2, P, NKV, Z, H), np.nan, np.float32)
        self.block_table_BX = np.full((B, X), P, np.int32)
        pages = iter(rng.permutation(P))
        for b, start in enumerate(starts):
            for slot in range(start + T):
                x, z = divmod(slot, Z)
                if z == 0:
                    self.block_table_BX[b, x] = next(pages)
                self.k_pool[self.block_table_BX[b, x], :, z] = self.k_BSKH[b, slot]
                self.v_pool[self.block_table_BX[b, x], :, z] = self.v_BSKH[b, slot]

    def run(self, implementation, dtype=jnp.float32):
        out = ATTENTION(*(jnp.asarray(x, dtype) for x in (self.q_BTNH, self.k_pool, self.v_pool)), self.block_table_BX,
                        self.start_B, implementation=implementation)
        assert out.dtype == dtype and out.shape == self.q_BTNH.shape
        return np.asarray(out, np.float64)

    def check(self, implementation):
        expected = dense(self.q_BTNH, self.k_BSKH, self.v_BSKH, self.start_B)
        # Far from what zeros, or the output of the token beside, would give: these differ by 0.1 and more.
        np.testing.assert_allclose(self.run(implementation), expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
class TestPagedAttention:
    @pytest.mark.parametrize("T", range(1, 10))
    def test_ragged_starts_around_page_boundaries(self, implementation, T):
        Case([0, 2, 3, 4, 5, 7, 8, 9, 15, -1], T).check(implementation)

    @pytest.mark.parametrize("group", range(1, 10))
    def test_query_heads_share_kv_heads_in_groups(self, implementation, group):
        Case([0, 6, 11, -1], 3, group=group).check(implementation)

    @pytest.mark.parametrize(("Z", "X"), [(1, 24), (2, 9), (3, 7), (16, 2), (32, 1)])
    def test_page_sizes(self, implementation, Z, X):
        Case([0, 1, 7, 14], 4, Z=Z, X=X).check(implementation)

    @pytest.mark.parametrize("NKV", [1, 3])
    def test_numbers_of_kv_heads(self, implementation, NKV):
        Case([5, 0, 12], 2, NKV=NKV, group=3).check(implementation)

    def test_the_table_may_be_full_to_the_last_slot(self, implementation):
        Case([24 - 5, 24 - 5], 5, spare_pages=0).check(implementation)

    def test_a_token_that_sees_nothing_gives_zeros(self, implementation):
        out_BTNH = Case([-1, 4], 2).run(implementation)
        assert (out_BTNH[0, 0] == 0).all() and (out_BTNH[0, 1] != 0).all()

    def test_a_sequence_without_pages_gives_zeros_and_disturbs_nobody(self, implementation):
        case = Case([6, 9, 3], 2)
        expected = case.run(implementation)
        case.block_table_BX[1] = len(case.k_pool)
        out_BTNH = case.run(implementation)
        assert (out_BTNH[1] == 0).all()
        np.testing.assert_array_equal(out_BTNH[[0, 2]], expected[[0, 2]])

    def test_page_minus_one_is_no_page_either(self, implementation):
        """A negative index counts from the end where nobody looks out: it would read the last page."""
        case = Case([6, 9, 3], 2)
        expected = case.run(implementation)
        case.block_table_BX[case.block_table_BX == len(case.k_pool)] = -1
        np.testing.assert_array_equal(case.run(implementation), expected)
        case.k_pool[-1], case.v_pool[-1] = 1, 1
        case.block_table_BX[1] = -1
        assert (case.run(implementation)[1] == 0).all()

    def test_large_scores_do_not_overflow(self, implementation):
        case = Case([3, 10], 3)
        case.q_BTNH *= 1e4
        case.check(implementation)

    def test_bfloat16(self, implementation):
        case = Case([0, 7, 13], 3)
        as_bf16 = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)  # noqa: E731
        expected = dense(*map(as_bf16, (case.q_BTNH, case.k_BSKH, case.v_BSKH)), case.start_B)
        np.testing.assert_allclose(case.run(implementation, jnp.bfloat16), expected, atol=2e-2, rtol=0)

    def test_shapes_that_do_not_fit_are_refused(self, implementation):
        case = Case([0, 7], 2)
        case.k_pool = case.k_pool[..., :4]
        with pytest.raises(ValueError, match="do not fit pools"):
            case.run(implementation)
        case = Case([0, 7], 2)
        case.start_B = case.start_B[:1]
        with pytest.raises(ValueError, match="do not fit 2 sequences"):
            case.run(implementation)


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'vulkan' does not exist; there is: xla"):
        Case([0], 1).run("vulkan")
