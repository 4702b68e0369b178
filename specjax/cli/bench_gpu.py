"""specjax bench gpu: a GPU's speed without real weights: a random 8B target and draft model."""

from __future__ import annotations

import dataclasses
import time

from absl import flags

from specjax.bench import gpu
from specjax.cli import flags as common_flags
from specjax.cli import outputs
from specjax.devices import check_platform
from specjax.dtypes import DTYPES
from specjax.engine import generate as generation
from specjax.engine import load
from specjax.report import provenance, tables

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench gpu`."""
    common_flags.define_target(
        "Folder with the config.json of the target's shape, such as configs/llama-3.1-8b."
    )
    flags.DEFINE_integer(
        "draft_layers", 3, "First layers of the target, which form the draft model."
    )
    flags.DEFINE_float("acceptance", 0.75, "Wanted α at temperature 1; the result is measured.")
    flags.DEFINE_integer(
        "num_speculative_tokens",
        5,
        "K.",
        lower_bound=1,
        upper_bound=generation.MAX_SPECULATIVE_TOKENS,
    )
    flags.DEFINE_integer(
        "max_speculative_tokens",
        8,
        "v is measured for K = 1 up to this.",
        lower_bound=1,
        upper_bound=generation.MAX_SPECULATIVE_TOKENS,
    )
    flags.DEFINE_integer(
        "batch_size",
        1,
        "Rows. With several, a run ends with its slowest row; the prediction ignores that.",
        lower_bound=1,
    )
    flags.DEFINE_integer("prompt_length", 128, "Tokens of the (random) prompts.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate per row.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", list(DTYPES), "dtype of weights and caches.")
    flags.DEFINE_integer("repeats", 3, "Counted runs; figures are medians.", lower_bound=1)
    flags.DEFINE_integer(
        "searches", 8, "Most steps of the search for the wanted acceptance.", lower_bound=1
    )
    flags.DEFINE_integer(
        "copy_bytes", 2**30, "Size of the array whose copy shows the bandwidth.", lower_bound=1
    )
    common_flags.define_page_size()
    common_flags.define_implementation()
    flags.DEFINE_integer("seed", 0, "Seed of everything random.", lower_bound=0)
    common_flags.define_figures_output(required=True)


def main(argv: list[str]) -> None:
    """Runs the benchmark with the values of the flags."""
    del argv
    started = time.perf_counter()
    options = common_flags.read(
        gpu.Options, num_draft_layers=FLAGS.draft_layers, dtype=DTYPES[FLAGS.dtype]
    )
    output, title = FLAGS.output, f"{FLAGS.target}, {FLAGS.dtype}, batch {FLAGS.batch_size}"
    invocation = common_flags.invocation(__name__)
    check_platform()
    outputs.check_output(output)
    config = load.read_model_config(FLAGS.target)
    result = gpu.measure(config, options)
    tables.wide_console().print(gpu.table(result, options.acceptance, title))
    figures = {
        **dataclasses.asdict(result),
        "speedup": result.speedup,
        "bandwidth_share": result.bandwidth_share,
        "seconds": time.perf_counter() - started,
    }
    provenance.write_figures(output, figures, invocation)
