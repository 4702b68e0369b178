"""specjax bench saturation: speedup against batch size, and the best K for each batch size."""

from __future__ import annotations

import dataclasses

from absl import flags

from specjax.bench import decode, saturation
from specjax.cli import flags as common_flags
from specjax.cli import jsonl, models, outputs, processes
from specjax.engine import batch
from specjax.engine import generate as generation
from specjax.errors import SpecJAXError
from specjax.report import provenance, tables

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench saturation`."""
    common_flags.define_decoding_flags(draft_length=False)
    common_flags.define_path(
        "prompts_file",
        str(decode.PROMPTS),
        "JSONL file of prompts, as for specjax generate; all are decoded at each batch size.",
    )
    flags.DEFINE_list("batch_sizes", ["1", "2", "4", "8", "16", "32", "64"], "Batch sizes.")
    flags.DEFINE_list("draft_lengths", ["1", "3", "5", "7"], "Values of K.")
    flags.DEFINE_float("temperature", 0.0, "Temperature of all rows.")
    flags.DEFINE_integer("max_new_tokens", 48, "Tokens to generate per row.", lower_bound=1)
    common_flags.define_repeats(1)
    common_flags.define_path("plot", None, "PNG file to write charts to; it must not exist.")
    common_flags.define_figures_output()


def main(argv: list[str]) -> None:
    """Runs the benchmark with the values of the flags."""
    del argv
    decoding, invocation = common_flags.decoding(), common_flags.invocation(__name__)
    output, plot, temperature = FLAGS.output, FLAGS.plot, FLAGS.temperature
    batch_sizes = common_flags.numbers("batch_sizes", FLAGS.batch_sizes, int)
    draft_lengths = common_flags.numbers("draft_lengths", FLAGS.draft_lengths, int)
    limits = {"max_new_tokens": FLAGS.max_new_tokens, "repeats": FLAGS.repeats}
    longest = generation.MAX_SPECULATIVE_TOKENS
    if max(draft_lengths) > longest:
        raise SpecJAXError(f"--draft_lengths must be at most {longest}, got {max(draft_lengths)}")
    if plot and not plot.endswith(".png"):
        raise SpecJAXError(f"--plot={plot} must end in .png")
    models.check_benchmark(decoding)
    rows = jsonl.read_prompts(FLAGS.prompts_file)

    processes.join(decoding.processes)
    outputs.check_output(output)
    outputs.check_output(plot, "plot")
    setup, speculations = models.load_models(decoding)
    (speculation,) = speculations.values()
    prompts = [batch.encode(setup.target, row["prompt"], row["where"]) for row in rows]
    points = saturation.measure(
        setup,
        prompts,
        speculation,
        batch_sizes=batch_sizes,
        draft_lengths=draft_lengths,
        temperature=temperature,
        on_point=_print_point,
        **limits,
    )
    tables.wide_console().print(saturation.table(points))
    paying = [str(point.batch_size) for point in points if point.best]
    print(f"Speculation pays at batches of {', '.join(paying) or 'none of these sizes'}.")
    fields = []
    for point in points:
        derived = {"best": point.best, "speedup": point.speedup}
        fields.append(dataclasses.asdict(point) | derived)
    provenance.write_figures(output, {"points": fields}, invocation)
    if plot and processes.is_first():
        saturation.plot(points, f"{speculation.drafter}, temperature {temperature:g}", plot)


def _print_point(point: saturation.Point) -> None:
    print(f"batch {point.batch_size}: {point.speedup:.2f}x", flush=True)
