"""specjax bench: decoding speed, plain and speculative, against the machine's own limit and other engines.

`specjax bench kernels` is a command of its own: the GPU kernels by themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time

from absl import flags
from rich.console import Console
from rich.table import Table

from specjax import bench
from specjax.cli import common, demo, jsonl
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench`."""
    flags.DEFINE_string("target", None, "The model: a SpecJAX checkpoint or a Hugging Face folder.", required=True)
    common.define_decoding_flags(default="ngram")
    flags.adopt_module_key_flags(common)  # so that they are in the help text, and in the output's "command"
    flags.DEFINE_string("prompts_file", str(demo.PROMPTS), "JSONL file of prompts, as for specjax generate.")
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate per prompt.")
    flags.DEFINE_integer("repeats", 5, "Counted runs of everything; figures are medians.")
    flags.DEFINE_list("peers", [], f"Other engines to measure in the same run: {', '.join(bench.PEERS)}.")
    flags.DEFINE_integer("paging_length", 512,
                         "Also compare the paged cache with a contiguous one at this length; 0 is off.")
    flags.DEFINE_string("output", None, "JSON file to write the figures to; it must not exist.")


def main(argv: list[str]) -> None:
    """Runs the benchmark that the flags ask for."""
    del argv
    started = time.perf_counter()
    if FLAGS.drafter == "none":
        raise SpecJAXError("--drafter=none: bench compares a drafter with plain decoding")
    for name in ("repeats", "max_new_tokens"):
        if getattr(FLAGS, name) < 1:
            raise SpecJAXError(f"--{name} must be at least 1, got {getattr(FLAGS, name)}")
    if FLAGS.paging_length < 0:
        raise SpecJAXError(f"--paging_length must be at least 0, got {FLAGS.paging_length}")
    common.join_processes()
    if FLAGS.output and common.is_first_process():
        jsonl.refuse_existing(FLAGS.output)
    rows = jsonl.read_prompts(FLAGS.prompts_file)
    for row in rows:
        if own := [name for name in jsonl.ROW_OPTIONS if name in row]:
            raise SpecJAXError(f"{FLAGS.prompts_file}: bench decodes greedily, so that a prompt has no {own[0]!r} here")
    prompts = {row.get("name", f"prompt {i}"): row["prompt"] for i, row in enumerate(rows)}
    if len(prompts) < len(rows):
        raise SpecJAXError(f"{FLAGS.prompts_file}: two prompts have the same name")
    target, draft = common.load_models()

    drafter = common.drafter_arguments(draft)
    first = bench.first_token_seconds(target, next(iter(prompts.values())), started, drafter)
    figures = bench.decode_speed(target, prompts, max_new_tokens=FLAGS.max_new_tokens, repeats=FLAGS.repeats,
                                 drafter=drafter, peers=FLAGS.peers)
    console = Console(highlight=False)
    table = Table(title=f"tokens/s, medians of {FLAGS.repeats}; {FLAGS.drafter}, K = {common.num_speculative_tokens()}",
                  title_justify="left", show_edge=False)
    table.add_column("prompt")
    columns = ("plain", "of floor", "drafts", "speedup", "tokens/round", "α", *FLAGS.peers)
    for column in columns:
        table.add_column(column, justify="right")
    for row in figures:
        peers = [f"{rate:.1f} ({row.plain / rate:.2f}x)" for rate in row.peers.values()]
        table.add_row(row.name, f"{row.plain:.1f}", f"{row.floor_share:.2f}", f"{row.speculative:.1f}",
                      f"{row.speculative / row.plain:.2f}x", f"{row.tokens_per_round:.2f}",
                      common.number(row.acceptance, 3), *peers)
    console.print(table)
    print("The floor is the time that reading as many bytes as the weights have takes on this machine."
          + (" In brackets: plain decoding here over plain decoding there." if FLAGS.peers else ""))
    print(f"First token {first:.1f} s after the model began to load.")
    result = {**common.provenance(__name__), "first_token_seconds": first,
              "rows": [dataclasses.asdict(row) for row in figures]}  # fmt: skip
    if FLAGS.paging_length:
        paged, dense = bench.paging_cost(target, length=FLAGS.paging_length, page_size=FLAGS.page_size,
                                         repeats=10 * FLAGS.repeats)
        print(f"A step at {FLAGS.paging_length} tokens: {1e3 * paged:.2f} ms with the paged cache, {1e3 * dense:.2f} "
              f"ms with a contiguous one ({paged / dense - 1:+.1%}).")
        result["paging"] = {"length": FLAGS.paging_length, "paged_seconds": paged, "contiguous_seconds": dense}
    if FLAGS.output and common.is_first_process():
        jsonl.write_text(FLAGS.output, json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")


def _finite(value):
    """The same with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
