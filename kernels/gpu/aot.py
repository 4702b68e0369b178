"""Compiles for a GPU that is not there: XLA's whole GPU pipeline and ptxas run, only nothing is
executed.

It needs the wheels of the extra `aot`, without any GPU or driver. They are for such processes
alone: where they can be imported and no GPU is found, JAX complains unless JAX_PLATFORMS=cpu. `make
test` keeps them in a folder of their own and gives it to those who compile by PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = pathlib.Path(__file__).parent / "targets"


def environment(packages: str | None = None) -> dict[str, str]:
    """The environment for a process that compiles for an absent GPU, made from this process's own.

    Args:
      packages: folder with the wheels of the extra `aot`; None where they are installed beside jax.
    """
    ours = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [
        path
        for path in (packages and os.path.abspath(packages), os.environ.get("PYTHONPATH"))
        if path
    ]
    return ours | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def mesh(target: str = "h100", num_devices: int = 1) -> Mesh:
    """A mesh of GPUs that need not exist.

    Args:
      target: name of a description in `targets`.
      num_devices: of one host.

    Raises:
      ValueError: no such target.
      RuntimeError: the wheels are missing.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_description(target), topology=f"1x1x{num_devices}"
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            "to compile for an absent GPU takes the wheels of the extra 'aot', of jax's own version, "
            f"and the environment of `specjax.kernels.gpu.aot.environment`: {error}"
        ) from error
    return Mesh(np.array(topology.devices), ("x",))


def shared_memory_limit(target: str = "h100") -> int:
    """Bytes of shared memory that a block may have."""
    return int(re.search(r"shared_memory_per_block_optin: (\d+)", _description(target))[1])


def abstract(tree, mesh: Mesh):
    """The arrays or shapes of a pytree as `jax.ShapeDtypeStruct`s on a mesh, to lower a function
    with."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_(function, args, options: Mapping | None = None):
    """The compiled program of a jitted function, for the devices of its abstract arguments.
    `options` are XLA's."""
    return (
        function.trace(*args).lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    )


class Resources(NamedTuple):
    """What one Mosaic GPU kernel takes, as ptxas and the launch say.

    Attributes:
      name: of the kernel.
      threads: of a block.
      registers: of a thread.
      spill_bytes: stores and loads of registers that had no room; 0 is the only good number.
      shared_memory: bytes of a block, static and dynamic.
    """

    name: str
    threads: int
    registers: int
    spill_bytes: int
    shared_memory: int


@contextlib.contextmanager
def recorded_resources() -> Iterator[list[Resources]]:
    """A list that holds, after the block, the `Resources` of every Mosaic GPU kernel compiled in
    it, in order.

    A kernel that this process has compiled before is not compiled, and not recorded, again. The
    compiler writes to the standard output of the process, which is therefore held back meanwhile.

    Raises:
      RuntimeError: the compiler's output is not what this function knows.
    """
    asked_for = dict.fromkeys(("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM"), "1")
    before = {name: os.environ.get(name) for name in asked_for}
    recorded: list[Resources] = []
    sys.stdout.flush()
    stdout = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.environ.update(asked_for)
        try:
            yield recorded
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        file.seek(0)
        recorded += parse_resources(file.read().decode())


def parse_resources(text: str) -> list[Resources]:
    """Reads what Mosaic GPU prints of kernels that it compiles.

    Raises:
      RuntimeError: it is not what this function knows.
    """
    reports = re.findall(
        r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for .*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        text,
        flags=re.DOTALL,
    )
    # The host's code, as LLVM: pointer, grid, cluster, block (x, y, z each), bytes of dynamic
    # shared memory.
    launches = re.findall(
        r"call void @mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr [^,]+((?:, i32 \d+){10})",
        text,
    )
    if not len(reports) == len(launches) == text.count("Compiling entry function"):
        raise RuntimeError(
            f"the report on {len(launches)} kernels has an unknown form:\n{text[-4000:]}"
        )
    found = []
    for (name, stores, loads, registers, rest), launch in zip(reports, launches, strict=True):
        *_, x, y, z, dynamic = map(int, re.findall(r"i32 (\d+)", launch))
        static = re.search(r"(\d+) bytes smem", rest)
        found.append(
            Resources(
                name,
                x * y * z,
                int(registers),
                int(stores) + int(loads),
                dynamic + (int(static[1]) if static else 0),
            )
        )
    return found


def _description(target: str) -> str:
    path = TARGETS / f"{target}.txtpb"
    if not path.exists():
        raise ValueError(
            f"target {target!r} does not exist; there is: "
            f"{', '.join(sorted(file.stem for file in TARGETS.glob('*.txtpb')))}"
        )
    return path.read_text()
