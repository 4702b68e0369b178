"""XLA flags for tests: fast compilation of slow programs."""

from __future__ import annotations

import jax

# To count the iterations of any small loop, such as that of random numbers, these two passes copy
# the whole program: a third of the compile time of a round. They only move and drop operations.
WITHOUT_TRIP_COUNTS = (
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops"
)

# Fewer optimisations of the machine code. The matrix products of a large model are library calls,
# which stay as fast.
QUICK_CODEGEN = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    WITHOUT_TRIP_COUNTS,
)


def quick_flags(num_devices: int) -> str:
    """Returns flags for a process with `num_devices` virtual devices.

    Code generation takes most of the time for a tiny model. Of the steps before it, only the two
    passes change. An unknown flag ends the process, and some versions do not know the last one.
    """
    flags = [f"--xla_force_host_platform_device_count={num_devices}", *QUICK_CODEGEN]
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
