"""Runs of several processes."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import jax

from specjax import devices
from specjax.errors import SpecJAXError

DEFAULT_TIMEOUT = 100


class Processes(NamedTuple):
    """The processes of a run, as the flags of these names give them; None where not given."""

    distributed: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    process_timeout: int | None = None

    def check(self) -> None:
        """Raises SpecJAXError for contradictory values."""
        given = self.addresses()
        if not self.distributed and set(given.values()) == {None}:
            if self.process_timeout is not None:
                raise SpecJAXError(
                    f"--process_timeout={self.process_timeout} applies to runs of several "
                    "processes only; this run has one process"
                )
            return
        if not self.distributed and None in given.values():
            raise SpecJAXError(
                f"--coordinator, --num_processes and --process_id belong together, got {given}"
            )
        if None not in given.values() and not 0 <= self.process_id < self.num_processes:
            raise SpecJAXError(
                f"--process_id={self.process_id} must be in [0, {self.num_processes})"
            )
        if self.coordinator and not self.coordinator.rpartition(":")[2].isdigit():
            raise SpecJAXError(f"--coordinator={self.coordinator} must be of the form host:port")

    def addresses(self) -> dict[str, str | int | None]:
        """The three values that name a process of a run without a cluster manager."""
        return {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }


def join(processes: Processes) -> None:
    """Joins the other processes of the run, if there are any.

    Only the first process prints and writes: the standard output of the others is discarded.

    Raises:
      SpecJAXError: contradictory values, processes that cannot be joined, or JAX has no device.
    """
    processes.check()
    addresses = list(processes.addresses().values())
    if processes.distributed or None not in addresses:
        timeout = processes.process_timeout or DEFAULT_TIMEOUT
        try:
            jax.distributed.initialize(
                *addresses,
                initialization_timeout=timeout,
                heartbeat_timeout_seconds=timeout,
                shutdown_timeout_seconds=timeout,
            )
        except (ValueError, RuntimeError) as error:
            raise SpecJAXError(f"cannot join the other processes: {error}") from error
    devices.check_platform()
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def is_only() -> bool:
    """Whether this is the only process; streaming is not synchronised across processes."""
    return jax.process_count() == 1


def is_first() -> bool:
    """Whether this process prints and writes the files of the run."""
    return jax.process_index() == 0
