"""Names of Pallas for Mosaic GPU that differ between the supported versions of JAX."""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def load(ref, index, *, layout, optimized: bool = False):
    """Returns `ref[index]` in the given register layout.

    Args:
      ref: a reference to shared or global memory.
      index: the index in brackets; a tuple for several axes.
      layout: a `plgpu.Layout`, or a layout that was derived from one.
      optimized: whether to require the fastest way to load, which not every pair of layouts has.
    """
    if jax.__version_info__ < (0, 11):
        return plgpu.load(ref, index, layout=layout, optimized=optimized)
    return plgpu.load(ref.at[index], layout=layout, optimized=optimized)
