"""Which implementation of an operation runs: the Mosaic GPU kernel or plain jax.numpy (`xla`), and
why."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from types import ModuleType

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
HOPPER = (9, 0)
H100_PROCESSORS = 132

_compiling_for = contextvars.ContextVar("compiling_for", default=None)


def choose(implementation: str | None, unsupported: str | None = None) -> str:
    """The implementation to run: `implementation` itself, or the best one for this machine where it
    is None.

    Args:
      implementation: one of `IMPLEMENTATIONS`, or None for "mosaic_gpu" where it can run and "xla"
        elsewhere.
      unsupported: why the Mosaic GPU kernel cannot do this call; None where it can.

    Raises:
      ValueError: a name that does not exist, or "mosaic_gpu" where it cannot run. An explicit wish
        is never replaced by something else.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation {implementation!r} does not exist; there is: {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "xla":
        return "xla"
    reason = missing_gpu() or unsupported
    if implementation == "mosaic_gpu" and reason:
        raise ValueError(f"implementation 'mosaic_gpu' cannot run here: {reason}")
    return "xla" if reason else "mosaic_gpu"


def module(package: str, implementation: str) -> ModuleType:
    """The module of an operation's package that is called like the implementation, imported when it
    is first chosen: importing Pallas for GPUs takes a third of a second, which nobody on a CPU
    should wait for."""
    return importlib.import_module(f"{package}.{implementation}")


def missing_gpu() -> str | None:
    """Why no Mosaic GPU kernel of ours can run on JAX's default device; None where they can.

    The kernels use instructions of the Hopper generation (wgmma) that neither earlier nor later
    GPUs have.
    """
    capability = _compiling_for.get() or _capability()
    if capability is None:
        return f"it needs an NVIDIA GPU of compute capability 9.0 (Hopper), and JAX runs on {jax.default_backend()!r}"
    if capability != HOPPER:
        return (
            "it needs an NVIDIA GPU of compute capability 9.0 (Hopper), and this one has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


@contextlib.contextmanager
def compiling_for(capability: tuple[int, int]) -> Iterator[None]:
    """Chooses as if JAX's default device were a GPU of this compute capability: to compile for one
    that is absent.

    It counts while functions are traced. One traced before, under another choice, is not traced
      again by itself: pass
    the implementation explicitly, which is a static argument.
    """
    token = _compiling_for.set(capability)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def num_processors() -> int:
    """Streaming multiprocessors of JAX's default device; those of an H100 where that is no GPU."""
    return getattr(_device(), "core_count", None) or H100_PROCESSORS


def _device() -> jax.Device:
    default = jax.config.jax_default_device  # a device, the name of a platform, or None
    if default is None:
        return jax.devices()[0]
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _capability() -> tuple[int, int] | None:
    """Compute capability of the default device, None where that is no NVIDIA GPU."""
    device = _device()
    version = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD devices say "gfx..."
    if device.platform != "gpu" or not version[:1].isdigit():
        return None
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)
