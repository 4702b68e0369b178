"""Charts of a training run."""

from __future__ import annotations

import pathlib

import numpy as np

from specjax.report import plots
from specjax.train import evaluate

WINDOW = 25  # steps that curves are averaged over


def draw(history: list[dict], path: pathlib.Path) -> None:
    """Writes a PNG of the loss and of the acceptance rates.

    Args:
      history: records of steps and of evaluations, see `loop.Result`.
      path: file to write.
    """
    steps = [record for record in history if "loss" in record]
    evaluations = [record for record in history if "held_out" in record]
    figure, (loss_axes, acceptance_axes) = plots.two_charts()
    _draw_loss(loss_axes, steps)
    _draw_acceptance_in_training(acceptance_axes, steps)
    if evaluations:
        _draw_acceptance_on_held_out_rows(acceptance_axes, evaluations)
    plots.save(figure, path)


def _draw_loss(axes, steps: list[dict]) -> None:
    axes.plot(_column(steps, "step"), _smooth(_column(steps, "loss")))
    axes.set(xlabel="step", ylabel="loss", title="Loss of each step, smoothed")


def _draw_acceptance_in_training(axes, steps: list[dict]) -> None:
    """Draws a pale curve for each draft position; early steps may have fewer positions."""
    axes.set(
        xlabel="step",
        ylabel="share of drafts accepted",
        title="Pale: training rows, among the tokens that can be drafted",
    )
    num_positions = max((len(record["accepted"]) for record in steps), default=0)
    for i in range(num_positions):
        chosen = [record for record in steps if len(record["accepted"]) > i]
        accepted = [record["accepted"][i] for record in chosen]
        axes.plot(_column(chosen, "step"), _smooth(accepted), alpha=0.4, color=f"C{i}")


def _draw_acceptance_on_held_out_rows(axes, evaluations: list[dict]) -> None:
    """Draws a curve for each draft position."""
    scores = [evaluate.read_scores(record["held_out"]) for record in evaluations]
    rates = np.array([evaluate.summary(of_step) for of_step in scores])
    for i in range(rates.shape[1]):
        label = f"held out, draft position {i + 1}"
        axes.plot(_column(evaluations, "step"), rates[:, i], "o-", color=f"C{i}", label=label)
    axes.legend()


def _column(records: list[dict], name: str) -> list[float]:
    return [record[name] for record in records]


def _smooth(values: list[float]) -> np.ndarray:
    """The moving average: of each value and up to `WINDOW - 1` values before it."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
