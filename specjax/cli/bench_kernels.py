"""specjax bench kernels: our kernels on this GPU: whether they are right, and how fast beside what
its memory can do.

Exit code 1: a kernel is wrong or failed; the figures do not count then. A goal that is missed is
only shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import jax
from absl import flags
from rich.table import Table

from specjax.cli import common, jsonl
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.gpu import bench
from specjax.kernels.paged_attention.api import PAGES

FLAGS = flags.FLAGS
PAGE_SIZES = f"{', '.join(map(str, PAGES[:-1]))} or {PAGES[-1]}"


def define_flags() -> None:
    """Defines the flags of `specjax bench kernels`."""
    flags.DEFINE_string(
        "output", None, "JSON file to write the figures to; it must not exist.", required=True
    )
    flags.DEFINE_integer("page_size", 64, f"Positions per page: {PAGE_SIZES}.")
    flags.DEFINE_float(
        "budget_seconds", 200, "What is not measured by then is left out, and the table says so."
    )
    flags.DEFINE_boolean(
        "tiny",
        False,
        "Tiny sizes, in Pallas' interpreter where no GPU can run the kernels: to see "
        "that everything runs. The figures mean nothing.",
    )


def main(argv: list[str]) -> int:
    """Runs the benchmark. Returns the exit code."""
    del argv
    jsonl.refuse_existing(FLAGS.output)
    if FLAGS.page_size not in PAGES:
        raise SpecJAXError(f"--page_size must be {PAGE_SIZES}, got {FLAGS.page_size}")
    if not 0 < FLAGS.budget_seconds < float("inf"):
        raise SpecJAXError(
            f"--budget_seconds must be a positive number, got {FLAGS.budget_seconds}"
        )
    missing = dispatch.missing_gpu()
    if missing and not FLAGS.tiny:
        raise SpecJAXError(f"the kernels cannot run here: {missing}")
    try:
        with bench.interpreted() if missing else contextlib.nullcontext():
            report = bench.run(
                bench.TINY if FLAGS.tiny else bench.FULL,
                page_size=FLAGS.page_size,
                budget_seconds=FLAGS.budget_seconds,
            )
    except NotImplementedError as error:
        raise SpecJAXError(f"the kernels cannot run here: {error}") from error
    device = str(jax.devices()[0].device_kind)
    console, reasons = common.console(), []
    console.print(table(report, device, reasons))
    for i, reason in enumerate(reasons):
        print(f"({i + 1}) not measured: {reason}")
    for failure in report.failures:
        print(f"specjax: failed: {failure}", file=sys.stderr)
    print(
        f"{len(report.checks)} checks, {len(report.failures)} failures, {report.seconds:.0f} s."
        + (
            f" A copy on this card: {report.copy_bytes_per_second / 1e9:.0f} GB/s, read and written bytes together."
            f" {fixed_cost(report)}"
            if report.rows
            else ""
        )
    )
    result = {
        "interpreted": bool(missing),
        "fixed_seconds": report.fixed_seconds,
        **dataclasses.asdict(report),
    }
    for row, figures in zip(report.rows, result["rows"], strict=True):
        figures["share"] = {name: report.share(row, name) for name in row.seconds}
    common.write_figures(__name__, result)
    return 1 if report.failures else 0


def table(report: bench.Report, device: str, reasons: list[str]) -> Table:
    """Figures; why one is missing goes into `reasons`, and the reason's number into the table."""
    lines = []
    for row in report.rows:
        share = report.share(row)
        goal = "" if row.goal is None else f"≥ {row.goal:.0%}"
        if goal and share is not None:
            goal += " met" if share >= row.goal else " missed"
        rate = row.bytes / row.seconds["mosaic_gpu"] / 1e9 if share else None
        lines.append(
            (
                f"{row.operation} {row.case}{'*' if row.in_l2 else ''}",
                f"{rate:.0f}" if rate else "",
                f"{share:.0%}" if share else "",
                goal,
                *(_time(row, name, reasons) for name in ("mosaic_gpu", "xla", bench.BASELINE)),
            )
        )
    cached = any(row.in_l2 for row in report.rows)
    return common.table(
        f"kernels on {device}; a share is of the rate of a copy",
        ("operation", "GB/s", "share", "goal", "µs", "xla, µs", "JAX's op, µs"),
        lines,
        no_wrap=True,
        caption="* part of the bytes come from the L2 cache" if cached else None,
    )


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
    return (
        f"Fixed cost of a call of attention: {1e6 * report.fixed_seconds:.1f} µs, "
        f"goal < {1e6 * bench.FIXED_COST_GOAL:.0f} µs {verdict}."
    )
