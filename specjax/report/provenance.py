"""JSON files of figures, with their provenance."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
from typing import Any, NamedTuple

import jax

from specjax import files

PACKAGES = ("specjax", "jax", "jaxlib", "numpy")
OTHER_ENGINES = ("torch", "transformers", "llama_cpp")


class Invocation(NamedTuple):
    """How a command was called.

    Attributes:
      command: the flags that were given, as text.
      flags: values of all flags of the command.
    """

    command: list[str]
    flags: dict[str, Any]


def provenance(invocation: Invocation) -> dict[str, Any]:
    """The flags of a command, the versions of packages and the devices, for JSON."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    for name in OTHER_ENGINES:
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    return {
        "command": invocation.command,
        "flags": invocation.flags,
        "versions": versions,
        "python": platform.python_version(),
        "device": str(jax.devices()[0].device_kind),
        "num_devices": jax.device_count(),
        "num_cores": num_cores(),
    }


def num_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def write_figures(
    path: str | os.PathLike | None, figures: dict[str, Any], invocation: Invocation
) -> None:
    """Writes figures and their provenance as a JSON file, with null for NaN and infinity.

    Only the first process of a run writes; nothing is written where `path` is None.
    """
    if path is None or jax.process_index() != 0:
        return
    fields = _finite({**provenance(invocation), **figures})
    with files.new_file(path) as partial:
        text = json.dumps(fields, indent=2, allow_nan=False)
        partial.write_text(f"{text}\n", encoding="utf-8")


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
