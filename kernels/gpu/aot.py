"""Compiles for an absent GPU: XLA's whole GPU pipeline and ptxas run, and nothing is executed.

This requires the wheels of the extra `aot`, but no GPU or driver. They are for such processes only:
where they can be imported and there is no GPU, JAX fails unless JAX_PLATFORMS=cpu. `make test`
keeps them in a folder of their own, which processes that compile get through PYTHONPATH.
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
    """Returns this process's environment, changed for a process that compiles for an absent GPU.

    Args:
      packages: folder with the wheels of the extra `aot`; None where they are installed beside jax.
    """
    variables = dict(os.environ)
    variables.pop("XLA_FLAGS", None)
    paths = [os.path.abspath(packages)] if packages else []
    if variables.get("PYTHONPATH"):
        paths.append(variables["PYTHONPATH"])
    variables["JAX_PLATFORMS"] = "cpu"
    variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def mesh(target: str = "h100", num_devices: int = 1) -> Mesh:
    """Returns a mesh of GPUs that need not exist.

    Args:
      target: name of a description in `targets`.
      num_devices: number of devices of one host.

    Raises:
      ValueError: for an unknown target.
      RuntimeError: if the wheels are missing.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_description(target), topology=f"1x1x{num_devices}"
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(
            "compiling for an absent GPU requires the wheels of the extra 'aot', of the version of "
            f"jax, and the environment of `specjax.kernels.gpu.aot.environment`: {error}"
        ) from error
    return Mesh(np.array(topology.devices), ("x",))


def shared_memory_limit(target: str = "h100") -> int:
    """Returns how many bytes of shared memory a block may have."""
    return int(re.search(r"shared_memory_per_block_optin: (\d+)", _description(target))[1])


def abstract(tree, mesh: Mesh):
    """Returns the arrays or shapes of a pytree as `jax.ShapeDtypeStruct`s on a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_(function, args, options: Mapping | None = None):
    """Returns the compiled program of a jitted function for the devices of its abstract arguments.

    `options` are XLA's.
    """
    lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options)


class Resources(NamedTuple):
    """Resources of one Mosaic GPU kernel, from ptxas and the launch.

    Attributes:
      name: name of the kernel.
      threads: per block.
      registers: per thread.
      spill_bytes: bytes of spilled registers, stored and loaded; must be 0.
      shared_memory: bytes per block, static and dynamic.
    """

    name: str
    threads: int
    registers: int
    spill_bytes: int
    shared_memory: int


@contextlib.contextmanager
def recorded_resources() -> Iterator[list[Resources]]:
    """Yields a list that after the block holds the `Resources` of the kernels compiled in it.

    They are in order. A Mosaic GPU kernel that this process has compiled before is not compiled, or
    recorded, again. The compiler writes to the standard output of the process, which is therefore
    held back in the block.

    Raises:
      RuntimeError: if the compiler's output has an unknown form.
    """
    recorded: list[Resources] = []
    dumps = dict.fromkeys(("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM"), "1")
    with tempfile.TemporaryFile() as file:
        with _environment_variables(dumps), _stdout_in(file):
            yield recorded
        file.seek(0)
        recorded += parse_resources(file.read().decode())


@contextlib.contextmanager
def _environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _stdout_in(file) -> Iterator[None]:
    """Sends the process's standard output, also of code that is not Python, to a file."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def parse_resources(text: str) -> list[Resources]:
    """Returns the resources in what Mosaic GPU prints of the kernels that it compiles.

    Raises:
      RuntimeError: if the text has an unknown form.
    """
    reports = re.findall(
        r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for .*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        text,
        flags=re.DOTALL,
    )
    # The host's code in LLVM: pointer, grid, cluster, block (x, y, z each), bytes of dynamic shared
    # memory.
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
        *_, x, y, z, shared_memory = map(int, re.findall(r"i32 (\d+)", launch))
        static = re.search(r"(\d+) bytes smem", rest)
        if static:
            shared_memory += int(static[1])
        spill_bytes = int(stores) + int(loads)
        found.append(Resources(name, x * y * z, int(registers), spill_bytes, shared_memory))
    return found


def _description(target: str) -> str:
    path = TARGETS / f"{target}.txtpb"
    if not path.exists():
        names = sorted(file.stem for file in TARGETS.glob("*.txtpb"))
        raise ValueError(f"unknown target {target!r}; choose from {', '.join(names)}")
    return path.read_text()
