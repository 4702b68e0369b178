"""specjax bench decode: what speculation brings for each kind of text, what it costs, and what the
formula predicts."""

from __future__ import annotations

import dataclasses
import importlib.resources
import time

from absl import flags
from rich import progress as progress_lib
from rich.table import Table

from specjax.bench import domains, paging
from specjax.cli import common, jsonl
from specjax.engine import batch
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS
PROMPTS = importlib.resources.files("specjax") / "data" / "bench_prompts.jsonl"

# Published for Llama 70B with an 8B draft model on four A100s: acceptance and speedup.
PUBLIC = {
    "code": (0.784, 2.58),
    "json": (0.862, 2.83),
    "docs": (0.719, 2.24),
    "prose": (0.541, 1.62),
}


def define_flags() -> None:
    """Defines the flags of `specjax bench decode`."""
    flags.DEFINE_string(
        "target", None, "The model: a SpecJAX checkpoint or a Hugging Face folder.", required=True
    )
    common.define_decoding_flags(default=["ngram"])
    flags.adopt_module_key_flags(
        common
    )  # so that they are in the help text, and in the output's "command"
    flags.DEFINE_string(
        "prompts_file",
        str(PROMPTS),
        "JSONL file of prompts, as for specjax generate, each with its 'domain'.",
    )
    flags.DEFINE_integer(
        "prompts_per_domain", None, "At most so many; by default all.", lower_bound=1
    )
    flags.DEFINE_list("temperatures", ["0", "1"], "To decode at.")
    flags.DEFINE_integer("max_new_tokens", 96, "Most tokens to generate per prompt.", lower_bound=1)
    flags.DEFINE_integer("repeats", 1, "Runs of everything; rates are medians.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the first prompt; the others follow.")
    flags.DEFINE_integer(
        "paging_length",
        512,
        "Also compare the paged cache with a contiguous one at this length; 0 is off.",
        lower_bound=0,
    )
    flags.DEFINE_string("output", None, "JSON file to write the figures to; it must not exist.")


def main(argv: list[str]) -> None:
    """Runs the benchmark that the flags ask for."""
    del argv
    started = time.perf_counter()
    temperatures = sorted(set(common.numbers("temperatures")))
    common.begin_benchmark("output")
    rows = jsonl.read_prompts(FLAGS.prompts_file)
    chosen: dict[str, list] = {}
    for i, row in enumerate(rows, 1):
        if "domain" not in row:
            raise SpecJAXError(f"{FLAGS.prompts_file}: prompt {i} has no 'domain'")
        chosen.setdefault(row["domain"], []).append(row["prompt"])
    target, draft = common.load_models()
    drafters = common.drafters(draft)
    prompts = [
        (domain, batch.encode(target, prompt, f"a prompt of {domain}"))
        for domain, of_domain in chosen.items()
        for prompt in of_domain[: FLAGS.prompts_per_domain]
    ]
    console = common.console()
    with progress_lib.Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        total = len(prompts) * len(temperatures) * FLAGS.repeats * (1 + len(drafters))
        task = bar.add_task("decoding", total=total)
        figures = domains.by_domain(
            target,
            prompts,
            drafters,
            temperatures=temperatures,
            max_new_tokens=FLAGS.max_new_tokens,
            repeats=FLAGS.repeats,
            common=common.decoding_arguments(),
            seed=FLAGS.seed,
            on_run=lambda: bar.advance(task),
        )
    console.print(table(figures))
    print(
        "plain, drafts: tokens/s. Predicted: (1-α^(K+1))/(1-α) tokens over K c + v plain steps; rounds without\n"
        "drafts count as plain steps, a head behind another drafter as if it ran in every round. The last two\n"
        "columns are published for Llama 70B with an 8B draft model on 4 x A100."
    )
    result = {"rows": [dataclasses.asdict(row) | {"speedup": row.speedup} for row in figures]}
    if FLAGS.paging_length:
        paged, dense = paging.cost(
            target, length=FLAGS.paging_length, page_size=FLAGS.page_size, repeats=50
        )
        print(
            f"A step at {FLAGS.paging_length} tokens: {1e3 * paged:.2f} ms with the paged cache, {1e3 * dense:.2f} "
            f"ms with a contiguous one ({paged / dense - 1:+.1%})."
        )
        result["paging"] = {
            "length": FLAGS.paging_length,
            "paged_seconds": paged,
            "contiguous_seconds": dense,
        }
    result["seconds"] = time.perf_counter() - started
    common.write_figures(__name__, result)


def table(figures: list[domains.Row]) -> Table:
    """One line per domain, drafter and temperature."""

    def line(row: domains.Row):
        alpha, speedup = PUBLIC.get(row.domain, (None, None))
        return (
            row.domain,
            row.drafter,
            f"{row.temperature:g}",
            f"{row.num_speculative_tokens}",
            common.number(row.acceptance, 3),
            " ".join(common.number(x) for x in row.by_position[:3]),
            f"{row.tokens_per_round:.2f}",
            f"{row.plain:.1f}",
            f"{row.speculative:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.draft:.3f}",
            f"{row.verify:.2f}",
            f"{row.predicted:.2f}x",
            f"{row.speedup / row.predicted:.2f}",
            "" if alpha is None else f"{alpha:.3f}",
            "" if speedup is None else f"{speedup:.2f}x",
        )

    columns = (
        "domain",
        "drafter",
        "T",
        "K",
        "α",
        "at 1 2 3",
        "tok/round",
        "plain",
        "drafts",
        "speedup",
        "c",
        "v",
        "predicted",
        "real/pred",
        "public α",
        "speedup",
    )
    return common.table(
        "Decoding by domain", columns, map(line, figures), num_texts=2, no_wrap=True
    )
