"""specjax convert: a Hugging Face folder or a GGUF file becomes a SpecJAX checkpoint."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

from absl import flags
from rich import progress as progress_lib
from rich.console import Console

from specjax import dtypes
from specjax.checkpoints_convert import table
from specjax.engine import load as checkpoint

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax convert`."""
    flags.DEFINE_string("source", None, "Hugging Face Llama folder, or .gguf file.", required=True)
    flags.DEFINE_string(
        "output", None, "Checkpoint folder to write; it must not exist.", required=True
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        list(dtypes.DTYPES),
        "dtype to write. By default that of the source; float32 for quantised GGUF.",
    )


def main(argv: list[str]) -> None:
    """Runs the conversion that the flags ask for. Raises SpecJAXError for input that cannot be
    used."""
    del argv
    report(checkpoint.convert)


def report(write: Callable[..., table.CheckpointReader]) -> None:
    """Runs `checkpoint.convert` or `checkpoint.export` with a progress bar on a terminal, and says
    what was written."""
    console = Console()
    start = time.perf_counter()
    with progress_lib.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("writing", total=None)
        opened = write(
            FLAGS.source,
            FLAGS.output,
            FLAGS.dtype,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    count = table.num_parameters(opened.config)
    size = sum(
        path.stat().st_size for path in pathlib.Path(FLAGS.output).rglob("*") if path.is_file()
    )
    print(
        f"wrote {FLAGS.output}: {count:,} parameters in {opened.dtype}, {size / 1e6:,.1f} MB, "
        f"{time.perf_counter() - start:.1f} s"
    )
