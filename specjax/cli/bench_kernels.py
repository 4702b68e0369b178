"""specjax bench kernels: whether our kernels are right on this GPU, and how fast they are.

Rates are compared with the bandwidth of the GPU's memory. Exit code 1: a kernel is wrong or failed,
and the figures are invalid. A missed goal is only reported.
"""

from __future__ import annotations

import dataclasses
import sys

import jax
from absl import flags

from specjax.bench import kernels
from specjax.cli import flags as common_flags
from specjax.cli import outputs
from specjax.devices import check_platform
from specjax.errors import SpecJAXError
from specjax.kernels import dispatch
from specjax.kernels.gpu import bench
from specjax.kernels.paged_attention.api import PAGES
from specjax.report import provenance, tables

FLAGS = flags.FLAGS
PAGE_SIZES = f"{', '.join(map(str, PAGES[:-1]))} or {PAGES[-1]}"


def define_flags() -> None:
    """Defines the flags of `specjax bench kernels`."""
    common_flags.define_figures_output(required=True)
    flags.DEFINE_integer("page_size", 64, f"Positions per page: {PAGE_SIZES}.")
    flags.DEFINE_float(
        "budget_seconds", 200, "Measurements beyond this time are left out, and listed."
    )
    flags.DEFINE_boolean(
        "tiny",
        False,
        "Tiny sizes, in Pallas' interpreter where no GPU can run the kernels: shows that "
        "everything runs. The figures are meaningless.",
    )


def main(argv: list[str]) -> int:
    """Runs the benchmark with the values of the flags. Returns the exit code."""
    del argv
    invocation = common_flags.invocation(__name__)
    return run(
        FLAGS.output,
        page_size=FLAGS.page_size,
        budget_seconds=FLAGS.budget_seconds,
        is_tiny=FLAGS.tiny,
        invocation=invocation,
    )


def run(
    output: str,
    *,
    page_size: int,
    budget_seconds: float,
    is_tiny: bool,
    invocation: provenance.Invocation,
) -> int:
    """Checks and measures the kernels, prints the table and writes the figures.

    Returns:
      The exit code: 1 where a kernel is wrong.
    """
    check_platform()
    outputs.check_output(output)
    if page_size not in PAGES:
        raise SpecJAXError(f"--page_size must be {PAGE_SIZES}, got {page_size}")
    if not 0 < budget_seconds < float("inf"):
        raise SpecJAXError(f"--budget_seconds must be a positive number, got {budget_seconds}")
    missing = dispatch.missing_gpu()
    if missing and not is_tiny:
        raise SpecJAXError(f"the kernels cannot run here: {missing}")
    sizes = bench.TINY if is_tiny else bench.FULL
    try:
        implementation = dispatch.choose("interpret" if missing else "mosaic_gpu")
    except ValueError as error:
        raise SpecJAXError(str(error)) from error
    report = bench.run(
        sizes,
        page_size=page_size,
        budget_seconds=budget_seconds,
        implementation=implementation,
    )
    table, reasons = kernels.table(report, str(jax.devices()[0].device_kind))
    tables.wide_console().print(table)
    for i, reason in enumerate(reasons, 1):
        print(f"({i}) not measured: {reason}")
    for failure in report.failures:
        print(f"specjax: failed: {failure}", file=sys.stderr)
    print(kernels.summary(report))
    figures = {
        "interpreted": bool(missing),
        "fixed_seconds": report.fixed_seconds,
        **dataclasses.asdict(report),
    }
    for row, fields in zip(report.rows, figures["rows"], strict=True):
        fields["share"] = {name: report.share(row, name) for name in row.seconds}
    provenance.write_figures(output, figures, invocation)
    return 1 if report.failures else 0
