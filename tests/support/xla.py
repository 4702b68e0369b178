"""XLA's flags for tests: programs that compile quickly, at the price of running slowly."""

from __future__ import annotations

import jax

# For every small loop, such as one of random numbers, these two passes copy the whole program to
# count its iterations: a third of the time of compiling a round. They only move and drop
# operations.
WITHOUT_TRIP_COUNTS = (
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops"
)


def quick_flags(num_devices: int) -> str:
    """Returns flags for a process with so many (virtual) devices.

    Code generation takes most of the time that a tiny model needs; these change no step before it
    but the two passes. A flag that XLA does not know ends the process, and the last of them does
    not exist in all versions.
    """
    flags = [
        f"--xla_force_host_platform_device_count={num_devices}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        WITHOUT_TRIP_COUNTS,
    ]
    if jax.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
