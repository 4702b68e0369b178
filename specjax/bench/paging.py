"""What paging costs: the same decode step with a paged and with a contiguous cache."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, llama, parallel
from specjax.bench import timing
from specjax.engine import batch
from specjax.engine.load import Model
from specjax.kernels.paged_attention import xla
from specjax.sampling import SamplingArrays


def cost(target: Model, *, length: int, page_size: int, repeats: int) -> tuple[float, float]:
    """Seconds of a plain decode step at `length` tokens with the paged cache, and with one
    contiguous run of positions, both through XLA.

    Medians of `repeats` calls in turn. The contiguous cache is one page as long as the sequence,
    read where it lies.
    """
    positions = batch.bucket(length + 1)
    rows = parallel.dp_size(target.mesh)

    def contiguous(q_BTNH, k_pool, v_pool, block_table_BX, start_B, **_):
        return xla.attention(q_BTNH, k_pool, v_pool, jnp.ones((1, positions), bool), start_B)

    def prepare(size: int):
        cfg = decode.DecodeConfig(target.config, runtime=target.runtime(size, "xla"))
        tokens_BS = np.tile(
            np.arange(positions, dtype=np.int32) % target.num_valid_tokens, (rows, 1)
        )
        length_B, end_B, eos_BE = (
            np.full(shape, value, np.int32)
            for shape, value in ((rows, length), (rows, positions), ((rows, 1), -1))
        )
        arrays = parallel.put(
            (
                tokens_BS,
                decode.RequestArrays(
                    length_B, end_B, eos_BE, SamplingArrays(np.zeros(rows, np.uint32))
                ),
            ),
            target.mesh,
        )
        # Both are functions of its own, so that nothing compiled for the one cache is taken for the
        # other.
        state = jax.jit(lambda params, arrays: decode.init(params, None, cfg, *arrays))(
            target.params, arrays
        )
        step = jax.jit(
            lambda params, state: decode.step(params, None, cfg, state), donate_argnums=1
        )
        carry = [step(target.params, state)]

        def again():
            carry[0] = step(target.params, carry[0])
            return carry[0]

        return again

    paged = prepare(page_size)
    with mock.patch.object(llama, "paged_attention", contiguous):
        dense = prepare(positions)
    times = np.array([(timing.seconds(paged), timing.seconds(dense)) for _ in range(repeats)])
    return tuple(map(float, np.median(times, axis=0)))
