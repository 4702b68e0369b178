"""specjax bench saturation: speedup against batch: where speculation stops paying, and the best K
for each batch."""

from __future__ import annotations

import dataclasses

from absl import flags
from rich.table import Table

from specjax.bench import saturation
from specjax.cli import bench_decode, common, jsonl
from specjax.engine import batch
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench saturation`."""
    flags.DEFINE_string(
        "target", None, "The model: a SpecJAX checkpoint or a Hugging Face folder.", required=True
    )
    common.define_decoding_flags(default="ngram")
    flags.adopt_module_key_flags(common)
    flags.DEFINE_string(
        "prompts_file",
        str(bench_decode.PROMPTS),
        "JSONL file of prompts, as for specjax generate; all are decoded at each batch size.",
    )
    flags.DEFINE_list("batch_sizes", ["1", "2", "4", "8", "16", "32", "64"], "To measure.")
    flags.DEFINE_list("draft_lengths", ["1", "3", "5", "7"], "The values of K.")
    flags.DEFINE_float("temperature", 0.0, "Of all rows.")
    flags.DEFINE_integer("max_new_tokens", 48, "Tokens to generate per row.", lower_bound=1)
    flags.DEFINE_integer("repeats", 1, "Runs of everything; rates are medians.", lower_bound=1)
    flags.DEFINE_string("plot", None, "PNG file to draw to; it must not exist.")
    flags.DEFINE_string("output", None, "JSON file to write the figures to; it must not exist.")


def main(argv: list[str]) -> None:
    """Runs the benchmark that the flags ask for."""
    del argv
    batch_sizes, ks = common.numbers("batch_sizes", int), common.numbers("draft_lengths", int)
    if FLAGS.num_speculative_tokens is not None:
        raise SpecJAXError(
            "--num_speculative_tokens: here it is --draft_lengths, which may be several"
        )
    if FLAGS.plot and not FLAGS.plot.endswith(".png"):
        raise SpecJAXError(f"--plot={FLAGS.plot} must end in .png")
    common.begin_benchmark("output", "plot")
    rows = jsonl.read_prompts(FLAGS.prompts_file)
    target, draft = common.load_models()
    prompts = [batch.encode(target, row["prompt"], f"prompt {i}") for i, row in enumerate(rows, 1)]
    drafter = common.drafters(draft)[FLAGS.drafter]
    console = common.console()
    points = saturation.measure(
        target,
        prompts,
        drafter,
        batch_sizes=batch_sizes,
        num_speculative_tokens=ks,
        max_new_tokens=FLAGS.max_new_tokens,
        temperature=FLAGS.temperature,
        repeats=FLAGS.repeats,
        common=common.decoding_arguments(),
        on_point=lambda point: print(f"batch {point.batch_size}: {point.speedup:.2f}x", flush=True),
    )
    console.print(table(points))
    paying = [str(point.batch_size) for point in points if point.best]
    print(f"Speculation pays at batches of {', '.join(paying) or 'none of these sizes'}.")
    common.write_figures(
        __name__,
        {
            "points": [
                dataclasses.asdict(point) | {"best": point.best, "speedup": point.speedup}
                for point in points
            ]
        },
    )
    if FLAGS.plot and common.is_first_process():
        saturation.draw(points, f"{FLAGS.drafter}, temperature {FLAGS.temperature:g}", FLAGS.plot)


def table(points: list[saturation.Point]) -> Table:
    """One line per batch."""
    return common.table(
        "tokens/s of all rows together",
        ("batch", "plain", *(f"K = {k}" for k in points[0].speculative), "best K", "its speedup"),
        [
            (
                str(point.batch_size),
                f"{point.plain:.1f}",
                *(f"{rate:.1f} ({rate / point.plain:.2f}x)" for rate in point.speculative.values()),
                str(point.best) if point.best else "none",
                f"{point.speedup:.2f}x",
            )
            for point in points
        ],
        num_texts=0,
    )
