"""specjax bench saturation: speedup against batch size, and the best K for each batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table

from specjax.engine.request import Generation
from specjax.engine.setup import Setup, Speculation
from specjax.report import plots, tables


@dataclasses.dataclass(frozen=True)
class Point:
    """Rates of all rows of a batch together.

    In tokens per second of the decode loop, medians over repeats.

    Attributes:
      batch_size: rows.
      plain: without speculation.
      speculative: with speculation, by K.
    """

    batch_size: int
    plain: float
    speculative: dict[int, float]

    @property
    def best(self) -> int:
        """The fastest K; 0 where plain decoding is fastest."""
        k = max(self.speculative, key=self.speculative.__getitem__)
        return k if self.speculative[k] > self.plain else 0

    @property
    def speedup(self) -> float:
        """Speedup of the fastest K."""
        return max(self.speculative.values()) / self.plain


def measure(
    setup: Setup,
    prompts: Sequence[tuple[int, ...]],
    speculation: Speculation,
    *,
    batch_sizes: Sequence[int],
    draft_lengths: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    repeats: int,
    on_point: Callable[[Point], None] | None = None,
) -> list[Point]:
    """Decodes all prompts at every batch size, plainly and with each K in turn.

    If the last batch would not be full, it is filled with prompts from all over the list.

    Args:
      setup: the target and how it is run.
      prompts: token ids.
      speculation: the drafter; its own K is not used.
      batch_sizes: batch sizes to measure.
      draft_lengths: the values of K.
      max_new_tokens: generated tokens of every row; end-of-sequence tokens are ignored, so that
        without drafts no row ends early. With drafts rows end after different numbers of rounds,
        and a batch with the last of them.
      temperature: temperature of all rows.
      repeats: number of runs.
      on_point: called with each point.
    """
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "eos_ids": ()}
    by_k = {0: None}
    for k in draft_lengths:
        by_k[k] = speculation._replace(num_speculative_tokens=k)
    points = []
    for batch_size in batch_sizes:
        batches = _batches(len(prompts), batch_size)
        rates = {k: [] for k in by_k}
        for _ in range(repeats):
            runs: dict[int, list[Generation]] = {k: [] for k in by_k}
            for batch in batches:
                texts = [prompts[i] for i in batch]
                for k, each in by_k.items():
                    runs[k].append(setup.generate(each, texts, seed=batch, **options))
            for k, of_k in runs.items():
                rates[k].append(tables.tokens_per_second(of_k))
        medians = {k: float(np.median(of_k)) for k, of_k in rates.items()}
        plain = medians.pop(0)
        points.append(Point(batch_size, plain, medians))
        if on_point:
            on_point(points[-1])
    return points


def _batches(num_prompts: int, batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each batch."""
    num_batches = -(-num_prompts // batch_size)
    rows = num_batches * batch_size
    indices = np.arange(rows) * num_prompts // rows
    return indices.reshape(num_batches, batch_size).tolist()


def table(points: list[Point]) -> Table:
    """One line per batch size."""
    ks = list(points[0].speculative)
    lines = []
    for point in points:
        rates = [f"{rate:.1f} ({rate / point.plain:.2f}x)" for rate in point.speculative.values()]
        best = str(point.best) if point.best else "none"
        lines.append(
            (str(point.batch_size), f"{point.plain:.1f}", *rates, best, f"{point.speedup:.2f}x")
        )
    headings = [f"K = {k}" for k in ks]
    columns = ("batch", "plain", *headings, "best K", "its speedup")
    return tables.table("tokens/s of all rows together", columns, lines, num_texts=0)


def plot(points: list[Point], title: str, path: str) -> None:
    """Writes a PNG with two charts against the batch size: speedup, and tokens/s of all rows."""
    figure, (left, right) = plots.two_charts()
    batch = [point.batch_size for point in points]
    for k in points[0].speculative:
        rates = [point.speculative[k] for point in points]
        speedups = [point.speculative[k] / point.plain for point in points]
        left.plot(batch, speedups, "o-", label=f"K = {k}")
        right.plot(batch, rates, "o-", label=f"K = {k}")
    left.axhline(1, color="black", linewidth=1)
    plain = [point.plain for point in points]
    right.plot(batch, plain, "o-", color="black", label="plain")
    for axes, ylabel in ((left, "speedup over plain decoding"), (right, "tokens/s of all rows")):
        axes.set(xscale="log", xlabel="batch", ylabel=ylabel, title=title)
        axes.set_xticks(batch, [str(size) for size in batch], minor=False)
        axes.minorticks_off()
        axes.legend()
    plots.save(figure, path)
