"""The two passes over a vocabulary as Pallas kernels for Mosaic GPU.

A block of 128 threads reads one tile of one row into registers, with 16-byte loads where the row allows them, and
leaves a few numbers of it. Tiles are joined outside, see `partial`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels.mosaic_compat import load
from specjax.kernels.verify.noise import exponential
from specjax.kernels.verify.partial import MASKED, Race, Scan, finite, inverse

THREADS = 128
TILE = 2048  # 16 numbers per thread: with noise 127 registers, so that four blocks share a processor; 32 take 250


def scan(logits_RV, temperature_R, threshold_R, key_R2, first_token, num_valid: int, *, interpret=None) -> Scan:
    """See `xla.scan`; one part per tile. `interpret` is for tests: parameters of the Mosaic GPU interpreter."""
    tiles = _Tiles(logits_RV)
    logits_RV, R = tiles.pad(logits_RV), logits_RV.shape[0]
    sampled, noise = temperature_R is not None, key_R2 is not None
    temperature_R = temperature_R if sampled else jnp.zeros(R, jnp.float32)
    key_R2 = key_R2 if noise else jnp.zeros((R, 2), jnp.int32)

    def body(x_ref, temperature_ref, threshold_ref, key_ref, first_ref, *out_refs):
        tile, row = lax.axis_index("tile"), lax.axis_index("row")
        place, token, inside = tiles.place(tile, first_ref[0], num_valid)
        x = finite(tiles.load(x_ref, (row,), place))
        kept = inside & (x >= threshold_ref[row])
        x = jnp.where(kept, x, MASKED)
        largest = jnp.max(x)
        value, out = x, [largest]
        if sampled:
            temperature = temperature_ref[row]
            weight = jnp.where(kept, jnp.exp((x - largest) * inverse(temperature)), 0.0)
            out.append(jnp.sum(weight))
            if noise:
                race = weight / exponential(key_ref[row, 0], key_ref[row, 1], token)
                value = jnp.where(jnp.broadcast_to(temperature, x.shape) == 0.0, x, race)
        for ref, number in zip(out_refs, [*out, *_best(value, token)], strict=True):
            ref[row, tile] = number

    dtypes = [jnp.float32] * (3 if sampled else 2) + [jnp.int32]
    out = _call(body, "verify_scan", dtypes, R, tiles, interpret)(
        logits_RV, temperature_R, threshold_R, key_R2, first_token.reshape(1))
    return Scan(*out) if sampled else Scan(out[0], None, *out[1:])


def residual(p, q, row_B, subtract_B, temperature_B, key_B2, first_token, num_valid: int, *, interpret=None) -> Race:
    """See `xla.residual`; one part per tile. Blocks of a row of temperature 0 end at once and write nothing: what is
    in their outputs, NaN perhaps, goes no further than a token that `api.reject` does not take."""
    drawn = isinstance(q, tuple)
    arrays = [p.logits_BTV, q.logits_BTV] if drawn else [p.logits_BTV]
    tiles = _Tiles(*arrays)
    arrays = [tiles.pad(x) for x in arrays]

    def statistics(law):
        """Threshold, largest logit and total of the row in question, `[B, 3]`."""
        rows_B1 = jnp.minimum(row_B, law.logits_BTV.shape[1] - 1)[:, None]
        return jnp.concatenate([jnp.take_along_axis(x_BT, rows_B1, axis=1) for x_BT in law[1:]], axis=1)

    def body(row_ref, subtract_ref, guess_ref, temperature_ref, key_ref, first_ref, *refs):
        tile, b = lax.axis_index("tile"), lax.axis_index("row")

        @pl.when(temperature_ref[b] > 0.0)
        def _():
            place, token, inside = tiles.place(tile, first_ref[0], num_valid)
            scale = inverse(temperature_ref[b])

            def dense(x_ref, law_ref):
                row = jnp.minimum(row_ref[b], x_ref.shape[1] - 1)
                x = finite(tiles.load(x_ref, (b, row), place))
                weight = jnp.exp((x - law_ref[b, 1]) * scale) * (1.0 / law_ref[b, 2])
                return jnp.where(inside & (x >= law_ref[b, 0]), weight, 0.0)

            law = dense(refs[0], refs[1])
            other = dense(refs[2], refs[3]) if drawn else jnp.where(token == guess_ref[b], 1.0, 0.0)
            rest = jnp.maximum(law - other * subtract_ref[b], 0.0)
            noise = exponential(key_ref[b, 0], key_ref[b, 1], token)
            out = [jnp.sum(jnp.where(inside, rest, 0.0)), *_best(rest / noise, token), *_best(law / noise, token)]
            for ref, number in zip(refs[-5:], out, strict=True):
                ref[b, tile] = number

    laws = [(array, statistics(law)) for array, law in zip(arrays, [p, q], strict=False)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    guess_B = jnp.zeros_like(row_B) if drawn else q
    return Race(*_call(body, "verify_residual", dtypes, row_B.shape[0], tiles, interpret)(
        row_B, subtract_B.astype(jnp.float32), guess_B, temperature_B, key_B2, first_token.reshape(1),
        *jax.tree.leaves(laws)))


class _Tiles:
    """How rows of arrays of the same vocabulary are cut into tiles."""

    def __init__(self, *arrays):
        self.V = max(arrays[0].shape[-1], THREADS)  # a smaller vocabulary is padded
        self.size = min(TILE, 1 << (self.V.bit_length() - 1))
        self.count = -(-self.V // self.size)
        widest = 16 // max(x.dtype.itemsize for x in arrays)
        # As many numbers per load as divide a row, whose start is then aligned, and a tile.
        self.vec = math.gcd(self.V, widest, self.size // THREADS)

    def pad(self, x):
        """The array with at least as many columns as there are threads."""
        missing = self.V - x.shape[-1]
        return x if missing == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)

    def place(self, tile, first_token, num_valid: int):
        """Of a tile: where it is read from, its token ids, and which of them count, inside of it and below
        `num_valid`. The last tile is read from where it fits, and overlaps the one before."""
        first = tile * self.size
        start = jnp.minimum(first, self.V - self.size)
        start = pl.multiple_of(start, math.gcd(self.V, self.size))
        column = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout) + start
        token = column + first_token
        return start, token, (column >= first) & (token < num_valid)

    def load(self, ref, index, start):
        return load(ref, (*index, pl.ds(start, self.size)), layout=self.layout)

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vec)


def _best(value, token):
    """The largest value and the first token that has it."""
    best = jnp.max(value)
    return best, jnp.min(jnp.where(value == best, token, 2**31 - 1))


def _call(body, name: str, dtypes, num_rows: int, tiles: _Tiles, interpret):
    """A kernel that leaves a number of each dtype per row and tile."""
    options = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(body, out_type=[jax.ShapeDtypeStruct((num_rows, tiles.count), dtype) for dtype in dtypes],
                        grid=(tiles.count, num_rows), grid_names=("tile", "row"),  # CUDA limits all axes but the last
                        kernel_name=name, **options)  # fmt: skip
