"""specjax export: a SpecJAX checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from absl import flags

from specjax import dtypes
from specjax.cli import convert
from specjax.engine import load as checkpoint


def define_flags() -> None:
    """Defines the flags of `specjax export`."""
    flags.DEFINE_string(
        "source", None, "Checkpoint folder that `specjax convert` wrote.", required=True
    )
    flags.DEFINE_string(
        "output", None, "Hugging Face folder to write; it must not exist.", required=True
    )
    flags.DEFINE_enum(
        "dtype", None, list(dtypes.DTYPES), "dtype to write; by default the stored one."
    )


def main(argv: list[str]) -> None:
    """Runs the export that the flags ask for. Raises SpecJAXError for input that cannot be used."""
    del argv
    convert.report(checkpoint.export)
