"""The devices that JAX has, and the mesh that models run on."""

from __future__ import annotations

import os

import jax
from jax.sharding import Mesh

from specjax import parallel
from specjax.errors import SpecJAXError


def check_platform() -> None:
    """Initialises JAX's backend.

    Raises:
      SpecJAXError: JAX finds no device of the wanted platform; names the platform and a remedy.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        wanted = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS") or ""
        # JAX's reason ends with its own remedy; if a plugin is missing there is no reason.
        reason = next(iter(str(error).splitlines()), "").partition(" (set JAX_PLATFORMS")[0]
        detail = f": {reason.rstrip('.')}" if reason else ""
        if not wanted:
            raise SpecJAXError(f"JAX finds no device{detail}") from error
        raise SpecJAXError(
            f"JAX finds no device for JAX_PLATFORMS={wanted}{detail}; set JAX_PLATFORMS=cpu, or "
            "unset it to let JAX choose (a GPU requires its driver and SpecJAX's extra cuda12 or "
            "cuda13)"
        ) from error


def make_mesh(tensor_parallel: int, draft_tensor_parallel: int, data_parallel: int) -> Mesh | None:
    """Returns the mesh of all devices with these degrees; None for one device of one process.

    Raises:
      SpecJAXError: degrees that do not fit the devices, or JAX has no device.
    """
    check_platform()
    degrees = (tensor_parallel, draft_tensor_parallel, data_parallel)
    if degrees == (1, 1, 1) and jax.process_count() == 1:
        return None
    return parallel.make_mesh(*degrees)
