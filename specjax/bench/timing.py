"""What all benchmarks share: timing, medians, and the roofline that the machine's memory sets."""

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
    """Wall time of a call, to the end of what it computes."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def interleaved(prepare: dict[str, Callable[[], Callable]], repeats: int) -> dict[str, float]:
    """Median wall times of what functions return, each called in turn, after a round of all that
    does not count."""
    times = [
        {name: seconds(function()) for name, function in prepare.items()}
        for _ in range(repeats + 1)
    ]
    return {name: float(np.median([run[name] for run in times[1:]])) for name in prepare}


def read_weights(target: Model) -> Callable[[], jax.Array]:
    """A call that reads as many bytes as the weights have on each device, from one array: what
    memory can do, undisturbed by where arrays end."""
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(target.params))
    place = NamedSharding(target.mesh, PartitionSpec(MESH_AXES)) if target.mesh else None
    memory = jnp.zeros(
        size // 4 * (target.mesh.size if target.mesh else 1), jnp.float32, device=place
    )
    total = jax.jit(
        parallel.on_mesh(jnp.sum, target.mesh, (PartitionSpec(MESH_AXES),), PartitionSpec())
    )
    return lambda: total(memory)
