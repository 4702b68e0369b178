"""Pictures as PNG files."""

from __future__ import annotations

import os
import pathlib

import matplotlib

from specjax.errors import SpecJAXError


def two_charts():
    """A figure with two axes beside each other, and these."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")


def save(figure, path: str | os.PathLike) -> None:
    """Writes a figure as a PNG file, which appears when it is complete, and closes it. Raises SpecJAXError where it
    cannot be written."""
    from matplotlib import pyplot

    partial = pathlib.Path(f"{path}.incomplete-{os.getpid()}")
    try:
        figure.savefig(partial, dpi=120, format="png")
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SpecJAXError(f"cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)
