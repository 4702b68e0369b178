"""The figures of `kernels.bench`, and the goals beside them, as people read them."""

from __future__ import annotations

from rich.table import Table

from specjax.kernels import bench


def table(report: bench.Report, device: str, reasons: list[str]) -> Table:
    """Figures; why one is missing goes into `reasons`, and the reason's number into the table."""
    table = Table(title=f"kernels on {device}; a share is of the rate of a copy", title_justify="left", show_edge=False,
                  caption="* part of the bytes come from the L2 cache" if any(r.in_l2 for r in report.rows) else None)
    table.add_column("operation", no_wrap=True)
    for column in ("GB/s", "share", "goal", "µs", "xla, µs", "JAX's op, µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        share = report.share(row)
        goal = "" if row.goal is None else f"≥ {row.goal:.0%}"
        if goal and share is not None:
            goal += " met" if share >= row.goal else " missed"
        rate = row.bytes / row.seconds["mosaic_gpu"] / 1e9 if share else None
        table.add_row(f"{row.operation} {row.case}{'*' if row.in_l2 else ''}", f"{rate:.0f}" if rate else "",
                      f"{share:.0%}" if share else "", goal,
                      *(_time(row, name, reasons) for name in ("mosaic_gpu", "xla", bench.PEER)))  # fmt: skip
    return table


def _time(row: bench.Row, implementation: str, reasons: list[str]) -> str:
    if implementation in row.seconds:
        return f"{1e6 * row.seconds[implementation]:.1f}"
    if implementation not in row.skipped:
        return ""  # JAX's own op cannot do that at all
    if row.skipped[implementation] not in reasons:
        reasons.append(row.skipped[implementation])
    return f"({reasons.index(row.skipped[implementation]) + 1})"


def fixed_cost(report: bench.Report) -> str:
    """A sentence on the fixed cost of a call."""
    if report.fixed_seconds is None:
        return "The fixed cost of a call was not measured."
    verdict = "met" if report.fixed_seconds < bench.FIXED_COST_GOAL else "missed"
    return (f"Fixed cost of a call of attention: {1e6 * report.fixed_seconds:.1f} µs, "
            f"goal < {1e6 * bench.FIXED_COST_GOAL:.0f} µs {verdict}.")  # fmt: skip
