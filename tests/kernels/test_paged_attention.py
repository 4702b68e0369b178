"""Paged attention of every implementation, compared with dense attention in float64.

The Mosaic GPU kernel runs on the CPU, in Pallas' interpreter with its race detector.
"""

import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch
from specjax.kernels.paged_attention import (
    mosaic_gpu,
    pack_ancestors,
    paged_attention,
    unsupported,
)
from support.attention import CASES, Case

if jax.__version_info__ >= (0, 11):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

needs_interpreter = pytest.mark.skipif(
    dispatch.missing_interpreter() is not None, reason=str(dispatch.missing_interpreter())
)
# tests/gpu runs the same cases on a GPU.
IMPLEMENTATIONS = ["xla", pytest.param("interpret", marks=needs_interpreter)]


@pytest.fixture(autouse=True)
def read_operands(monkeypatch):
    """Reports the reads of wgmma to the race detector, which does not see them."""

    def wgmma(acc, a, b, multiply=plgpu.wgmma):
        a[...], b[...]
        # wgmma reads through the async proxy, as TMA writes do; the reads above do not.
        plgpu.commit_smem()
        multiply(acc, a, b)

    monkeypatch.setattr(plgpu, "wgmma", wgmma)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestEveryImplementation:
    @pytest.mark.parametrize("name", CASES)
    def test_case(self, implementation, name):
        CASES[name].check(implementation)

    def test_a_sequence_without_pages_gives_zeros_and_changes_no_other(self, implementation):
        case = Case([6, 9, 3], 2, G=6, K=1, H=64, Z=16, X=1, dtype="bfloat16")
        case.block_table_BX[1] = -1  # without a check of the id, this would read the last page
        case.k_pool[-1], case.v_pool[-1] = 1, 1
        out_BTNH = case.run(implementation)
        assert (out_BTNH[1] == 0).all()
        assert not case.wrong(out_BTNH)[[0, 2]].any()

    def test_large_scores_do_not_overflow(self, implementation):
        case = Case([30], 2, G=5, K=1, H=64, Z=16, dtype="bfloat16")
        case.q_BTNH *= 2.0**13
        case.check(implementation)


@pytest.mark.parametrize("name", CASES)
def test_the_comparison_rejects_zeros_and_shifted_outputs(name):
    """Every head of every token is wrong, so that no error of an index can pass."""
    case = CASES[name]
    expected_BTNH, size_BTNH = case.expected
    assert case.wrong(np.zeros_like(expected_BTNH)).any(-1)[size_BTNH.any(-1)].all()
    # Heads that attend to a single position have equal outputs: its value.
    several_BTN = ~np.isclose(size_BTNH, abs(expected_BTNH)).all(-1)
    assert several_BTN.any()
    for axis in range(4):
        if expected_BTNH.shape[axis] > 1:
            assert case.wrong(np.roll(expected_BTNH, 1, axis)).any(-1)[several_BTN].all()


# In the order of the kernel's source; two occur again in the loop over masked blocks.
WAITS = ["consumed", "queries", "keys", "values", "keys, masked", "values, masked", "zeroed"]
# Four blocks, two consumers; the sequence ends within a block.
CONTROL = Case([198], 5, G=16, K=1, H=64, Z=64, dtype="bfloat16")


@needs_interpreter
class TestRacesAreFound:
    @pytest.fixture(autouse=True)
    def two_stages(self, monkeypatch):
        """Two stages, so that four blocks use each twice; resets the interpreter after a
        failure."""
        monkeypatch.setattr(mosaic_gpu, "STAGES", 2)
        yield
        gpu_callbacks.reset_gpu_interpret_mode_state()

    def remove_wait(self, monkeypatch, removed):
        """Removes one wait from the kernel, by its number; returns the list of all waits met."""
        found = []

        def barrier_wait(barrier, wait=plgpu.barrier_wait):
            found.append(barrier)
            if len(found) - 1 != removed:
                wait(barrier)

        monkeypatch.setattr(plgpu, "barrier_wait", barrier_wait)
        return found

    def test_the_kernel_has_no_race(self, monkeypatch):
        found = self.remove_wait(monkeypatch, None)
        CONTROL.check("interpret")
        assert len(found) == len(WAITS)

    @pytest.mark.parametrize("removed", range(len(WAITS)), ids=WAITS)
    def test_a_missing_wait_is_a_race(self, monkeypatch, removed):
        self.remove_wait(monkeypatch, removed)
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
            CONTROL.check("interpret")


class TestXLA:
    """Many cases, since they are fast; float32 makes the comparison tight."""

    @pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
    @pytest.mark.parametrize("T", range(1, 10))
    def test_ragged_starts_around_page_boundaries(self, T, tree):
        Case([0, 2, 3, 4, 5, 7, 8, 9, 15, -1], T, tree=tree).check("xla")

    @pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
    @pytest.mark.parametrize("T", [1, 2, 5, 20])
    def test_several_blocks(self, T, tree):
        """Of 8 pages of 4 positions, and the last one of fewer; ends on and around their edges."""
        Case([0, 7, 30, 31, 32, 33, 62, 63, 64, 65, -1], T, X=23, tree=tree).check("xla")

    @pytest.mark.parametrize("first_position", [1, 6])
    def test_nothing_attends_to_positions_before_the_first(self, first_position):
        Case([-1, 0, 1, 4, 5, 6, 7, 33, 70], 3, X=20, first_position=first_position).check("xla")

    def test_a_row_has_the_same_bits_beside_longer_ones_and_in_a_wider_table(self):
        """Blocks in which nothing is visible change nothing at all."""
        case = Case([2, 31, 9, 90], 3, X=25)
        together = case.run("xla")
        for row in range(3):
            alone = Case([0], 3, X=25)
            alone.q_BTNH, alone.start_B = case.q_BTNH[row : row + 1], case.start_B[row : row + 1]
            alone.k_pool, alone.v_pool = case.k_pool, case.v_pool
            alone.block_table_BX = case.block_table_BX[row : row + 1, : [2, 9, 25][row]]
            np.testing.assert_array_equal(alone.run("xla")[0], together[row])

    def test_sequences_may_share_pages(self):
        """The first two pages of one are those of another; its own are not read."""
        case = Case([9, 13, 11], 3, spare_pages=0)
        own = case.block_table_BX[1, :2].copy()
        case.block_table_BX[1, :2] = case.block_table_BX[0, :2]
        case.k_pool[own], case.v_pool[own] = np.nan, np.nan
        case.k_BSKH[1, :8], case.v_BSKH[1, :8] = case.k_BSKH[0, :8], case.v_BSKH[0, :8]
        case.check("xla")

    @pytest.mark.parametrize("G", range(1, 10))
    def test_query_heads_share_kv_heads_in_groups(self, G):
        Case([0, 6, 11, -1], 3, G=G).check("xla")

    @pytest.mark.parametrize(("Z", "X"), [(1, 24), (2, 9), (3, 7), (16, 2), (32, 1)])
    def test_page_sizes(self, Z, X):
        Case([0, 1, 7, 14], 4, Z=Z, X=X).check("xla")

    @pytest.mark.parametrize("K", [1, 3])
    def test_numbers_of_kv_heads(self, K):
        Case([5, 0, 12], 2, K=K, G=3).check("xla")

    def test_a_full_block_table(self):
        Case([24 - 5, 24 - 5], 5, spare_pages=0).check("xla")

    def test_a_tree_of_33_uses_the_second_word(self):
        case = Case([2, -1], 33, X=9, tree=True)
        case.seen_BTT[:, 32, 31:] = True
        case.check("xla")
        case.seen_BTT[:, 32, :32] = False
        del case.expected
        case.check("xla")


def test_ancestors_of_a_chain_are_causal():
    case = Case([3, 20], 3, tree=True)
    case.seen_BTT = np.broadcast_to(np.tri(3, dtype=bool), (2, 3, 3))
    with_bits = case.run("xla")
    case.tree = False
    np.testing.assert_array_equal(with_bits, case.run("xla"))


def test_bits_of_ancestors():
    mask_BTT = np.zeros((1, 64, 64), bool)
    mask_BTT[0, 0, [0, 31]] = True
    mask_BTT[0, 1, [32, 34, 63]] = True
    words_BT2 = np.asarray(pack_ancestors(mask_BTT)).view(np.uint32)
    assert words_BT2[0, :3].tolist() == [[1 + 2**31, 0], [0, 1 + 4 + 2**31], [0, 0]]
    with pytest.raises(
        ValueError, match="requires at most 64 new tokens for ancestor bits, got 65"
    ):
        pack_ancestors(np.zeros((1, 65, 65), bool))


def test_inconsistent_shapes_are_rejected():
    case = Case([0, 7], 2)
    case.k_pool = case.k_pool[..., :4]
    with pytest.raises(ValueError, match="do not fit pools"):
        case.run("xla")
    case = Case([0, 7], 2)
    case.start_B = case.start_B[:1]
    with pytest.raises(ValueError, match="do not fit 2 sequences"):
        case.run("xla")
    case = Case([0, 7], 2, tree=True)
    case.seen_BTT = case.seen_BTT[:, :1, :1]
    with pytest.raises(ValueError, match=r"ancestors \(2, 1, 2\) do not fit 2 x 2 new tokens"):
        case.run("xla")


def test_an_unknown_implementation_is_rejected():
    with pytest.raises(ValueError, match="implementation 'vulkan'; choose from mosaic_gpu, xla"):
        Case([0], 1).run("vulkan")


def trace(implementation, **options):
    """The traced program for a GPU that is absent."""
    case = Case([0], 1, **{"H": 64, "Z": 16, "X": 1, "dtype": "bfloat16", **options})
    with dispatch.compiling_for(dispatch.HOPPER):
        return jax.make_jaxpr(functools.partial(paged_attention, implementation=implementation))(
            *case.arguments()[0]
        )


UNSUPPORTED = [
    (dict(dtype="float32"), "keys and values in bfloat16 or float16, got float32"),
    (dict(H=96), "head_dim 64 or 128, got 96"),
    (dict(Z=8), "page_size 16, 32, 64 or 128, got 8"),
    (dict(G=17, K=1), "at most 16 query heads per kv head, got 17"),
]


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_on_a_gpu_the_kernel_runs(implementation):
    assert "barrier_wait" in str(trace(implementation))


@pytest.mark.parametrize(("options", "reason"), UNSUPPORTED)
def test_unsupported_arguments_are_an_error_or_run_on_xla(options, reason):
    with pytest.raises(ValueError, match=f"cannot run here: requires {reason}"):
        trace("mosaic_gpu", **options)
    assert "barrier_wait" not in str(trace(None, **options))


def test_queries_of_another_dtype_are_unsupported():
    q, pool = (
        jax.ShapeDtypeStruct((1, 1, 2, 64), "float32"),
        jax.ShapeDtypeStruct((1, 1, 16, 64), "bfloat16"),
    )
    reason = "requires queries in the dtype of the pools, bfloat16, got float32"
    assert unsupported(q, pool) == reason


@pytest.mark.parametrize(
    ("num_ctas", "max_seq_len", "splits"),
    [
        (512, 32768, 1),  # a batch of 64 with 8 kv heads fills the GPU by itself
        (8, 512, 2),  # a short context has few splits
        (8, 8192, 14),  # 112 CTAs for 132 SMs
        (2, 131072, 57),
        (100, 8192, 1),  # 200 CTAs would take two waves of half the time
        (70, 8192, 3),  # 210 take two waves of a third
    ],
)
def test_splits_fill_the_gpu(num_ctas, max_seq_len, splits):
    assert mosaic_gpu.num_splits_for(num_ctas, max_seq_len, num_sms=132) == splits
