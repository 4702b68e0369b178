"""A picture of a training run."""

from __future__ import annotations

import pathlib

import numpy as np

from specjax.report import plots
from specjax.train import evaluate
from specjax.train.evaluate import Score


def draw(history: list[dict], path: pathlib.Path) -> None:
    """Writes a PNG: the loss, the acceptance on the rows of each step, and on held-out rows where
    these were looked at."""
    figure, (left, right) = plots.two_charts()
    steps = [record for record in history if "loss" in record]
    left.plot([record["step"] for record in steps], _smooth([record["loss"] for record in steps]))
    left.set(xlabel="step", ylabel="loss", title="Loss of each step, smoothed")
    depth = max((len(record["accepted"]) for record in steps), default=0)
    for i in range(depth):
        chosen = [record for record in steps if len(record["accepted"]) > i]
        right.plot(
            [record["step"] for record in chosen],
            _smooth([record["accepted"][i] for record in chosen]),
            alpha=0.4,
            color=f"C{i}",
        )
    looked = [record for record in history if "held_out" in record]
    held_out = [
        evaluate.summary([Score(**score) for score in record["held_out"]]) for record in looked
    ]
    for i in range(len(held_out[0]) if held_out else 0):
        right.plot(
            [record["step"] for record in looked],
            [means[i] for means in held_out],
            "o-",
            color=f"C{i}",
            label=f"held out, draft position {i + 1}",
        )
    right.set(
        xlabel="step",
        ylabel="share of drafts accepted",
        title="Pale: training rows, among the tokens that can be guessed",
    )
    if held_out:
        right.legend()
    plots.save(figure, path)


def _smooth(values: list[float], window: int = 25) -> np.ndarray:
    """The mean over the last so many."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
