"""The two passes over a vocabulary as Pallas kernels for Mosaic GPU.

A block of 128 threads reads one tile of one row into registers, with 16-byte loads where the row
allows them, and leaves a few numbers of it. Tiles are joined outside, see `partial`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels.mosaic_compat import load
from specjax.kernels.sampling.noise import exponential
from specjax.kernels.sampling.partial import MASKED, ResidualSample, SoftmaxStats, finite, inverse

THREADS = 128
TILE = 2048  # 16 numbers per thread: with noise 127 registers, so that four blocks share a processor; 32 take 250


def scan(
    logits_RV, temperature_R, threshold_R, key_R2, first_token, num_valid: int, *, interpret=None
) -> SoftmaxStats:
    """See `xla.scan`; one part per tile. `interpret` is for tests: parameters of the Mosaic GPU
    interpreter."""
    tiles = _Tiles(logits_RV)
    logits_RV, R = tiles.pad(logits_RV), logits_RV.shape[0]
    sampled, noise = temperature_R is not None, key_R2 is not None
    temperature_R = temperature_R if sampled else jnp.zeros(R, jnp.float32)
    key_R2 = key_R2 if noise else jnp.zeros((R, 2), jnp.int32)

    def body(x_ref, temperature_ref, threshold_ref, key_ref, first_ref, *out_refs):
        tile, row = lax.axis_index("tile"), lax.axis_index("row")
        place, token, inside = tiles.place(tile, first_ref[0], num_valid)
        x = finite(tiles.load(x_ref, (row,), place))
        kept = inside & ~(x < threshold_ref[row])  # see `xla.scan`
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
        logits_RV, temperature_R, threshold_R, key_R2, first_token.reshape(1)
    )
    return SoftmaxStats(*out) if sampled else SoftmaxStats(out[0], None, *out[1:])


def residual(
    p, q, row_B, subtract_B, temperature_B, key_B2, first_token, num_valid: int, *, interpret=None
) -> ResidualSample:
    """See `xla.residual`; one part per tile. Blocks of a row of temperature 0 end at once and write
    nothing: what is in their outputs, NaN perhaps, goes no further than a token that `api.reject`
    does not take."""
    drafts = list(q) if isinstance(q, tuple) else []
    tiles = _Tiles(p.logits_BTV, *(distribution.logits_BTV for distribution in drafts))
    logits = [tiles.pad(distribution.logits_BTV) for distribution in (p, *drafts)]
    guess_B = jnp.zeros_like(row_B) if drafts else q
    draft_row_B = jnp.minimum(row_B, max(len(drafts) - 1, 0))

    def statistics(row_B, *columns_BT):
        """Threshold, largest logit and total of the row in question, `[B, 3]`."""
        return jnp.concatenate(
            [jnp.take_along_axis(x_BT, row_B[:, None], axis=1) for x_BT in columns_BT], axis=1
        )

    target_B3 = statistics(row_B, *p[1:])
    draft_B3 = target_B3
    if drafts:
        draft_B3 = statistics(
            draft_row_B, *(jnp.stack(x_B, axis=1) for x_B in list(zip(*drafts, strict=True))[1:])
        )

    def body(
        row_ref,
        draft_row_ref,
        subtract_ref,
        guess_ref,
        temperature_ref,
        key_ref,
        first_ref,
        distribution_ref,
        draft_ref,
        x_ref,
        *refs,
    ):
        draft_refs, out_refs, staged = refs[: len(drafts)], refs[len(drafts) : -1], refs[-1]
        tile, b = lax.axis_index("tile"), lax.axis_index("row")

        @pl.when(temperature_ref[b] > 0.0)
        def _():
            place, token, inside = tiles.place(tile, first_ref[0], num_valid)
            scale = inverse(temperature_ref[b])

            def dense(x, distribution_ref):
                x = finite(x)
                weight = jnp.exp((x - distribution_ref[b, 1]) * scale) * (
                    1.0 / distribution_ref[b, 2]
                )
                return jnp.where(inside & (x >= distribution_ref[b, 0]), weight, 0.0)

            distribution = dense(tiles.load(x_ref, (b, row_ref[b]), place), distribution_ref)
            for k, ref in enumerate(
                draft_refs
            ):  # each an array of its own: only the one that counts is read

                @pl.when(draft_row_ref[b] == k)
                def _(ref=ref):
                    staged[...] = tiles.load(ref, (b,), place).astype(jnp.float32)

            other = jnp.where(token == guess_ref[b], 1.0, 0.0)
            if drafts:
                other = dense(tiles.load(staged, (), 0), draft_ref)
            rest = jnp.maximum(
                distribution - jnp.where(subtract_ref[b] > 0.0, other, 0.0), 0.0
            )  # 0 * NaN is NaN
            noise = exponential(key_ref[b, 0], key_ref[b, 1], token)
            out = [
                jnp.sum(jnp.where(inside, rest, 0.0)),
                *_best(rest / noise, token),
                *_best(distribution / noise, token),
            ]
            for ref, number in zip(out_refs, out, strict=True):
                ref[b, tile] = number

    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    return ResidualSample(
        *_call(
            body,
            "verify_residual",
            dtypes,
            row_B.shape[0],
            tiles,
            interpret,
            scratch_types=[plgpu.SMEM((tiles.size,), jnp.float32)],
        )(
            row_B,
            draft_row_B,
            subtract_B.astype(jnp.float32),
            guess_B,
            temperature_B,
            key_B2,
            first_token.reshape(1),
            target_B3,
            draft_B3,
            *logits,
        )
    )


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
        return (
            x
            if missing == 0
            else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
        )

    def place(self, tile, first_token, num_valid: int):
        """Of a tile: where it is read from, its token ids, and which of them count, inside of it
        and below `num_valid`. The last tile is read from where it fits, and overlaps the one
        before."""
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


def _call(body, name: str, dtypes, num_rows: int, tiles: _Tiles, interpret, **options):
    """A kernel that leaves a number of each dtype per row and tile."""
    options |= {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_rows, tiles.count), dtype) for dtype in dtypes],
        grid=(tiles.count, num_rows),
        grid_names=("tile", "row"),  # CUDA limits all axes but the last
        kernel_name=name,
        **options,
    )
