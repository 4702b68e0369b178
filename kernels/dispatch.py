"""Chooses which implementation of an operation runs.

mosaic_gpu  the Pallas kernels for Mosaic GPU
xla         plain jax.numpy, on any device
interpret   the Mosaic GPU kernels in Pallas' interpreter, on a CPU: slow, for tests
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "interpret")
HOPPER = (9, 0)
H100_PROCESSORS = 132

_compiling_for = contextvars.ContextVar("compiling_for", default=None)


def choose(implementation: str | None, unsupported: str | None = None) -> str:
    """Returns the implementation to run: the given one, or the best one for this machine.

    Args:
      implementation: one of `IMPLEMENTATIONS`, or None for "mosaic_gpu" where it can run and "xla"
        elsewhere. An explicit choice is never replaced by another.
      unsupported: why the Mosaic GPU kernel cannot run this call; None where it can.

    Raises:
      ValueError: for an unknown name, or an explicit choice that cannot run.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        choices = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"unknown implementation {implementation!r}; choose from {choices}")
    if implementation == "xla":
        return "xla"
    missing = missing_interpreter() if implementation == "interpret" else missing_gpu()
    reason = missing or unsupported
    if implementation and reason:
        raise ValueError(f"implementation {implementation!r} cannot run here: {reason}")
    if implementation == "interpret":
        return "interpret"
    return "xla" if reason else "mosaic_gpu"


def function(package: str, name: str, implementation: str) -> Callable:
    """Returns the function of this name from the module of an implementation.

    The module is imported when it is first chosen: importing Pallas for GPUs takes a third of a
    second, which no one on a CPU should have to wait for.

    Args:
      package: package of the operation; its modules are named like the implementations, and
        "interpret" is the function in "mosaic_gpu" with the argument `interpret`.
      name: name of the function.
      implementation: what `choose` returned.
    """
    is_interpreted = implementation == "interpret"
    module_name = "mosaic_gpu" if is_interpreted else implementation
    module = importlib.import_module(f"{package}.{module_name}")
    found = getattr(module, name)
    if not is_interpreted:
        return found
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return functools.partial(found, interpret=plgpu.InterpretGPUParams())


def missing_gpu() -> str | None:
    """Returns why no Mosaic GPU kernel can run on JAX's default device; None where they can.

    The kernels use instructions of the Hopper generation (wgmma) that neither earlier nor later
    GPUs have.
    """
    capability = _compiling_for.get() or _capability()
    if capability == HOPPER:
        return None
    required = "requires an NVIDIA GPU of compute capability 9.0 (Hopper)"
    if capability is None:
        return f"{required}, but JAX runs on {jax.default_backend()!r}"
    return f"{required}, got {capability[0]}.{capability[1]}"


def missing_interpreter() -> str | None:
    """Returns why Pallas' interpreter cannot run Mosaic GPU kernels; None where it can."""
    if jax.__version_info__ >= (0, 11):
        return None
    return f"requires jax 0.11 or newer for Pallas' GPU interpreter, got {jax.__version__}"


@contextlib.contextmanager
def compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Chooses as if JAX's default device were a GPU of this compute capability.

    This is for compiling for an absent GPU. It takes effect while functions are traced. A function
    that was traced before, under another choice, is not traced again by itself: pass the
    implementation explicitly, which is a static argument.
    """
    token = _compiling_for.set(capability)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def num_processors() -> int:
    """Returns the streaming multiprocessors of JAX's default device; of an H100 if it is no GPU."""
    return getattr(_device(), "core_count", None) or H100_PROCESSORS


def _device() -> jax.Device:
    default = jax.config.jax_default_device  # a device, the name of a platform, or None
    if default is None:
        return jax.devices()[0]
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _capability() -> tuple[int, int] | None:
    """Returns the compute capability of the default device, None where it is no NVIDIA GPU."""
    device = _device()
    version = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD devices have "gfx..."
    if device.platform != "gpu" or not version[:1].isdigit():
        return None
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
