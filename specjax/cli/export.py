"""specjax export: exports a SpecJAX checkpoint as a Hugging Face folder."""

from __future__ import annotations

from absl import flags

from specjax.cli import convert
from specjax.cli import flags as common_flags
from specjax.dtypes import DTYPES
from specjax.engine import load

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax export`."""
    common_flags.define_path(
        "source", None, "Checkpoint folder that `specjax convert` wrote.", required=True
    )
    common_flags.define_path(
        "output", None, "Hugging Face folder to write; it must not exist.", required=True
    )
    flags.DEFINE_enum("dtype", None, list(DTYPES), "dtype to write; by default the stored one.")


def main(argv: list[str]) -> None:
    """Runs the export with the values of the flags."""
    del argv
    convert.write_with_progress(load.export, FLAGS.source, FLAGS.output, FLAGS.dtype)
