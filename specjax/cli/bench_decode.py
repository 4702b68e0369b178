"""specjax bench decode: speedup by kind of text, drafter and temperature, and its prediction."""

from __future__ import annotations

import dataclasses
import time

from absl import flags
from rich import progress as progress_lib

from specjax.bench import decode, paging
from specjax.cli import flags as common_flags
from specjax.cli import jsonl, models, outputs, processes
from specjax.engine import batch
from specjax.engine.load import Model
from specjax.engine.setup import Setup
from specjax.errors import SpecJAXError
from specjax.report import provenance, tables

FLAGS = flags.FLAGS
PAGING_REPEATS = 50


def define_flags() -> None:
    """Defines the flags of `specjax bench decode`."""
    common_flags.define_decoding_flags(several_drafters=True)
    common_flags.define_path(
        "prompts_file",
        str(decode.PROMPTS),
        "JSONL file of prompts, as for specjax generate, each with its 'domain'.",
    )
    flags.DEFINE_integer(
        "prompts_per_domain", None, "Most prompts of each domain (default: all).", lower_bound=1
    )
    flags.DEFINE_list("temperatures", ["0", "1"], "Temperatures to decode at.")
    flags.DEFINE_integer("max_new_tokens", 96, "Most tokens to generate per prompt.", lower_bound=1)
    common_flags.define_repeats(1)
    flags.DEFINE_integer("seed", 0, "Seed of the first prompt; the others follow.")
    flags.DEFINE_integer(
        "paging_length",
        512,
        "Also compare the paged cache with a contiguous one at this length; 0 is off.",
        lower_bound=0,
    )
    common_flags.define_figures_output()


def main(argv: list[str]) -> None:
    """Runs the benchmark with the values of the flags."""
    del argv
    started = time.perf_counter()
    decoding, invocation = common_flags.decoding(), common_flags.invocation(__name__)
    output, paging_length = FLAGS.output, FLAGS.paging_length
    temperatures = sorted(set(common_flags.numbers("temperatures", FLAGS.temperatures)))
    options = {
        "temperatures": temperatures,
        "max_new_tokens": FLAGS.max_new_tokens,
        "repeats": FLAGS.repeats,
        "seed": FLAGS.seed,
    }
    models.check_benchmark(decoding)
    rows = _rows_by_domain(FLAGS.prompts_file, FLAGS.prompts_per_domain)

    processes.join(decoding.processes)
    outputs.check_output(output)
    setup, speculations = models.load_models(decoding)
    prompts = _encode(setup.target, rows)
    total = len(prompts) * len(temperatures) * options["repeats"] * (1 + len(speculations))
    console = tables.wide_console()
    with progress_lib.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("decoding", total=total)
        measured = decode.measure(
            setup, prompts, speculations, on_run=lambda: bar.advance(task), **options
        )
    console.print(decode.table(measured))
    print(decode.EXPLANATION)
    figures = {"rows": [dataclasses.asdict(row) | {"speedup": row.speedup} for row in measured]}
    if paging_length:
        figures["paging"] = _compare_caches(setup, paging_length)
    figures["seconds"] = time.perf_counter() - started
    provenance.write_figures(output, figures, invocation)


def _rows_by_domain(path: str, most: int | None) -> list[dict]:
    """The first `most` rows of every domain, sorted by the first appearance of the domain."""
    by_domain: dict[str, list[dict]] = {}
    for row in jsonl.read_prompts(path):
        if "domain" not in row:
            raise SpecJAXError(f"{row['where']}: the prompt has no 'domain'")
        by_domain.setdefault(row["domain"], []).append(row)
    return [row for rows in by_domain.values() for row in rows[:most]]


def _encode(target: Model, rows: list[dict]) -> list[tuple[str, tuple[int, ...]]]:
    """The domain and the token ids of every row."""
    prompts = []
    for row in rows:
        ids = batch.encode(target, row["prompt"], row["where"])
        prompts.append((row["domain"], ids))
    return prompts


def _compare_caches(setup: Setup, length: int) -> dict:
    """Times a step with the paged cache and with a contiguous one, and prints both."""
    paged, contiguous = paging.cost(
        setup.target, length=length, page_size=setup.page_size, repeats=PAGING_REPEATS
    )
    print(
        f"A step at {length} tokens: {1e3 * paged:.2f} ms with the paged cache, "
        f"{1e3 * contiguous:.2f} ms with a contiguous one ({paged / contiguous - 1:+.1%})."
    )
    return {"length": length, "paged_seconds": paged, "contiguous_seconds": contiguous}
