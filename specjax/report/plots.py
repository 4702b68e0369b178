"""Pictures as PNG files."""

from __future__ import annotations

import os

from specjax import files


def two_charts():
    """A figure with two axes beside each other, and these. It is no window's: `pyplot` is not
    involved."""
    from matplotlib.figure import (
        Figure,
    )  # half a second, which commands that draw nothing need not wait

    figure = Figure(figsize=(11, 4), layout="constrained")
    return figure, figure.subplots(1, 2)


def save(figure, path: str | os.PathLike) -> None:
    """Writes a figure as a PNG file, which appears when it is complete. Raises SpecJAXError where
    it cannot be."""
    with files.new_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
