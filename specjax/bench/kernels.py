"""specjax bench kernels: the table of what `specjax.kernels.gpu.bench` measures."""

from __future__ import annotations

from rich.table import Table

from specjax.kernels.gpu import bench
from specjax.report import tables

IMPLEMENTATIONS = ("mosaic_gpu", "xla", bench.BASELINE)


def table(report: bench.Report, device: str) -> tuple[Table, list[str]]:
    """One line per operation and size.

    Returns:
      The table, and the reasons why figures are missing. A missing figure is the number of its
      reason, from 1, in brackets.
    """
    reasons: list[str] = []
    lines = []
    for row in report.rows:
        share = report.share(row)
        rate = row.bytes / row.seconds["mosaic_gpu"] / 1e9 if share else None
        times = [_time(row, implementation, reasons) for implementation in IMPLEMENTATIONS]
        lines.append(
            (
                f"{row.operation} {row.case}{'*' if row.in_l2 else ''}",
                f"{rate:.0f}" if rate else "",
                f"{share:.0%}" if share else "",
                _goal(row, share),
                *times,
            )
        )
    is_cached = any(row.in_l2 for row in report.rows)
    result = tables.table(
        f"kernels on {device}; shares are of the rate of a copy",
        ("operation", "GB/s", "share", "goal", "µs", "xla, µs", "JAX's op, µs"),
        lines,
        no_wrap=True,
        caption="* part of the bytes come from the L2 cache" if is_cached else None,
    )
    return result, reasons


def _goal(row: bench.Row, share: float | None) -> str:
    if row.goal is None:
        return ""
    goal = f"≥ {row.goal:.0%}"
    if share is None:
        return goal
    return f"{goal} {'met' if share >= row.goal else 'missed'}"


def _time(row: bench.Row, implementation: str, reasons: list[str]) -> str:
    if implementation in row.seconds:
        return f"{1e6 * row.seconds[implementation]:.1f}"
    if implementation not in row.skipped:
        return ""  # JAX's own op does not support this case
    reason = row.skipped[implementation]
    if reason not in reasons:
        reasons.append(reason)
    return f"({reasons.index(reason) + 1})"


def summary(report: bench.Report) -> str:
    """A line with the number of checks and failures, the copy's rate and the fixed cost."""
    counts = (
        f"{len(report.checks)} checks, {len(report.failures)} failures, {report.seconds:.0f} s."
    )
    if not report.rows:
        return counts
    copy = f"{report.copy_bytes_per_second / 1e9:.0f} GB/s"
    return (
        f"{counts} A copy on this card: {copy}, read and written bytes together. "
        f"{fixed_cost(report)}"
    )


def fixed_cost(report: bench.Report) -> str:
    """A sentence on the fixed cost of a call of attention."""
    if report.fixed_seconds is None:
        return "The fixed cost of a call was not measured."
    verdict = "met" if report.fixed_seconds < bench.FIXED_COST_GOAL else "missed"
    return (
        f"Fixed cost of a call of attention: {1e6 * report.fixed_seconds:.1f} µs, "
        f"goal < {1e6 * bench.FIXED_COST_GOAL:.0f} µs {verdict}."
    )
