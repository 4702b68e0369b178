"""Speedup against batch: where the target's pass over K + 1 tokens is no longer nearly free."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specjax.engine import generate as generation
from specjax.engine.load import Model
from specjax.report import plots


@dataclasses.dataclass(frozen=True)
class Point:
    """Rates of all rows together, in tokens per second of the decode loop, medians over repeats.

    Attributes:
      batch_size: rows.
      plain: without speculation.
      speculative: by K.
    """

    batch_size: int
    plain: float
    speculative: dict[int, float]

    @property
    def best(self) -> int:
        """The K that is fastest; 0 where plain decoding is."""
        k = max(self.speculative, key=self.speculative.__getitem__)
        return k if self.speculative[k] > self.plain else 0

    @property
    def speedup(self) -> float:
        """Of the fastest K."""
        return max(self.speculative.values()) / self.plain


def measure(
    target: Model,
    prompts: Sequence[tuple[int, ...]],
    drafter: dict[str, Any],
    *,
    batch_sizes: Sequence[int],
    num_speculative_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    repeats: int,
    common: dict[str, Any],
    on_point: Callable[[Point], None] | None = None,
) -> list[Point]:
    """Decodes all prompts at every batch size, in as many batches as that takes, each plainly and
    with each K in turn. Where the last batch would not be full, prompts from all over the list are
    decoded again.

    Args:
      target: the model.
      prompts: token ids.
      drafter: "drafter", "draft" and "drafter_options" of `generation.generate`; another K in it
        does not matter.
      batch_sizes: to measure.
      num_speculative_tokens: the values of K.
      max_new_tokens: generated tokens of every row; end-of-sequence tokens are ignored, so that
        without drafts no row ends early. With drafts rows end after different numbers of rounds,
        and a batch with the last of them.
      temperature: of all rows.
      repeats: of everything.
      common: "verify", "page_size" and "implementation" of `generation.generate`.
      on_point: called with each point.
    """
    points = []
    for batch_size in batch_sizes:
        rows = -(-len(prompts) // batch_size) * batch_size
        batches = np.split(np.arange(rows) * len(prompts) // rows, rows // batch_size)
        options = dict(max_new_tokens=max_new_tokens, temperature=temperature, eos_ids=(), **common)
        rates: dict[int, list[float]] = {k: [] for k in (0, *num_speculative_tokens)}
        for _ in range(repeats):
            runs: dict[int, list[generation.Generation]] = {k: [] for k in rates}
            for batch in batches:
                for k in rates:
                    arguments = (
                        drafter | {"num_speculative_tokens": k} if k else {"drafter": "none"}
                    )
                    runs[k].append(
                        generation.generate(
                            target,
                            prompts=[prompts[i] for i in batch],
                            seed=batch.tolist(),
                            **arguments,
                            **options,
                        )
                    )
            for k, seen in rates.items():
                seen.append(
                    sum(len(completion.tokens) for run in runs[k] for completion in run.completions)
                    / sum(run.decode_seconds for run in runs[k])
                )
        medians = {k: float(np.median(seen)) for k, seen in rates.items()}
        points.append(Point(batch_size, medians.pop(0), medians))
        if on_point:
            on_point(points[-1])
    return points


def draw(points: list[Point], title: str, path: str) -> None:
    """Two charts as a PNG: the speedup of each K against the batch, and tokens per second of all
    rows together."""
    figure, (left, right) = plots.two_charts()
    batch = [point.batch_size for point in points]
    for k in points[0].speculative:
        left.plot(
            batch, [point.speculative[k] / point.plain for point in points], "o-", label=f"K = {k}"
        )
        right.plot(batch, [point.speculative[k] for point in points], "o-", label=f"K = {k}")
    left.axhline(1, color="black", linewidth=1)
    right.plot(batch, [point.plain for point in points], "o-", color="black", label="plain")
    for axes, ylabel in ((left, "speedup over plain decoding"), (right, "tokens/s of all rows")):
        axes.set(xscale="log", xlabel="batch", ylabel=ylabel, title=title)
        axes.set_xticks(batch, [str(size) for size in batch], minor=False)
        axes.minorticks_off()
        axes.legend()
    plots.save(figure, path)
