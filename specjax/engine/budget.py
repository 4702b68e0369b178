"""How many rows and pages an engine has: from the memory of a device."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import numpy as np

from specjax import kv_cache, parallel
from specjax.decode import DecodeConfig, state_specs
from specjax.engine import batch, programs
from specjax.errors import SpecJAXError, SpecJAXWarning

GIB = 2**30
CPU_ROWS, GPU_ROWS = 16, 64  # of a replica
CPU_KV_CACHE_GIB = 1
# Pages keep prefixes when no row holds them. So many times the pages that rows can hold are enough.
MOST_PAGES_PER_ROW = 4


def is_cpu() -> bool:
    """Whether programs run on a CPU."""
    return jax.default_backend() == "cpu"


def num_rows(max_num_seqs: int | None, num_replicas: int) -> int:
    """Returns how many sequences of a replica run at a time.

    Args:
      max_num_seqs: over all replicas; None for the default.
      num_replicas: data-parallel replicas.

    Raises:
      SpecJAXError: for a number that is not positive.
    """
    if max_num_seqs is None:
        return CPU_ROWS if is_cpu() else GPU_ROWS
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs < 1:
        raise SpecJAXError(f"max_num_seqs must be an integer of at least 1, got {max_num_seqs!r}")
    return -(-max_num_seqs // num_replicas)


def available_bytes(
    config: DecodeConfig,
    num_rows: int,
    gpu_memory_utilization: float = 0.92,
    kv_cache_gib: float | None = None,
) -> int:
    """Returns the bytes on each device that the pools may have.

    Args:
      config: static configuration of the loop.
      num_rows: rows of a replica.
      gpu_memory_utilization: share of a GPU's memory for weights, pools and temporary arrays.
      kv_cache_gib: GiB for the pools on each device, instead of what is left; on a CPU 1 by
        default.

    Raises:
      SpecJAXError: for a share or size out of range, or a device that does not tell its memory.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise SpecJAXError(
            f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}"
        )
    if kv_cache_gib is not None and not kv_cache_gib > 0:
        raise SpecJAXError(f"kv_cache_gib must be positive, got {kv_cache_gib}")
    if kv_cache_gib is None and is_cpu():
        kv_cache_gib = CPU_KV_CACHE_GIB
    if kv_cache_gib is not None:
        return int(kv_cache_gib * GIB)
    free = _free_bytes(gpu_memory_utilization) - _temporary_bytes(config, num_rows)
    return max(0, free)


def cut_context(config: DecodeConfig, max_model_len: int, num_pages: int) -> int:
    """Returns the largest length of a request that pages hold, at most `max_model_len`.

    Less than that comes with a `SpecJAXWarning`.
    """
    fitting = num_pages * config.runtime.page_size - config.num_tokens
    if fitting >= max_model_len or fitting < 2:
        return max_model_len
    warnings.warn(
        f"the cache holds {fitting} tokens, less than the model's context of {max_model_len}: "
        f"max_model_len is {fitting}",
        SpecJAXWarning,
        stacklevel=3,
    )
    return fitting


def num_pages(
    config: DecodeConfig, num_rows: int, max_model_len: int, fitting: int, page_bytes: int
) -> int:
    """Returns P, the pages of a replica.

    Args:
      config: static configuration of the loop.
      num_rows: rows of a replica.
      max_model_len: largest length of a row.
      fitting: pages for which there is memory.
      page_bytes: bytes of a page.

    Raises:
      SpecJAXError: if the pages do not hold one sequence of `max_model_len` tokens.
    """
    num_positions = max_model_len + config.num_tokens
    row_pages = kv_cache.pages_for(num_positions, config.runtime.page_size)
    if fitting < row_pages:
        needed, found = row_pages * page_bytes / GIB, fitting * page_bytes / GIB
        raise SpecJAXError(
            f"a request of max_model_len={max_model_len} tokens takes {needed:.2f} GiB of pages, "
            f"but there is memory for {found:.2f} GiB; lower max_model_len, raise kv_cache_gib or "
            "gpu_memory_utilization, or split the model over more devices"
        )
    return min(fitting, MOST_PAGES_PER_ROW * num_rows * row_pages)


def bytes_per_page(params: tuple[Any, Any], config: DecodeConfig) -> int:
    """Returns the bytes of a page on a device, in all pools together."""

    def pool_bytes(pages: int) -> int:
        state = jax.eval_shape(
            lambda target, drafter: programs.init(
                target, drafter, config, 1, config.runtime.page_size, pages, batch.MAX_STOP_IDS
            ),
            *params,
        )
        return _bytes_per_device(state, config)

    return pool_bytes(2) - pool_bytes(1)


def _bytes_per_device(state, config: DecodeConfig) -> int:
    """Returns the bytes of a state's arrays that each device has."""
    mesh = config.runtime.mesh
    leaves = jax.tree.leaves(state)
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    if mesh is None:
        return sum(sizes)
    specs = jax.tree.leaves(
        state_specs(state), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    total = 0
    for size, spec in zip(sizes, specs, strict=True):
        axes = []
        for part in spec:
            axes += [part] if isinstance(part, str) else list(part or ())
        total += size // math.prod(mesh.shape[axis] for axis in axes)
    return total


def _free_bytes(utilization: float) -> int:
    """Returns the smallest number of bytes that may still be used on a device of this process."""
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        if limit is None:
            raise SpecJAXError(
                f"{device} does not tell its memory; set kv_cache_gib, or num_pages in Python"
            )
        free.append(int(limit * utilization) - stats.get("bytes_in_use", 0))
    return min(free)


def _temporary_bytes(config: DecodeConfig, num_rows: int) -> int:
    """Returns an upper estimate of the bytes that a round needs beside weights and pools.

    These are the logits of all positions of a block, in float32 and twice more for their
    distributions and for those of the drafts, and the activations of one layer.
    """
    num_tokens = num_rows * (config.num_tokens + 1)
    target, mesh = config.target, config.runtime.mesh
    shards = parallel.degree(mesh, "target")
    logits = 4 * target.vocab_size // shards * num_tokens * 4
    width = 8 * target.hidden_size + 3 * target.intermediate_size // shards
    prefill_tokens = 4 * 256
    activations = width * max(num_tokens, prefill_tokens) * np.dtype(config.runtime.dtype).itemsize
    return logits + 4 * activations
