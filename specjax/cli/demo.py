"""specjax demo: a few prompts with and without speculation, texts and speeds side by side."""

from __future__ import annotations

import contextlib

from absl import flags

from specjax.cli import flags as common_flags
from specjax.cli import jsonl
from specjax.engine import generate as generation
from specjax.engine import load
from specjax.engine.load import LoadedDraft, Model
from specjax.engine.request import Generation
from specjax.engine.setup import Setup, Speculation
from specjax.errors import SpecJAXError
from specjax.report import tables
from specjax.report.stream import TextStream, legend

FLAGS = flags.FLAGS
HEAD_DOMAINS = ("prose", "chat")
HEAD_DRAFTERS = ("ngram,eagle", "eagle")

# The runs of one prompt: "plain", and names of drafters.
Runs = dict[str, list[Generation]]


def define_flags() -> None:
    """Defines the flags of `specjax demo`."""
    common_flags.define_target(
        "A chat model: a SpecJAX checkpoint, or a Hugging Face folder or repository."
    )
    flags.DEFINE_integer("max_new_tokens", 112, "Most tokens to generate per prompt.")


def main(argv: list[str]) -> int:
    """Runs the demonstration; returns 1 where a greedy text changes with speculation."""
    del argv
    return run(FLAGS.target, FLAGS.max_new_tokens)


def run(path: str, max_new_tokens: int) -> int:
    """Decodes the prompts of the demonstration and prints texts and tables.

    Args:
      path: path of the target.
      max_new_tokens: most tokens to generate per prompt.

    Returns:
      The exit code.
    """
    console = tables.wide_console()
    setup = Setup(load.load(path))
    head = _bundled_head(setup.target)
    rows = jsonl.read_prompts(str(jsonl.DEMO_PROMPTS))
    console.print("Greedy decoding, one prompt at a time. Colours:", legend(), end="\n\n")
    by_prompt: dict[str, Runs] = {}
    for row in rows:
        # Where nothing can be looked up, an EAGLE head drafts.
        names = ["ngram"]
        if head and row.get("domain") in HEAD_DOMAINS:
            names = [*HEAD_DRAFTERS, "ngram"]
        stream = TextStream(console, setup.target, [jsonl.headline(row["prompt"])], legend=False)
        prompts = [row["prompt"]]
        runs = {"plain": [setup.generate(None, prompts, max_new_tokens=max_new_tokens)]}
        for name in names:
            result = setup.generate(
                _speculation(name, head),
                prompts,
                max_new_tokens=max_new_tokens,
                on_tokens=stream.on_tokens if name == names[0] else None,
            )
            runs[name] = [result]
        by_prompt[row["name"]] = runs
    _print_prompt_table(console, by_prompt)
    _print_speed_tables(console, by_prompt)
    same = tables.same_tokens(*by_prompt.values())
    print(tables.equality_line(same))
    return 0 if same else 1


def _bundled_head(target: Model) -> LoadedDraft | None:
    """The EAGLE head that is bundled for the target, if there is one."""
    with contextlib.suppress(SpecJAXError):
        return load.load_drafter(HEAD_DRAFTERS[-1], None, target)
    return None


def _speculation(name: str, head: LoadedDraft | None) -> Speculation:
    K = generation.default_num_speculative_tokens(name)
    return Speculation(name, head if name in HEAD_DRAFTERS else None, K, {})


def _print_prompt_table(console, by_prompt: dict[str, Runs]) -> None:
    lines = []
    for prompt, runs in by_prompt.items():
        plain = tables.tokens_per_second(runs["plain"])
        for name, batches in runs.items():
            if name == "plain":
                continue
            rate = tables.tokens_per_second(batches)
            tokens, rounds = len(batches[0].completions[0].tokens), batches[0].rounds
            lines.append(
                (
                    prompt,
                    name,
                    f"{tokens}",
                    f"{plain:.1f}",
                    f"{rate:.1f}",
                    f"{rate / plain:.2f}x",
                    f"{tokens / rounds:.2f}",
                )
            )
    columns = ("prompt", "drafter", "tokens", "plain tok/s", "drafts tok/s", "speedup", "tok/round")
    console.print(tables.table("Prompt by prompt", columns, lines, num_texts=2), end="\n\n")


def _print_speed_tables(console, by_prompt: dict[str, Runs]) -> None:
    """A table for all prompts, and one for those with an EAGLE head."""
    ks = {}
    for name in ("ngram", *HEAD_DRAFTERS):
        ks[name] = generation.default_num_speculative_tokens(name)
    everything = _joined(by_prompt, ("plain", "ngram"))
    title = "All prompts: prompt lookup (ngram)"
    console.print(tables.speed_table(title, everything, ks), end="\n\n")
    with_head = _joined(by_prompt, ("plain", "ngram", *HEAD_DRAFTERS))
    if with_head["plain"]:
        title = f"{' and '.join(HEAD_DOMAINS)}: with an EAGLE head (eagle)"
        console.print(tables.speed_table(title, with_head, ks), end="\n\n")


def _joined(by_prompt: dict[str, Runs], names: tuple[str, ...]) -> Runs:
    """The runs of these drafters over the prompts that all of them decoded."""
    chosen = [runs for runs in by_prompt.values() if set(names) <= runs.keys()]
    return {name: [runs[name][0] for runs in chosen] for name in names}
