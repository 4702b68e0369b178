"""The cost of paging: the same pass with a paged and with a contiguous KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import kv_cache, llama, parallel
from specjax.bench import timing
from specjax.config import LlamaConfig, Runtime
from specjax.engine import batch
from specjax.engine.load import Model
from specjax.kernels.paged_attention import xla


class _Cache(NamedTuple):
    """A kind of cache.

    Attributes:
      init: (config, runtime, batch_size, max_seq_len) -> cache.
      run: (params, config, runtime, tokens_BT, length_B, cache) -> (hidden_BTD, cache).
    """

    init: Callable[..., Any]
    run: Callable[..., tuple[jax.Array, Any]]


def cost(target: Model, *, length: int, page_size: int, repeats: int) -> tuple[float, float]:
    """Times the target's pass over one token after `length` tokens, with XLA for both caches.

    Args:
      target: the model.
      length: tokens in the cache.
      page_size: positions per page of the paged cache.
      repeats: calls in turn, of which the median counts.

    Returns:
      Seconds with the paged cache, and with a contiguous one.
    """
    paged = _prepare(target, _Cache(_init_pages, _run_paged), length, page_size)
    contiguous = _prepare(target, _Cache(_init_contiguous, _run_contiguous), length, page_size)
    times = [(timing.seconds(paged), timing.seconds(contiguous)) for _ in range(repeats)]
    medians = np.median(times, axis=0)
    return float(medians[0]), float(medians[1])


def _prepare(target: Model, kind: _Cache, length: int, page_size: int) -> Callable[[], jax.Array]:
    """Returns a function that runs one pass, which has been compiled and run once."""
    config, mesh = target.config, target.mesh
    runtime = target.runtime(page_size, "xla")
    replicas = parallel.dp_size(mesh)
    positions = batch.bucket(length + 1)
    host = {
        "tokens_BT": np.zeros((replicas, 1), np.int32),
        "length_B": np.full(replicas, length, np.int32),
    }
    rows = parallel.put(host, mesh)
    row_specs = parallel.specs(rows, "target")

    def init(rows):
        return kind.init(config, runtime, 1, positions)

    def run(params, rows, cache):
        hidden_BTD, cache = kind.run(
            params, config, runtime, rows["tokens_BT"], rows["length_B"], cache
        )
        highest_BT = jnp.max(llama.logits(params, hidden_BTD), axis=-1)
        axes = parallel.model_axes(mesh, "target")
        return jax.lax.pmax(highest_BT, axes) if axes else highest_BT, cache

    def cache_specs(cache):
        return parallel.specs(cache, "target")

    def in_specs(params, rows, cache):
        return parallel.specs(params, "target"), row_specs, cache_specs(cache)

    def out_specs(shapes):
        return parallel.ROWS, cache_specs(shapes[1])

    cache = jax.jit(parallel.on_mesh(init, mesh, (row_specs,), cache_specs))(rows)
    run = jax.jit(parallel.on_mesh(run, mesh, in_specs, out_specs), donate_argnums=2)
    carry = [cache]

    def call():
        highest_BT, carry[0] = run(target.params, rows, carry[0])
        return highest_BT

    jax.block_until_ready(call())
    return call


def _init_pages(config: LlamaConfig, runtime: Runtime, batch_size: int, max_seq_len: int):
    """The pools, and a block table."""
    block_table_BX = kv_cache.in_order(batch_size, max_seq_len, runtime.page_size)
    pools = llama.init_cache(config, runtime, block_table_BX.size)
    return {"block_table_BX": block_table_BX, "pools": pools}


def _run_paged(params, config: LlamaConfig, runtime: Runtime, tokens_BT, length_B, cache):
    table_BX, pools = cache["block_table_BX"], cache["pools"]
    output = llama.forward(params, config, runtime, tokens_BT, length_B, table_BX, pools)
    return output.hidden_BTD, cache | {"pools": output.cache}


def _init_contiguous(config: LlamaConfig, runtime: Runtime, batch_size: int, max_seq_len: int):
    """Keys and values of each layer, `[B, K, S, H]`."""
    num_kv_heads = config.num_kv_heads // parallel.degree(runtime.mesh, "target")
    shape = (batch_size, num_kv_heads, max_seq_len, config.head_dim)
    layers = range(config.num_layers)
    return {
        "k_BKSH": [jnp.zeros(shape, runtime.dtype) for _ in layers],
        "v_BKSH": [jnp.zeros(shape, runtime.dtype) for _ in layers],
    }


def _run_contiguous(params, config: LlamaConfig, runtime: Runtime, tokens_BT, length_B, cache):
    """The operations of `llama.forward`, with contiguous keys and values."""
    B, T = tokens_BT.shape
    axes = parallel.model_axes(runtime.mesh, "target")
    positions_BT = length_B[:, None] + jnp.arange(T)
    rotation = llama.rotary(config, positions_BT)
    sequence_B1 = jnp.arange(B)[:, None]
    k_BKSH, v_BKSH = list(cache["k_BKSH"]), list(cache["v_BKSH"])
    x_BTD = llama.embed(params, runtime, tokens_BT)
    for i, layer in enumerate(params["layers"]):
        attention, mlp = layer["attention"], layer["mlp"]
        q_BTNH, k_BTKH, v_BTKH = llama.qkv(attention, config, x_BTD, rotation)
        k_BKSH[i] = k_BKSH[i].at[sequence_B1, :, positions_BT].set(k_BTKH)
        v_BKSH[i] = v_BKSH[i].at[sequence_B1, :, positions_BT].set(v_BTKH)
        a_BTNH = xla.attention(q_BTNH, k_BKSH[i], v_BKSH[i], length_B, length_B + T)
        x_BTD = llama.out_residual(attention, a_BTNH, x_BTD, axes)
        h_BTF = llama.gate_up(mlp, config, x_BTD)
        x_BTD = llama.down_residual(mlp, h_BTF, x_BTD, axes)
    hidden_BTD = llama.rms_norm(x_BTD, params["final_norm_D"], config.rms_norm_eps)
    return hidden_BTD, {"k_BKSH": k_BKSH, "v_BKSH": v_BKSH}
