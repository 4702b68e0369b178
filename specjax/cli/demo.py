"""specjax demo: a few prompts with and without speculation, the texts and the speeds side by side."""

from __future__ import annotations

import contextlib
import importlib.resources

from absl import flags

from specjax.cli import common, jsonl
from specjax.engine import generate as generation
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS
PROMPTS = importlib.resources.files("specjax") / "data" / "demo_prompts.jsonl"
HEAD_DOMAINS = ("prose", "chat")
HEAD_DRAFTERS = ("ngram,eagle", "eagle")


def define_flags() -> None:
    """Defines the flags of `specjax demo`."""
    flags.DEFINE_string(
        "target",
        None,
        "A chat model: a SpecJAX checkpoint or a Hugging Face folder.",
        required=True,
    )
    flags.DEFINE_integer("max_new_tokens", 112, "Most tokens to generate per prompt.")


def main(argv: list[str]) -> int:
    """Runs the demonstration; returns 1 where a greedy text changes with speculation."""
    del argv
    console = common.console()
    target = checkpoint.load(FLAGS.target)
    ks = {
        name: generation.default_num_speculative_tokens(name) for name in ("ngram", *HEAD_DRAFTERS)
    }
    head = None
    with contextlib.suppress(SpecJAXError):
        head = checkpoint.load_drafter("eagle", None, target)
    rows = jsonl.read_prompts(str(PROMPTS))
    console.print("Greedy decoding, one prompt at a time. Colours:", common.legend(), end="\n\n")
    runs = {}
    for row in rows:
        arguments = dict(prompts=[row["prompt"]], max_new_tokens=FLAGS.max_new_tokens)
        of_row = runs[row["name"]] = {"plain": [generation.generate(target, "none", **arguments)]}
        # Where nothing can be looked up, a head guesses on.
        names = HEAD_DRAFTERS if head and row.get("domain") in HEAD_DOMAINS else ()
        for name in ("ngram", *names):
            stream = common.TextStream(
                console, target, [jsonl.headline(row["prompt"])], legend=False
            )
            of_row[name] = [
                generation.generate(
                    target,
                    name,
                    draft=head if name in names else None,
                    num_speculative_tokens=ks[name],
                    on_tokens=stream.on_tokens if name == (*names, "ngram")[0] else None,
                    **arguments,
                )
            ]

    lines = []
    for prompt, of_row in runs.items():
        slow = common.tokens_per_second(of_row["plain"])
        for name, batches in list(of_row.items())[1:]:
            fast, (run,) = common.tokens_per_second(batches), batches
            tokens = len(run.completions[0].tokens)
            lines.append(
                (
                    prompt,
                    name,
                    f"{tokens}",
                    f"{slow:.1f}",
                    f"{fast:.1f}",
                    f"{fast / slow:.2f}x",
                    f"{tokens / run.rounds:.2f}",
                )
            )
    columns = ("prompt", "drafter", "tokens", "plain tok/s", "drafts tok/s", "speedup", "tok/round")
    console.print(common.table("Prompt by prompt", columns, lines, num_texts=2), end="\n\n")

    def together(names):
        """The runs of these drafters, over the prompts that all of them have seen."""
        chosen = [of_row for of_row in runs.values() if set(names) <= of_row.keys()]
        return {name: [of_row[name][0] for of_row in chosen] for name in names}

    everything = together(("plain", "ngram"))
    console.print(
        common.speed_table("All prompts: prompt lookup (ngram)", everything, ks), end="\n\n"
    )
    if head and (free := together(("plain", "ngram", *HEAD_DRAFTERS)))["plain"]:
        console.print(
            common.speed_table(f"{' and '.join(HEAD_DOMAINS)}: with a head (eagle)", free, ks),
            end="\n\n",
        )
    return common.report_equality(*runs.values())
