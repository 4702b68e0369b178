"""specjax env: versions, devices, and which implementation each operation will use here, and why."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

import specjax
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.paged_attention import api as attention

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
OPERATIONS = {
    "attention": f"For models in bfloat16 or float16 with heads of {' or '.join(map(str, attention.HEADS))} channels, "
    f"at most {attention.MAX_GROUP} query heads per kv head, and pages of "
    f"{', '.join(map(str, attention.PAGES))} positions; other models use xla.",
    "verification": "For every vocabulary.",
}


def define_flags() -> None:
    """`specjax env` has no flags."""


def main(argv: list[str]) -> None:
    """Prints what there is. Raises SpecJAXError where JAX finds no device to run on."""
    del argv
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise SpecJAXError(f"JAX finds no device: {error}") from error
    versions = {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    versions |= {name: version for name in PLUGINS if (version := _version(name))}
    for name, version in versions.items():
        print(f"{name:18}{version}")
    print()
    for device in devices:
        print(f"device {device.id:<11}{describe(device)}")
    print()
    reason = dispatch.missing_gpu()
    for operation, conditions in OPERATIONS.items():
        print(f"{operation:18}{dispatch.choose(None)}")
        print(f"{'':18}{f'Not mosaic_gpu: {reason}.' if reason else conditions}")


def describe(device: jax.Device) -> str:
    """Kind of a device, and its compute capability and memory where JAX knows them."""
    facts = [f"{device.device_kind} ({device.platform})"]
    if capability := getattr(device, "compute_capability", None):
        facts.append(f"compute capability {capability}")
    try:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a backend that does not count
        memory = None
    if memory:
        facts.append(f"{memory / 2**30:.1f} GiB for JAX")
    return ", ".join(facts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
