"""Pictures as PNG files."""

from __future__ import annotations

import os

from specjax import files


def two_charts():
    """A figure with two axes side by side, and these axes. No window: `pyplot` is not used."""
    # Here, since the import takes half a second, which only commands with plots should wait for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    return figure, figure.subplots(1, 2)


def save(figure, path: str | os.PathLike) -> None:
    """Writes a figure as a PNG file, which appears when it is complete. Raises SpecJAXError where
    it cannot be."""
    with files.new_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
