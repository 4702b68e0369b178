"""The two passes over a vocabulary as Pallas kernels for Mosaic GPU.

A block of 128 threads reads one tile of one row into registers, with 16-byte loads where the row
allows them, and writes a few numbers per tile. Tiles are joined outside, see `partial`.
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
# 16 numbers per thread: with noise they take 127 registers, so that four blocks share a processor.
# 32 numbers take 250.
TILE = 2048


def sample_pass(
    logits_RV, temperature_R, threshold_R, key_R2, first_token, num_valid: int, *, interpret=None
) -> SoftmaxStats:
    """See `xla.sample_pass`; one part per tile.

    `interpret` is `plgpu.InterpretGPUParams()` for Pallas' interpreter, from JAX 0.11 on.
    """
    tiles = _Tiles(logits_RV)
    logits_RV, R = tiles.pad(logits_RV), logits_RV.shape[0]
    sampled, noise = temperature_R is not None, key_R2 is not None
    temperature_R = temperature_R if sampled else jnp.zeros(R, jnp.float32)
    key_R2 = key_R2 if noise else jnp.zeros((R, 2), jnp.int32)

    def body(x_ref, temperature_ref, threshold_ref, key_ref, first_ref, *out_refs):
        tile, row = lax.axis_index("tile"), lax.axis_index("row")
        start, token, inside = tiles.columns(tile, first_ref[0], num_valid)
        x = finite(tiles.load(x_ref, (row,), start))
        # NaN is kept, see `xla.sample_pass`. JAX 0.12 does not compile `~` of a vector of bools.
        kept = inside & ((x >= threshold_ref[row]) | (x != x))
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
    out = _call(body, "sample_pass", dtypes, R, tiles, interpret)(
        logits_RV, temperature_R, threshold_R, key_R2, first_token.reshape(1)
    )
    return SoftmaxStats(*out) if sampled else SoftmaxStats(out[0], None, *out[1:])


def residual_pass(
    target,
    draft_distributions,
    draft_B,
    sampled_B,
    row_B,
    subtract_B,
    temperature_B,
    key_B2,
    first_token,
    num_valid: int,
    *,
    interpret=None,
) -> ResidualSample:
    """See `xla.residual_pass`; one part per tile.

    Blocks of a row of temperature 0 end at once and write nothing. Their outputs, NaN perhaps, are
    not used.
    """
    drafts = list(draft_distributions or ())
    tiles = _Tiles(target.logits_BTV, *(distribution.logits_BTV for distribution in drafts))
    logits = [tiles.pad(distribution.logits_BTV) for distribution in (target, *drafts)]
    draft_row_B = jnp.minimum(row_B, max(len(drafts) - 1, 0))
    # The token that q is one-hot on; -1 where q is a sampled distribution.
    one_hot_B = draft_B
    if drafts:
        one_hot_B = jnp.full_like(row_B, -1)
    if drafts and sampled_B is not None:
        one_hot_B = jnp.where(sampled_B, -1, draft_B)

    def statistics(row_B, columns_BT):
        """Returns threshold, largest logit and total of one row per sequence, `[B, 3]`."""
        columns = [jnp.take_along_axis(x_BT, row_B[:, None], axis=1) for x_BT in columns_BT]
        return jnp.concatenate(columns, axis=1)

    target_B3 = statistics(row_B, target[1:])
    draft_B3 = target_B3
    if drafts:
        stacked = jax.tree.map(lambda *x_B: jnp.stack(x_B, axis=1), *(q[1:] for q in drafts))
        draft_B3 = statistics(draft_row_B, stacked)

    def body(
        row_ref,
        draft_row_ref,
        subtract_ref,
        one_hot_ref,
        temperature_ref,
        key_ref,
        first_ref,
        target_ref,
        draft_ref,
        x_ref,
        *refs,
    ):
        draft_refs, out_refs, staged = refs[: len(drafts)], refs[len(drafts) : -1], refs[-1]
        tile, b = lax.axis_index("tile"), lax.axis_index("row")

        @pl.when(temperature_ref[b] > 0.0)
        def _():
            start, token, inside = tiles.columns(tile, first_ref[0], num_valid)
            scale = inverse(temperature_ref[b])

            def dense(x, statistics_ref):
                x = finite(x)
                total_inverse = 1.0 / statistics_ref[b, 2]
                weight = jnp.exp((x - statistics_ref[b, 1]) * scale) * total_inverse
                return jnp.where(inside & (x >= statistics_ref[b, 0]), weight, 0.0)

            p = dense(tiles.load(x_ref, (b, row_ref[b]), start), target_ref)
            # The logits of each draft are an array of their own: only the one in use is read.
            for m, ref in enumerate(draft_refs):

                @pl.when(draft_row_ref[b] == m)
                def _(ref=ref):
                    staged[...] = tiles.load(ref, (b,), start).astype(jnp.float32)

            q = jnp.where(token == one_hot_ref[b], 1.0, 0.0)
            if drafts:
                sampled = dense(tiles.load(staged, (), 0), draft_ref)
                is_sampled = jnp.broadcast_to(one_hot_ref[b], sampled.shape) < 0
                q = sampled if sampled_B is None else jnp.where(is_sampled, sampled, q)
            # A select, since 0 * NaN is NaN.
            is_subtracted = jnp.broadcast_to(subtract_ref[b], q.shape) > 0.0
            rest = jnp.maximum(p - jnp.where(is_subtracted, q, 0.0), 0.0)
            noise = exponential(key_ref[b, 0], key_ref[b, 1], token)
            mass = jnp.sum(jnp.where(inside, rest, 0.0))
            out = [mass, *_best(rest / noise, token), *_best(p / noise, token)]
            for ref, number in zip(out_refs, out, strict=True):
                ref[b, tile] = number

    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    staged = plgpu.SMEM((tiles.size,), jnp.float32)
    B = row_B.shape[0]
    call = _call(body, "residual_pass", dtypes, B, tiles, interpret, scratch_types=[staged])
    scalars = row_B, draft_row_B, subtract_B.astype(jnp.float32), one_hot_B, temperature_B, key_B2
    return ResidualSample(*call(*scalars, first_token.reshape(1), target_B3, draft_B3, *logits))


class _Tiles:
    """The tiles that rows of arrays over the same vocabulary are cut into."""

    def __init__(self, *arrays):
        self.V = max(arrays[0].shape[-1], THREADS)  # a smaller vocabulary is padded
        self.size = min(TILE, 1 << (self.V.bit_length() - 1))
        self.count = -(-self.V // self.size)
        widest = 16 // max(x.dtype.itemsize for x in arrays)
        # As many numbers per load as divide a row, whose start is then aligned, and a tile.
        self.vec = math.gcd(self.V, widest, self.size // THREADS)

    def pad(self, x):
        """Returns the array with at least as many columns as there are threads."""
        missing = self.V - x.shape[-1]
        if missing == 0:
            return x
        widths = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
        return jnp.pad(x, widths, constant_values=-jnp.inf)

    def columns(self, tile, first_token, num_valid: int):
        """Returns the first column of a tile, its token ids, and which of them are valid.

        The last tile is read from where it fits, and overlaps the one before: columns of that one
        are not valid, nor are ids from `num_valid` on.
        """
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
    """Returns the largest value and the first token that has it."""
    best = jnp.max(value)
    return best, jnp.min(jnp.where(value == best, token, 2**31 - 1))


def _call(body, name: str, dtypes, num_rows: int, tiles: _Tiles, interpret, **options):
    """Returns a kernel that writes a number of each dtype per row and tile."""
    options |= {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((num_rows, tiles.count), dtype) for dtype in dtypes],
        grid=(tiles.count, num_rows),
        grid_names=("tile", "row"),  # CUDA limits all axes but the last
        kernel_name=name,
        **options,
    )
