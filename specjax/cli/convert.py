"""specjax convert: converts a Hugging Face folder or a GGUF file to a SpecJAX checkpoint."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from absl import flags
from rich import progress as progress_lib
from rich.console import Console

from specjax.checkpoints_convert import table
from specjax.cli import flags as common_flags
from specjax.devices import check_platform
from specjax.dtypes import DTYPES
from specjax.engine import load

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax convert`."""
    common_flags.define_path(
        "source",
        None,
        "Hugging Face Llama folder or repository, or .gguf file.",
        required=True,
    )
    common_flags.define_path(
        "output", None, "Checkpoint folder to write; it must not exist.", required=True
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        list(DTYPES),
        "dtype to write; by default that of the source, float32 for quantised GGUF.",
    )


def main(argv: list[str]) -> None:
    """Runs the conversion with the values of the flags."""
    del argv
    write_with_progress(load.convert, FLAGS.source, FLAGS.output, FLAGS.dtype)


def write_with_progress(
    write: Callable[..., table.CheckpointReader], source: str, output: str, dtype: str | None
) -> None:
    """Converts or exports with a progress bar on a terminal, and prints what was written.

    Args:
      write: `load.convert` or `load.export`.
      source: path to read.
      output: path to write.
      dtype: dtype to write; None for the default.

    Raises:
      SpecJAXError: for a source that cannot be used or an output that cannot be written, or JAX
        has no device.
    """
    check_platform()
    console = Console()
    start = time.perf_counter()
    with progress_lib.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("writing", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        opened = write(source, output, dtype, progress=show)
    count = table.num_parameters(opened.config)
    paths = [path for path in pathlib.Path(output).rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    print(
        f"wrote {output}: {count:,} parameters in {opened.dtype}, {megabytes:,.1f} MB, "
        f"{time.perf_counter() - start:.1f} s"
    )
