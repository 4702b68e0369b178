"""Paged attention against dense attention in float64: one class of cases, run for every
implementation.

The Mosaic kernel runs on the CPU, in Pallas' interpreter for GPUs with its race detector on.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch
from specjax.kernels.paged_attention import (
    mosaic_gpu,
    pack_ancestors,
    paged_attention,
    unsupported,
    xla,
)

ATTENTION = jax.jit(paged_attention, static_argnames="implementation")

if jax.__version_info__ >= (0, 11):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX before 0.11 (that is, on Python 3.11) has no interpreter for Mosaic GPU kernels",
)
IMPLEMENTATIONS = [
    pytest.param(name, marks=needs_interpreter if name == "mosaic_gpu" else ())
    for name in dispatch.IMPLEMENTATIONS
]


@dataclasses.dataclass
class Case:
    """Queries, and the keys and values of ragged sequences, both dense and in pages that are
    scattered over a pool.

    Positions that nothing was written to, and pages that no sequence holds, are NaN.
    """

    starts: list[int]
    T: int
    G: int = 2
    K: int = 2
    H: int = 8
    Z: int = 4
    X: int = 6
    tree: bool = False  # random ancestors
    dtype: str = "float32"
    splits: int | None = None  # of the Mosaic kernel
    spare_pages: int = 3
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.start_B = np.array(self.starts, np.int32)
        B, P = len(self.starts), len(self.starts) * self.X + self.spare_pages

        def normal(*shape):  # as the dtype has it: the reference sees the very same numbers
            return np.asarray(jnp.asarray(rng.standard_normal(shape), self.dtype), np.float64)

        self.q_BTNH = 2 * normal(B, self.T, self.G * self.K, self.H)
        self.k_BSKH, self.v_BSKH = normal(2, B, self.X * self.Z, self.K, self.H)
        self.k_pool, self.v_pool = np.full((2, P, self.K, self.Z, self.H), np.nan)
        self.block_table_BX = np.full((B, self.X), P, np.int32)
        pages = iter(rng.permutation(P))
        for b, start in enumerate(self.starts):
            for position in range(start + self.T):
                x, z = divmod(position, self.Z)
                if z == 0:
                    self.block_table_BX[b, x] = next(pages)
                self.k_pool[self.block_table_BX[b, x], :, z] = self.k_BSKH[b, position]
                self.v_pool[self.block_table_BX[b, x], :, z] = self.v_BSKH[b, position]
        self.seen_BTJ = np.broadcast_to(np.tri(self.T, dtype=bool), (B, self.T, self.T))
        if self.tree:
            self.seen_BTJ = np.tril(rng.random((B, self.T, self.T)) < 0.3) | np.eye(
                self.T, dtype=bool
            )

    def arguments(self):
        arrays = [jnp.asarray(x, self.dtype) for x in (self.q_BTNH, self.k_pool, self.v_pool)]
        arrays += [jnp.asarray(self.block_table_BX), jnp.asarray(self.start_B)]
        return arrays, pack_ancestors(jnp.asarray(self.seen_BTJ)) if self.tree else None

    def run(self, implementation):
        arrays, ancestors_BT2 = self.arguments()
        if implementation == "mosaic_gpu":
            interpret = InterpretGPUParams(detect_races=True)
            out = mosaic_gpu.paged_attention(
                *arrays, ancestors_BT2, interpret=interpret, num_splits=self.splits
            )
            out.block_until_ready()
            assert not gpu_callbacks.get_races().races_found
        else:
            out = ATTENTION(*arrays, ancestors_BT2=ancestors_BT2, implementation=implementation)
        assert out.dtype == self.dtype and out.shape == self.q_BTNH.shape
        return np.asarray(out, np.float64)

    @functools.cached_property
    def expected(self):
        """Dense attention, and the same over the magnitudes of the values."""
        out_BTNH, size_BTNH = np.zeros((2, *self.q_BTNH.shape))
        for b, t, n in np.ndindex(self.q_BTNH.shape[:3]):
            before = max(self.start_B[b], 0)
            new_J = [self.start_B[b] + j for j in range(self.T) if self.seen_BTJ[b, t, j]]
            seen = [*range(before), *(position for position in new_J if position >= 0)]
            if seen:
                scores_S = (
                    self.k_BSKH[b, seen, n // self.G] @ self.q_BTNH[b, t, n] / np.sqrt(self.H)
                )
                weight_S = np.exp(scores_S - scores_S.max())
                v_SH = self.v_BSKH[b, seen, n // self.G]
                out_BTNH[b, t, n] = weight_S / weight_S.sum() @ v_SH
                size_BTNH[b, t, n] = weight_S / weight_S.sum() @ abs(v_SH)
        return out_BTNH, size_BTNH

    def wrong(self, out_BTNH):
        """Which numbers are further off than rounding explains.

        Two roundings to the dtype are allowed, each to the nearest: of the weights, which moves the
          sum of weighted
        values by that part of the sum of their magnitudes at most, and of the output. Products are
        exact in float32; 3e-6 is for its sums.
        """
        expected_BTNH, size_BTNH = self.expected
        tolerance_BTNH = float(jnp.finfo(self.dtype).eps) * size_BTNH + 3e-6
        return ~(abs(out_BTNH - expected_BTNH) <= tolerance_BTNH)

    def check(self, implementation):
        wrong_BTNH = self.wrong(self.run(implementation))
        assert not wrong_BTNH.any(), (
            f"{wrong_BTNH.mean():.1%} wrong, at {np.argwhere(wrong_BTNH)[:5].tolist()}"
        )


# What the kernel for GPUs can do; few and rich, for its interpreter is slow. A block is 64 positions, a
# tile 64 rows.
CASES = {
    "ragged": Case([-1, 13, 63, 64], 2, G=1, H=64, Z=16, X=5, dtype="bfloat16"),
    "tree, splits without work": Case(
        [3, 150], 5, G=9, K=1, H=64, Z=32, tree=True, dtype="bfloat16", splits=3
    ),
    "tree of 64": Case([10, 97], 64, K=1, H=128, Z=64, X=3, tree=True, dtype="bfloat16"),
    "tree, tiles that are not full": Case(
        [-1, 40], 9, G=16, K=1, H=64, Z=32, tree=True, dtype="bfloat16"
    ),
    "chunk": Case([0, 70], 128, G=3, K=1, H=64, Z=128, X=2, dtype="bfloat16"),
    "float16": Case([130, 5, -1], 3, G=8, K=1, H=128, Z=16, X=9, dtype="float16", splits=2),
    "more blocks than stages": Case([390], 1, G=4, K=1, H=64, Z=64, X=7, dtype="bfloat16"),
    "groups of 7": Case([16], 1, G=7, K=1, H=64, Z=16, dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def read_operands(monkeypatch):
    """Makes the interpreter's race detector look at what wgmma reads, which by itself it doesn't."""

    def wgmma(acc, a, b, multiply=plgpu.wgmma):
        a[...], b[...]
        plgpu.commit_smem()  # wgmma reads through the async proxy, as TMA writes, but what stands here doesn't
        multiply(acc, a, b)

    monkeypatch.setattr(plgpu, "wgmma", wgmma)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestEveryImplementation:
    @pytest.mark.parametrize("name", CASES)
    def test_case(self, implementation, name):
        CASES[name].check(implementation)

    def test_a_sequence_without_pages_gives_zeros_and_disturbs_nobody(self, implementation):
        case = Case([6, 9, 3], 2, G=6, K=1, H=64, Z=16, X=1, dtype="bfloat16")
        case.block_table_BX[1] = -1  # would read the last page where nobody looks out
        case.k_pool[-1], case.v_pool[-1] = 1, 1
        out_BTNH = case.run(implementation)
        assert (out_BTNH[1] == 0).all()
        assert not case.wrong(out_BTNH)[[0, 2]].any()

    def test_large_scores_do_not_overflow(self, implementation):
        case = Case([30], 2, G=5, K=1, H=64, Z=16, dtype="bfloat16")
        case.q_BTNH *= 2.0**13
        case.check(implementation)


@pytest.mark.parametrize("name", CASES)
def test_zeros_and_shifted_outputs_are_found_wrong(name):
    """In every single head of every token, so that no mistake in indices can hide."""
    case = CASES[name]
    expected_BTNH, size_BTNH = case.expected
    assert case.wrong(np.zeros_like(expected_BTNH)).any(-1)[size_BTNH.any(-1)].all()
    # Heads that see one and the same position give the same: its value.
    several_BTN = ~np.isclose(size_BTNH, abs(expected_BTNH)).all(-1)
    assert several_BTN.any()
    for axis in range(4):
        if expected_BTNH.shape[axis] > 1:
            assert case.wrong(np.roll(expected_BTNH, 1, axis)).any(-1)[several_BTN].all()


# In the order in which the kernel's source has them; two of them once more in the loop over masked
# blocks.
WAITS = ["consumed", "queries", "keys", "values", "keys, masked", "values, masked", "zeroed"]
CONTROL = Case(
    [198], 5, G=16, K=1, H=64, Z=64, dtype="bfloat16"
)  # four blocks, two consumers, an end inside a block


@needs_interpreter
class TestRacesAreFound:
    @pytest.fixture(autouse=True)
    def two_stages(self, monkeypatch):
        """So that four blocks need them twice; and leaves no state of a failed run behind."""
        monkeypatch.setattr(mosaic_gpu, "STAGES", 2)
        yield
        gpu_callbacks.reset_gpu_interpret_mode_state()

    def remove_wait(self, monkeypatch, removed):
        """Takes the wait with this number out of the kernel; returns the list of those that it came
        upon."""
        found = []

        def barrier_wait(barrier, wait=plgpu.barrier_wait):
            found.append(barrier)
            if len(found) - 1 != removed:
                wait(barrier)

        monkeypatch.setattr(plgpu, "barrier_wait", barrier_wait)
        return found

    def test_none_in_the_kernel_as_it_is(self, monkeypatch):
        found = self.remove_wait(monkeypatch, None)
        CONTROL.check("mosaic_gpu")
        assert len(found) == len(WAITS)

    @pytest.mark.parametrize("removed", range(len(WAITS)), ids=WAITS)
    def test_where_a_wait_is_missing(self, monkeypatch, removed):
        self.remove_wait(monkeypatch, removed)
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
            CONTROL.check("mosaic_gpu")


class TestXLA:
    """Cheap enough for many cases: in float32 they are tight."""

    @pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
    @pytest.mark.parametrize("T", range(1, 10))
    def test_ragged_starts_around_page_boundaries(self, T, tree):
        Case([0, 2, 3, 4, 5, 7, 8, 9, 15, -1], T, tree=tree).check("xla")

    @pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
    @pytest.mark.parametrize("T", [1, 2, 3, 5, 8])
    def test_few_queries_go_to_the_pages(self, monkeypatch, T, tree):
        """With no more pages than the sequences could fill, and wide heads, nothing is gathered on
        a CPU."""
        taken = mock.Mock(wraps=xla._in_place)
        monkeypatch.setattr(xla, "_in_place", taken)
        Case([0, 2, 3, 4, 5, 7, 8, 9, 15, -1], T, H=40, tree=tree, spare_pages=0).check("xla")
        assert taken.called

    @pytest.mark.parametrize("G", range(1, 10))
    def test_query_heads_share_kv_heads_in_groups(self, G):
        Case([0, 6, 11, -1], 3, G=G).check("xla")

    @pytest.mark.parametrize(("Z", "X"), [(1, 24), (2, 9), (3, 7), (16, 2), (32, 1)])
    def test_page_sizes(self, Z, X):
        Case([0, 1, 7, 14], 4, Z=Z, X=X).check("xla")

    @pytest.mark.parametrize("K", [1, 3])
    def test_numbers_of_kv_heads(self, K):
        Case([5, 0, 12], 2, K=K, G=3).check("xla")

    def test_the_table_may_be_full_to_the_last_position(self):
        Case([24 - 5, 24 - 5], 5, spare_pages=0).check("xla")

    def test_a_tree_of_33_needs_its_second_word(self):
        case = Case([2, -1], 33, X=9, tree=True)
        case.seen_BTJ[:, 32, 31:] = True
        case.check("xla")
        case.seen_BTJ[:, 32, :32] = False
        del case.expected
        case.check("xla")


def test_ancestors_of_a_chain_are_causal():
    case = Case([3, 20], 3, tree=True)
    case.seen_BTJ = np.broadcast_to(np.tri(3, dtype=bool), (2, 3, 3))
    with_bits = case.run("xla")
    case.tree = False
    np.testing.assert_array_equal(with_bits, case.run("xla"))


def test_bits_of_ancestors():
    mask_BTT = np.zeros((1, 64, 64), bool)
    mask_BTT[0, 0, [0, 31]] = True
    mask_BTT[0, 1, [32, 34, 63]] = True
    words_BT2 = np.asarray(pack_ancestors(mask_BTT)).view(np.uint32)
    assert words_BT2[0, :3].tolist() == [[1 + 2**31, 0], [0, 1 + 4 + 2**31], [0, 0]]
    with pytest.raises(ValueError, match="room for 64 new tokens, and here are 65"):
        pack_ancestors(np.zeros((1, 65, 65), bool))


def test_shapes_that_do_not_fit_are_refused():
    case = Case([0, 7], 2)
    case.k_pool = case.k_pool[..., :4]
    with pytest.raises(ValueError, match="do not fit pools"):
        case.run("xla")
    case = Case([0, 7], 2)
    case.start_B = case.start_B[:1]
    with pytest.raises(ValueError, match="do not fit 2 sequences"):
        case.run("xla")
    case = Case([0, 7], 2, tree=True)
    case.seen_BTJ = case.seen_BTJ[:, :1, :1]
    with pytest.raises(ValueError, match=r"ancestors \(2, 1, 2\) do not fit 2 x 2 new tokens"):
        case.run("xla")


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'vulkan' does not exist; there is: mosaic_gpu, xla"):
        Case([0], 1).run("vulkan")


def trace(implementation, **options):
    """The traced program for a GPU that is absent."""
    case = Case([0], 1, **{"H": 64, "Z": 16, "X": 1, "dtype": "bfloat16", **options})
    with dispatch.compiling_for(dispatch.HOPPER):
        return jax.make_jaxpr(functools.partial(paged_attention, implementation=implementation))(
            *case.arguments()[0]
        )


UNSUPPORTED = [
    (dict(dtype="float32"), "keys and values in bfloat16 or float16, and these are float32"),
    (dict(H=96), "heads of 64 or 128 channels, and these have 96"),
    (dict(Z=8), "pages of 16, 32, 64 or 128 positions, and these have 8"),
    (dict(G=17, K=1), "at most 16 query heads per kv head, and here are 17"),
]


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_on_a_gpu_the_kernel_runs(implementation):
    assert "barrier_wait" in str(trace(implementation))


@pytest.mark.parametrize(("options", "reason"), UNSUPPORTED)
def test_what_the_kernel_cannot_do_is_said_or_left_to_xla(options, reason):
    with pytest.raises(ValueError, match=f"cannot run here: it needs {reason}"):
        trace("mosaic_gpu", **options)
    assert "barrier_wait" not in str(trace(None, **options))


def test_queries_of_another_dtype_are_left_to_xla():
    q, pool = (
        jax.ShapeDtypeStruct((1, 1, 2, 64), "float32"),
        jax.ShapeDtypeStruct((1, 1, 16, 64), "bfloat16"),
    )
    reason = "it needs queries in the dtype of the pools, bfloat16, and these are float32"
    assert unsupported(q, pool) == reason


@pytest.mark.parametrize(
    ("num_ctas", "max_seq_len", "splits"),
    [
        (512, 32768, 1),  # a batch of 64 with 8 kv heads fills the GPU by itself
        (8, 512, 2),  # a short context is left in few pieces
        (8, 8192, 14),  # 112 CTAs for 132 SMs
        (2, 131072, 57),
        (100, 8192, 1),  # 200 CTAs would take two turns, of half the time each
        (70, 8192, 3),  # but 210 take two turns of a third
    ],
)
def test_splits_fill_the_gpu(num_ctas, max_seq_len, splits):
    assert mosaic_gpu.num_splits_for(num_ctas, max_seq_len, num_sms=132) == splits
