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
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        if not wanted:
            raise SpecJAXError(f"JAX finds no device: {reason}") from error
        # JAX's reason repeats the platform and its own remedy; without one it is an assertion.
        reason = reason.partition(" (set JAX_PLATFORMS")[0]
        raise SpecJAXError(
            f"JAX finds no device for JAX_PLATFORMS={wanted}"
            f"{f' ({reason})' if reason else ''}: choose another platform, such as "
            "JAX_PLATFORMS=cpu, or unset it to let JAX choose; GPUs need a driver and "
            "`pip install 'specjax[cuda12]'`"
        ) from error
