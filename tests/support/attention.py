"""Cases of paged attention, for every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.kernels.paged_attention import mosaic_gpu, pack_ancestors, paged_attention

ATTENTION = jax.jit(paged_attention, static_argnames=("first_position", "implementation"))


if jax.__version_info__ >= (0, 11):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams


@dataclasses.dataclass
class Case:
    """Queries, and keys and values of ragged sequences, both dense and in scattered pages.

    Unwritten positions and pages that no sequence holds are NaN.
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
    first_position: int = 0
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.start_B = np.array(self.starts, np.int32)
        B, P = len(self.starts), len(self.starts) * self.X + self.spare_pages

        def normal(*shape):  # rounded to the dtype, so that the reference gets the same numbers
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
        self.seen_BTT = np.broadcast_to(np.tri(self.T, dtype=bool), (B, self.T, self.T))
        if self.tree:
            is_ancestor_BTT = np.tril(rng.random((B, self.T, self.T)) < 0.3)
            self.seen_BTT = is_ancestor_BTT | np.eye(self.T, dtype=bool)

    def arguments(self):
        arrays = [jnp.asarray(x, self.dtype) for x in (self.q_BTNH, self.k_pool, self.v_pool)]
        arrays += [jnp.asarray(self.block_table_BX), jnp.asarray(self.start_B)]
        return arrays, pack_ancestors(jnp.asarray(self.seen_BTT)) if self.tree else None

    def run(self, implementation):
        arrays, ancestors_BT2 = self.arguments()
        if implementation == "interpret":  # with the race detector
            interpret = InterpretGPUParams(detect_races=True)
            out = mosaic_gpu.paged_attention(
                *arrays,
                ancestors_BT2,
                first_position=self.first_position,
                interpret=interpret,
                num_splits=self.splits,
            )
            out.block_until_ready()
            assert not gpu_callbacks.get_races().races_found
        else:
            out = ATTENTION(
                *arrays,
                ancestors_BT2=ancestors_BT2,
                first_position=self.first_position,
                implementation=implementation,
            )
        assert out.dtype == self.dtype and out.shape == self.q_BTNH.shape
        return np.asarray(out, np.float64)

    @functools.cached_property
    def expected(self):
        """Dense attention over the values and over their magnitudes."""
        out_BTNH, size_BTNH = np.zeros((2, *self.q_BTNH.shape))
        for b, t, n in np.ndindex(self.q_BTNH.shape[:3]):
            before = max(self.start_B[b], 0)
            new = [self.start_B[b] + j for j in range(self.T) if self.seen_BTT[b, t, j]]
            seen = [p for p in [*range(before), *new] if p >= self.first_position]
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
        """Which outputs differ by more than rounding.

        Two roundings to the dtype are allowed, of the weights and of the output. Each is to the
        nearest and changes the output by at most half a unit in the last place of the attention
        over magnitudes. Products are exact in float32; 3e-6 is for the sums.
        """
        expected_BTNH, size_BTNH = self.expected
        tolerance_BTNH = float(jnp.finfo(self.dtype).eps) * size_BTNH + 3e-6
        return ~(abs(out_BTNH - expected_BTNH) <= tolerance_BTNH)

    def check(self, implementation):
        wrong_BTNH = self.wrong(self.run(implementation))
        assert not wrong_BTNH.any(), (
            f"{wrong_BTNH.mean():.1%} wrong, at {np.argwhere(wrong_BTNH)[:5].tolist()}"
        )


# Cases that the GPU kernel supports. They are few, since its interpreter is slow. A block has 64
# positions, a tile 64 rows.
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
    "first positions, splits": Case(
        [-1, 18, 20, 150], 2, G=2, K=1, H=64, Z=32, dtype="bfloat16", splits=2, first_position=20
    ),
    "groups of 7": Case([16], 1, G=7, K=1, H=64, Z=16, dtype="bfloat16"),
}
