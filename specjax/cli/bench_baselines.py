"""specjax bench baselines: decoding speed beside other engines: same weights, prompts, dtype and
threads, in turn."""

from __future__ import annotations

import dataclasses

from absl import flags

from specjax.bench import baselines
from specjax.cli import common, demo, jsonl
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench baselines`."""
    flags.DEFINE_string(
        "target", None, "The model: a SpecJAX checkpoint or a Hugging Face folder.", required=True
    )
    common.define_decoding_flags(default="ngram")
    flags.adopt_module_key_flags(
        common
    )  # so that they are in the help text, and in the output's "command"
    flags.DEFINE_string(
        "prompts_file", str(demo.PROMPTS), "JSONL file of prompts, as for specjax generate."
    )
    flags.DEFINE_integer("max_new_tokens", 96, "Tokens to generate per prompt.", lower_bound=1)
    flags.DEFINE_integer(
        "repeats", 3, "Counted runs of everything; figures are medians.", lower_bound=1
    )
    flags.DEFINE_list(
        "baselines",
        [],
        f"Other engines, each of which must be installed: {', '.join(baselines.BASELINES)}.",
    )
    flags.DEFINE_string(
        "gguf",
        None,
        "For llama.cpp: the same weights as a float32 GGUF file; its "
        "convert_hf_to_gguf.py --outtype f32 makes one of what specjax export writes.",
    )
    flags.DEFINE_integer(
        "threads",
        common.num_cores(),
        "Of the other engines; ours are as many as cores.",
        lower_bound=1,
    )
    flags.DEFINE_string("output", None, "JSON file to write the figures to; it must not exist.")


def main(argv: list[str]) -> None:
    """Runs the benchmark that the flags ask for."""
    del argv
    common.begin_benchmark("output")
    if FLAGS.baselines and FLAGS.max_new_tokens < 2:
        raise SpecJAXError(
            "--max_new_tokens must be at least 2 with --baselines: the first token comes with the prompt"
        )
    if FLAGS["threads"].present and not FLAGS.baselines:
        raise SpecJAXError("--threads is for the engines of --baselines, and none is named")
    baselines.check(FLAGS.baselines, FLAGS.gguf)
    rows = jsonl.read_prompts(FLAGS.prompts_file)
    prompts = {row.get("name", f"prompt {i}"): row["prompt"] for i, row in enumerate(rows)}
    if len(prompts) < len(rows):
        raise SpecJAXError(f"{FLAGS.prompts_file}: two prompts have the same name")
    target, draft = common.load_models()
    drafter = common.drafters(draft)[FLAGS.drafter]
    k, num_lookup_tokens = drafter["num_speculative_tokens"], common.num_speculative_tokens("ngram")
    figures = baselines.compare(
        target,
        prompts,
        drafter,
        max_new_tokens=FLAGS.max_new_tokens,
        repeats=FLAGS.repeats,
        common=common.decoding_arguments(),
        names=FLAGS.baselines,
        num_lookup_tokens=num_lookup_tokens,
        gguf=FLAGS.gguf,
        threads=FLAGS.threads,
    )
    common.console().print(
        common.table(
            f"tokens/s, medians of {FLAGS.repeats}; {FLAGS.drafter}, K = {k}",
            ("prompt", "tok/round", "plain", "of roofline", "drafts", "speedup", *FLAGS.baselines),
            [
                (
                    row.name,
                    f"{row.tokens_per_round:.2f}",
                    f"{row.plain:.1f}",
                    f"{row.plain / row.roofline:.2f}",
                    f"{row.speculative:.1f}",
                    f"{row.speculative / row.plain:.2f}x",
                    *(
                        f"{rate:.1f} ({(row.speculative if 'lookup' in name else row.plain) / rate:.2f}x)"
                        for name, rate in row.baselines.items()
                    ),
                )
                for row in figures
            ],
        )
    )
    print(
        "The roofline is the time that reading as many bytes as the weights have takes on this machine."
        + (
            " In brackets: our rate over theirs, with drafts where they look up."
            if FLAGS.baselines
            else ""
        )
    )
    common.write_figures(
        __name__,
        {
            "num_speculative_tokens": k,
            "num_lookup_tokens": num_lookup_tokens,
            "rows": [dataclasses.asdict(row) for row in figures],
        },
    )
