"""Pictures of benchmark results."""

from __future__ import annotations

from specjax import plots
from specjax.bench.saturation import Point


def saturation(points: list[Point], title: str, path: str) -> None:
    """Two charts as a PNG: the speedup of each K against the batch, and tokens per second of all rows together."""
    figure, (left, right) = plots.two_charts()
    batch = [point.batch_size for point in points]
    for k in points[0].speculative:
        left.plot(batch, [point.speculative[k] / point.plain for point in points], "o-", label=f"K = {k}")
        right.plot(batch, [point.speculative[k] for point in points], "o-", label=f"K = {k}")
    left.axhline(1, color="black", linewidth=1)
    right.plot(batch, [point.plain for point in points], "o-", color="black", label="plain")
    for axes, ylabel in ((left, "speedup over plain decoding"), (right, "tokens/s of all rows")):
        axes.set(xscale="log", xlabel="batch", ylabel=ylabel, title=title)
        axes.set_xticks(batch, [str(size) for size in batch], minor=False)
        axes.minorticks_off()
        axes.legend()
    plots.save(figure, path)
