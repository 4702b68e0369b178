"""specjax demo: four prompts with and without prompt lookup, the texts and the speeds side by side."""

from __future__ import annotations

import importlib.resources

from absl import flags
from rich.console import Console
from rich.table import Table

from specjax import checkpoint, generation
from specjax.cli import common, jsonl

FLAGS = flags.FLAGS
PROMPTS = importlib.resources.files("specjax") / "data" / "demo_prompts.jsonl"


def define_flags() -> None:
    """Defines the flags of `specjax demo`."""
    flags.DEFINE_string("target", None, "A chat model: a SpecJAX checkpoint or a Hugging Face folder.", required=True)
    flags.DEFINE_integer("max_new_tokens", 112, "Most tokens to generate per prompt.")


def main(argv: list[str]) -> int:
    """Runs the demonstration; returns 1 where a greedy text changes with speculation."""
    del argv
    console = Console(highlight=False)
    target = checkpoint.load(FLAGS.target)
    k = generation.default_num_speculative_tokens()
    rows = jsonl.read_prompts(str(PROMPTS))
    console.print("Greedy decoding, one prompt at a time. Colours:", common.legend(), end="\n\n")
    runs = {"plain": [], "speculative": []}
    for row in rows:
        arguments = dict(prompts=[row["prompt"]], max_new_tokens=FLAGS.max_new_tokens)
        runs["plain"].append(generation.generate(target, "none", **arguments))
        stream = common.TextStream(console, target, [jsonl.headline(row["prompt"])], legend=False)
        runs["speculative"].append(generation.generate(target, "ngram", num_speculative_tokens=k,
                                                       on_tokens=stream.on_tokens, **arguments))

    table = Table(title="Prompt by prompt", title_justify="left", show_edge=False)
    table.add_column("prompt")
    for column in ("tokens", "plain tokens/s", "speculative tokens/s", "speedup", "tokens per round"):
        table.add_column(column, justify="right")
    for row, plain, speculative in zip(rows, runs["plain"], runs["speculative"], strict=True):
        slow, fast = common.tokens_per_second([plain]), common.tokens_per_second([speculative])
        tokens, rounds = len(speculative.completions[0].tokens), speculative.rounds
        table.add_row(row["name"], f"{tokens}", f"{slow:.1f}", f"{fast:.1f}", f"{fast / slow:.2f}x",
                      f"{tokens / rounds:.2f}")
    console.print(table, end="\n\n")
    console.print(common.speed_table(f"All prompts: prompt lookup (ngram), K = {k}", runs, k), end="\n\n")
    return common.report_equality(runs)
