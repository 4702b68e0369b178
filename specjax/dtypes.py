"""The dtypes that parameters may have, by name."""

from __future__ import annotations

from collections.abc import Iterable

import ml_dtypes
import numpy as np

from specjax.errors import SpecJAXError

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def dtype_name(dtype) -> str:
    """Returns the key in DTYPES of anything that numpy or jax accepts as a dtype.

    Raises:
      SpecJAXError: for any other dtype.
    """
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype, dtype)
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise SpecJAXError(f"unsupported dtype {name!r}; choose from {', '.join(DTYPES)}")
    return name


def widest(names: Iterable[str]) -> str:
    """Returns the smallest dtype, as a key of DTYPES, that holds every one of `names` exactly."""
    distinct = set(names)
    if len(distinct) == 1:
        return distinct.pop()
    return "float32"
