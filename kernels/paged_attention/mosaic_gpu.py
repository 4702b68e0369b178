"""Paged attention for NVIDIA Hopper in Pallas for Mosaic GPU.

One CTA handles 64 or 128 query rows of one kv head of one sequence, over one part ("split") of its
positions. A producer warpgroup lets the TMA unit load keys and values, BLOCK positions at a time,
from their pages. One or two consumer warpgroups of 64 rows each multiply them by wgmma while the
next blocks are under way. The T * G rows that share a kv head (T tokens of G query heads) form one
tile, so each key and value is read once for all of them.

The softmax runs online over the blocks (Dao 2023, "FlashAttention-2"), in base 2. Where a batch is
too small to fill the GPU, several CTAs share the positions of a sequence, and their results are
combined (Dao et al. 2023, "Flash-Decoding"). Pages are those of Kwon et al. 2023, "PagedAttention".
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels import dispatch
from specjax.kernels.mosaic_compat import load
from specjax.kernels.paged_attention import xla

ROWS = 64  # of one wgmma, which takes no fewer
BLOCK = 64  # positions per step of the online softmax; with 128, registers spill
# Blocks in shared memory. 4 x 32 KiB per SM under way is several times bandwidth x latency / 132.
STAGES = 4
MIN_BLOCKS = 4  # fewer per split are not worth a second kernel that combines them

MASKED = xla.MASKED
# Where the running maximum starts: below every score, and so far above MASKED that its weight is 0.
LOWEST = -1e20
WGMMA, WGMMA_ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def num_splits_for(num_ctas: int, max_seq_len: int, num_sms: int) -> int:
    """Returns into how many splits to divide the positions of each sequence.

    This is the smallest number that keeps the SMs nearly as busy as any number would, as in
    FlashAttention's `num_splits_heuristic`: a partial last wave costs as much as a full one, and
    every split costs a float32 output to combine.

    Args:
      num_ctas: number of CTAs of a grid without splits.
      max_seq_len: positions per sequence.
      num_sms: streaming multiprocessors of the GPU.
    """
    if num_ctas >= 0.8 * num_sms:
        return 1
    most = max(1, min(max_seq_len // (BLOCK * MIN_BLOCKS), 2 * num_sms // num_ctas))
    busy = {}
    for splits in range(1, most + 1):
        waves = num_ctas * splits / num_sms
        busy[splits] = waves / math.ceil(waves)
    enough = 0.85 * max(busy.values())
    return next(splits for splits in busy if busy[splits] >= enough)


def paged_attention(
    q_BTNH,
    k_pool,
    v_pool,
    block_table_BX,
    start_B,
    ancestors_BT2=None,
    *,
    first_position: int = 0,
    interpret=None,
    num_splits: int | None = None,
):
    """See `api.paged_attention`; for calls that `api.unsupported` returns None for.

    Without ancestors T may be any number (chunks of prompts). The work of a CTA depends on the
    positions that its rows attend to: neither X nor the other sequences cost anything. Queries are
    rearranged in jax.numpy to `[B, K, T * G, H]`, which costs a pass over them except for T = 1
    (XLA fuses it into what computed them), and padded to whole tiles: 8 rows, or ROWS where there
    are more than that.

    Args:
      interpret: `plgpu.InterpretGPUParams()` for Pallas' interpreter, from JAX 0.11 on.
      num_splits: overrides `num_splits_for`.
    """
    B, T, N, H = q_BTNH.shape
    P, K, Z, _ = k_pool.shape
    X = block_table_BX.shape[1]
    G = N // K
    R = T * G
    consumers = 1 if R <= ROWS else 2
    num_tiles = pl.cdiv(R, consumers * ROWS)
    padded_R = pl.cdiv(R, 8) * 8 if R <= ROWS else num_tiles * consumers * ROWS
    splits = num_splits or num_splits_for(num_tiles * K * B, X * Z, dispatch.num_processors())
    dtype, out_dtype = q_BTNH.dtype, q_BTNH.dtype if splits == 1 else jnp.float32

    q_BKRH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, R, H)
    q_BKRH = jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, padded_R - R), (0, 0)))
    end_B = jnp.minimum(start_B + T, Z * xla.pages_held(block_table_BX, P))
    operands = [q_BKRH, k_pool, v_pool, block_table_BX, start_B, end_B]
    if ancestors_BT2 is not None:
        words_B2R = jnp.repeat(ancestors_BT2, G, axis=1).transpose(0, 2, 1)
        operands.append(jnp.pad(words_B2R, ((0, 0), (0, 0), (0, num_tiles * consumers * ROWS - R))))

    def smem(shape, dtype):
        tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))

    scratch = dict(
        q_smem=smem((consumers, ROWS, H), dtype),
        k_smem=smem((STAGES, BLOCK, H), dtype),
        v_smem=smem((STAGES, BLOCK, H), dtype),
        p_smem=None if interpret is None else smem((consumers, ROWS, BLOCK), dtype),
        o_smem=smem((consumers, ROWS, H), out_dtype),
        lse_smem=plgpu.SMEM((consumers, ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=consumers),
        k_full=plgpu.Barrier(num_arrivals=BLOCK // min(Z, BLOCK), num_barriers=STAGES),
        v_full=plgpu.Barrier(num_arrivals=BLOCK // min(Z, BLOCK), num_barriers=STAGES),
        free=plgpu.Barrier(num_arrivals=consumers, num_barriers=STAGES),
        zeroed=plgpu.Barrier(),
    )
    # Rows are reduced within a warp, which needs no shared memory, and there is too little left for
    # the default scratch. The other semantics, default from JAX 0.12 on, infers the layouts, and
    # does not find those of ancestor bits.
    params = plgpu.CompilerParams(
        approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
    )
    split_o_BKRH, split_lse_BKR = plgpu.kernel(
        functools.partial(_kernel, G=G, first_position=first_position),
        out_type=(
            jax.ShapeDtypeStruct((splits, B, K, padded_R, H), out_dtype),
            jax.ShapeDtypeStruct((splits, B, K, padded_R), jnp.float32),
        ),
        # The last axis runs fastest: tiles that read the same keys and values do so at about the
        # same time, from L2.
        grid=(B, K, splits, num_tiles),
        grid_names=("sequence", "head", "split", "tile"),
        scratch_types=scratch,
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=params,
        kernel_name="paged_attention",
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands)

    o_BKRH = split_o_BKRH[0] if splits == 1 else _combine(split_o_BKRH, split_lse_BKR)
    o_BTKGH = o_BKRH[:, :, :R].reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4)
    return o_BTKGH.reshape(q_BTNH.shape).astype(dtype)


def _combine(split_o_BKRH, split_lse_BKR):
    """Returns attention over all positions from that over each split.

    `split_lse_BKR` are base-2 logarithms of the sums of weights. The first axis of both arrays is
    the splits.
    """
    split_weight_BKR = jnp.where(
        split_lse_BKR > LOWEST, jnp.exp2(split_lse_BKR - split_lse_BKR.max(0)), 0
    )[..., None]
    # A split without work has not written its output.
    split_o_BKRH = jnp.where(split_weight_BKR > 0, split_o_BKRH, 0)
    return (split_weight_BKR * split_o_BKRH).sum(0) / jnp.maximum(split_weight_BKR.sum(0), 1e-30)


def _add_product(acc, p, v_smem, p_smem):
    """Returns acc + p @ v, with p directly from registers."""
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem))(plgpu.ACC.init(acc))


def _add_product_interpreted(acc, p, v_smem, p_smem):
    """Returns the same through shared memory.

    The interpreter has neither `run_state` nor operands in registers.
    """
    p_smem[...] = p
    plgpu.commit_smem()
    return acc + _product(p_smem, v_smem)


def _product(a_smem, b_smem):
    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a_smem, b_smem)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32))


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    start_ref,
    end_ref,
    *refs,
    G,
    first_position,
    q_smem,
    k_smem,
    v_smem,
    p_smem,
    o_smem,
    lse_smem,
    q_full,
    k_full,
    v_full,
    free,
    zeroed,
):
    *words_ref, o_ref, lse_ref = refs
    _, _, Z, H = k_ref.shape
    splits, rows = o_ref.shape[0], min(o_ref.shape[3], ROWS)
    consumers = q_smem.shape[0]
    b, h, split, tile, wg = (
        lax.axis_index(name) for name in ("sequence", "head", "split", "tile", "warpgroup")
    )

    # Rows of this CTA attend to positions before `limit`, and this split has n blocks of them from
    # block `first` on. Positions from `end` on are not written.
    start, end = start_ref[b], end_ref[b]
    limit = end
    if not words_ref:  # causal: the last token of the tile attends to most
        limit = jnp.minimum(end, start + lax.div((tile + 1) * (consumers * ROWS) - 1, G) + 1)
    num_blocks = lax.div(jnp.maximum(limit, 0) + (BLOCK - 1), BLOCK)
    per_split = lax.div(num_blocks + (splits - 1), splits)
    first = split * per_split
    n = jnp.clip(num_blocks - first, 0, per_split)

    @pl.when(wg == consumers)
    def load_blocks():
        plgpu.set_max_registers(40, action="decrease")
        run = min(Z, BLOCK)  # positions that lie next to each other

        def load_block(i, _):
            stage = lax.rem(i, STAGES)

            @pl.when(i >= STAGES)
            def wait_until_consumed():
                plgpu.barrier_wait(free.at[stage])

            positions = [(first + i) * BLOCK + j * run for j in range(BLOCK // run)]
            # Beyond the end the last page is loaded again: something must arrive, and the table may
            # have no further page.
            pages = [
                table_ref[b, lax.div(jnp.minimum(position, end - 1), Z)] for position in positions
            ]
            for pool_ref, smem, full in ((k_ref, k_smem, k_full), (v_ref, v_smem, v_full)):
                for j, (position, page) in enumerate(zip(positions, pages, strict=True)):
                    plgpu.copy_gmem_to_smem(
                        pool_ref.at[page, h, pl.ds(lax.rem(position, Z), run)],
                        smem.at[stage, pl.ds(j * run, run)],
                        full.at[stage],
                    )

        lax.fori_loop(0, n, load_block, None)

    @pl.when(wg < consumers)
    def attend():
        # Three warpgroups share 512 registers per lane: with a larger sum the last one would wait
        # for ever.
        plgpu.set_max_registers(232, action="increase")
        first_row = (tile * consumers + wg) * ROWS
        my_rows = pl.ds(0, rows)  # of a partial tile the others stay undefined, and are not used

        @pl.when(n > 0)
        def load_queries():
            plgpu.copy_gmem_to_smem(
                q_ref.at[b, h, pl.ds(first_row, rows)], q_smem.at[wg, my_rows], q_full.at[wg]
            )
            plgpu.barrier_wait(q_full.at[wg])

        words = [
            load(ref, (b, w, pl.ds(first_row, ROWS)), layout=WGMMA_ROW)
            for ref in words_ref
            for w in range(2)
        ]
        token_R = lax.div(
            plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA_ROW) + first_row, G
        )
        seen_by_all = start if words else start + lax.div(first_row, G) + 1
        num_unmasked = jnp.clip(lax.div(jnp.minimum(seen_by_all, end), BLOCK) - first, 0, n)
        if first_position:  # blocks are masked from one on, and here the first one must be
            num_unmasked = jnp.where(first * BLOCK < first_position, 0, num_unmasked)

        def across(x_R, columns):
            return lax.broadcast_in_dim(x_R, (ROWS, columns), [0])

        def mask(scores, block):
            position = (
                plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=WGMMA) + block * BLOCK
            )
            if first_position:
                scores = jnp.where(position >= first_position, scores, MASKED)
            if not words:
                return jnp.where(
                    position <= across(jnp.minimum(start + token_R, end - 1), BLOCK), scores, MASKED
                )
            new = position - start
            word = jnp.where(new < 32, across(words[0], BLOCK), across(words[1], BLOCK))
            bit = lax.shift_right_logical(word, new & 31) & 1
            return jnp.where((position < end) & ((new < 0) | (bit != 0)), scores, MASKED)

        def zero_values_from_end(stage, block):
            """Zeros values that were not written: 0 * NaN is NaN, even for a weight of 0."""

            @pl.when(wg == 0)
            def store():
                position = (
                    plgpu.broadcasted_iota(jnp.int32, (BLOCK, H), 0, layout=WGMMA) + block * BLOCK
                )
                v = load(v_smem, (stage,), layout=WGMMA)
                v_smem[stage] = jnp.where(position < end, v, jnp.zeros_like(v))
                plgpu.commit_smem()
                plgpu.barrier_arrive(zeroed)

            plgpu.barrier_wait(zeroed)

        scale = H**-0.5 * math.log2(math.e)

        def step(i, carry, masked):
            acc, m_R, l_R = carry
            stage, block = lax.rem(i, STAGES), first + i
            plgpu.barrier_wait(k_full.at[stage])
            scores = _product(q_smem.at[wg], k_smem.at[stage].transpose((1, 0)))
            if masked:
                scores = mask(scores, block)
            old_m_R, m_R = m_R, jnp.maximum(m_R, scores.max(axis=1))
            p = jnp.exp2(scores * scale - across(m_R * scale, BLOCK))
            decay_R = jnp.exp2((old_m_R - m_R) * scale)
            l_R = l_R * decay_R + p.sum(axis=1)
            acc = acc * across(decay_R, H)
            plgpu.barrier_wait(v_full.at[stage])
            if masked:
                pl.when((block + 1) * BLOCK > end)(
                    functools.partial(zero_values_from_end, stage, block)
                )
            add_product = _add_product if p_smem is None else _add_product_interpreted
            acc = add_product(
                acc, p.astype(v_smem.dtype), v_smem.at[stage], p_smem and p_smem.at[wg]
            )

            @pl.when(i + STAGES < n)
            def release():
                plgpu.barrier_arrive(free.at[stage])

            return acc, m_R, l_R

        def full(value, shape, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        carry = (
            full(0, (ROWS, H), WGMMA),
            full(LOWEST, (ROWS,), WGMMA_ROW),
            full(0, (ROWS,), WGMMA_ROW),
        )
        carry = lax.fori_loop(0, num_unmasked, functools.partial(step, masked=False), carry)
        acc, m_R, l_R = lax.fori_loop(num_unmasked, n, functools.partial(step, masked=True), carry)

        inverse_R = jnp.where(l_R > 0, 1 / l_R, 0.0)
        o_smem[wg] = (acc * across(inverse_R, H)).astype(o_smem.dtype)
        lse_smem[wg] = jnp.where(l_R > 0, m_R * scale + jnp.log(l_R) * math.log2(math.e), MASKED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            lse_smem.at[wg, my_rows], lse_ref.at[split, b, h, pl.ds(first_row, rows)]
        )

        @pl.when((n > 0) | (splits == 1))
        def store():
            plgpu.copy_smem_to_gmem(
                o_smem.at[wg, my_rows], o_ref.at[split, b, h, pl.ds(first_row, rows)]
            )

        plgpu.wait_smem_to_gmem(0)
