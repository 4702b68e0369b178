"""specjax bench baselines: speed against other engines, on the same weights and prompts."""

from __future__ import annotations

import dataclasses

from absl import flags

from specjax.bench import baselines
from specjax.bench.baselines import Baselines
from specjax.cli import flags as common_flags
from specjax.cli import jsonl, models, outputs, processes
from specjax.errors import SpecJAXError
from specjax.report import provenance, tables

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench baselines`."""
    common_flags.define_decoding_flags()
    common_flags.define_path(
        "prompts_file", str(jsonl.DEMO_PROMPTS), "JSONL file of prompts, as for specjax generate."
    )
    flags.DEFINE_integer("max_new_tokens", 96, "Tokens to generate per prompt.", lower_bound=1)
    common_flags.define_repeats(3)
    flags.DEFINE_list(
        "baselines",
        [],
        f"Other engines, each of which must be installed: {', '.join(baselines.BASELINES)}.",
    )
    common_flags.define_path(
        "gguf",
        None,
        "For llama.cpp: the same weights as a float32 GGUF file, which its "
        "convert_hf_to_gguf.py --outtype f32 makes from the output of specjax export.",
    )
    flags.DEFINE_integer(
        "threads",
        None,
        "Threads of the other engines (default: the number of cores, as XLA uses).",
        lower_bound=1,
    )
    common_flags.define_figures_output()


def main(argv: list[str]) -> None:
    """Runs the benchmark with the values of the flags."""
    del argv
    decoding, invocation = common_flags.decoding(), common_flags.invocation(__name__)
    prompts_file, output, threads = FLAGS.prompts_file, FLAGS.output, FLAGS.threads
    max_new_tokens, repeats = FLAGS.max_new_tokens, FLAGS.repeats
    num_lookup_tokens = models.num_speculative_tokens("ngram", decoding.num_speculative_tokens)
    others = Baselines(
        FLAGS.baselines, num_lookup_tokens, FLAGS.gguf, threads or provenance.num_cores()
    )
    models.check_benchmark(decoding)
    if others.names and max_new_tokens < 2:
        raise SpecJAXError(
            "--max_new_tokens must be at least 2 with --baselines: the first token is part of "
            "reading the prompt"
        )
    if threads is not None and not others.names:
        raise SpecJAXError("--threads applies to the engines of --baselines, and none is named")
    others.check()
    prompts = _named_prompts(prompts_file)

    processes.join(decoding.processes)
    outputs.check_output(output)
    setup, speculations = models.load_models(decoding)
    (speculation,) = speculations.values()
    rows = baselines.measure(
        setup, prompts, speculation, others, max_new_tokens=max_new_tokens, repeats=repeats
    )
    K = speculation.num_speculative_tokens
    title = f"tokens/s, medians of {repeats}; {speculation.drafter}, K = {K}"
    tables.wide_console().print(baselines.table(rows, others.names, title))
    print(baselines.EXPLANATION)
    if others.names:
        print(baselines.EXPLANATION_OF_BRACKETS)
    figures = {
        "num_speculative_tokens": K,
        "num_lookup_tokens": num_lookup_tokens,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    provenance.write_figures(output, figures, invocation)


def _named_prompts(path: str) -> dict:
    """The prompts of a file by their names, or by "prompt" and a number."""
    rows = jsonl.read_prompts(path)
    prompts = {row.get("name", f"prompt {i}"): row["prompt"] for i, row in enumerate(rows)}
    if len(prompts) < len(rows):
        raise SpecJAXError(f"{path}: two prompts have the same name")
    return prompts
