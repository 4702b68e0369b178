"""Whether JAX has a device to run on."""

from __future__ import annotations

import os

import jax

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
