"""Wall times, medians, and the roofline of the machine's memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax import parallel
from specjax.engine.load import Model
from specjax.parallel import MESH_AXES


def seconds(function: Callable, *arguments) -> float:
    """Wall time of a call, until its results are computed."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def interleaved(prepare: dict[str, Callable[[], Callable]], repeats: int) -> dict[str, float]:
    """Median wall times of calls that take turns, after one warm-up turn.

    Args:
      prepare: by name, functions that return the function to time.
      repeats: counted turns.
    """
    times = {name: [] for name in prepare}
    for _ in range(repeats + 1):
        for name, make in prepare.items():
            function = make()
            times[name].append(seconds(function))
    return {name: float(np.median(of_name[1:])) for name, of_name in times.items()}


def read_weights(target: Model) -> Callable[[], jax.Array]:
    """A call that reads as many bytes as the weights have on each device.

    They are read from one array, at the highest rate that memory allows.
    """
    mesh = target.mesh
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(target.params))
    spec = PartitionSpec(MESH_AXES)
    sharding = NamedSharding(mesh, spec) if mesh else None
    num_devices = mesh.size if mesh else 1
    memory = jnp.zeros(size // 4 * num_devices, jnp.float32, device=sharding)
    total = jax.jit(parallel.on_mesh(jnp.sum, mesh, (spec,), PartitionSpec()))
    return lambda: total(memory)
