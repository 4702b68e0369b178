"""specjax env: versions, devices, and the implementation that each operation uses here."""

from __future__ import annotations

import importlib.metadata
import platform

import jax

import specjax
from specjax.devices import check_platform
from specjax.kernels import dispatch
from specjax.kernels.paged_attention import api as attention

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
HEAD_DIMS = " or ".join(map(str, attention.HEADS))
PAGE_SIZES = ", ".join(map(str, attention.PAGES))
OPERATIONS = {
    "attention": f"For models in bfloat16 or float16 with head_dim {HEAD_DIMS}, at most "
    f"{attention.MAX_GROUP} query heads per kv head, and page_size {PAGE_SIZES}; other models "
    "use xla.",
    "verification": "For every vocabulary.",
}


def define_flags() -> None:
    """`specjax env` has no flags."""


def main(argv: list[str]) -> None:
    """Prints versions, devices and implementations.

    Raises:
      SpecJAXError: JAX finds no device to run on.
    """
    del argv
    check_platform()
    for name, version in _versions().items():
        print(f"{name:18}{version}")
    print()
    for device in jax.local_devices():
        print(f"device {device.id:<11}{describe(device)}")
    print()
    reason = dispatch.missing_gpu()
    for operation, conditions in OPERATIONS.items():
        print(f"{operation:18}{dispatch.choose(None)}")
        print(f"{'':18}{f'Not mosaic_gpu: {reason}.' if reason else conditions}")


def describe(device: jax.Device) -> str:
    """Kind of a device, and its compute capability and memory if JAX reports them."""
    facts = [f"{device.device_kind} ({device.platform})"]
    if capability := getattr(device, "compute_capability", None):
        facts.append(f"compute capability {capability}")
    try:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # a backend without memory statistics
        memory = None
    if memory:
        facts.append(f"{memory / 2**30:.1f} GiB for JAX")
    return ", ".join(facts)


def _versions() -> dict[str, str]:
    versions = {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    for plugin in PLUGINS:
        try:
            versions[plugin] = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
