"""A picture of a training run."""

from __future__ import annotations

import pathlib

import numpy as np

from specjax.report import plots
from specjax.train import evaluate

WINDOW = 25  # steps that curves are averaged over


def draw(history: list[dict], path: pathlib.Path) -> None:
    """Writes a PNG: the loss, and acceptance on the rows of each step and on held-out rows."""
    figure, (left, right) = plots.two_charts()
    steps = [record for record in history if "loss" in record]
    left.plot(_column(steps, "step"), _smooth(_column(steps, "loss")))
    left.set(xlabel="step", ylabel="loss", title="Loss of each step, smoothed")
    _draw_training_rows(right, steps)
    _draw_held_out_rows(right, [record for record in history if "held_out" in record])
    right.set(
        xlabel="step",
        ylabel="share of drafts accepted",
        title="Pale: training rows, among the tokens that can be drafted",
    )
    plots.save(figure, path)


def _draw_training_rows(axes, steps: list[dict]) -> None:
    num_positions = max((len(record["accepted"]) for record in steps), default=0)
    for i in range(num_positions):
        chosen = [record for record in steps if len(record["accepted"]) > i]
        accepted = [record["accepted"][i] for record in chosen]
        axes.plot(_column(chosen, "step"), _smooth(accepted), alpha=0.4, color=f"C{i}")


def _draw_held_out_rows(axes, evaluations: list[dict]) -> None:
    if not evaluations:
        return
    means = []
    for record in evaluations:
        means.append(evaluate.summary(evaluate.read_scores(record["held_out"])))
    for i, values in enumerate(zip(*means, strict=True)):
        label = f"held out, draft position {i + 1}"
        axes.plot(_column(evaluations, "step"), values, "o-", color=f"C{i}", label=label)
    axes.legend()


def _column(records: list[dict], name: str) -> list[float]:
    return [record[name] for record in records]


def _smooth(values: list[float]) -> np.ndarray:
    """Returns the mean over the last `WINDOW` values, for each of them."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
