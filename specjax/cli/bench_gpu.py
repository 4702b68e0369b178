"""specjax bench gpu: a card's speed without real weights: a random 8B target, and a draft that
agrees as wished."""

from __future__ import annotations

import dataclasses
import time

from absl import flags

from specjax import dtypes
from specjax.bench import plan, synthetic
from specjax.cli import common, jsonl
from specjax.kernels import dispatch

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax bench gpu`."""
    flags.DEFINE_string(
        "target",
        None,
        "Folder with the config.json of the target's shape, such as configs/llama-3.1-8b.",
        required=True,
    )
    flags.DEFINE_integer("draft_layers", 3, "Layers of the target that are the draft model.")
    flags.DEFINE_float(
        "acceptance", 0.75, "Wanted α at temperature 1; what came of it is measured."
    )
    flags.DEFINE_integer("num_speculative_tokens", 5, "K.", lower_bound=1)
    flags.DEFINE_integer(
        "max_speculative_tokens", 8, "v is measured for K = 1 up to this.", lower_bound=1
    )
    flags.DEFINE_integer(
        "batch_size",
        1,
        "Rows. With several the last one to end is waited for, which the formula does not know.",
        lower_bound=1,
    )
    flags.DEFINE_integer("prompt_length", 128, "Tokens of the (random) prompts.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate per row.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", list(dtypes.DTYPES), "Of weights and caches.")
    flags.DEFINE_integer("repeats", 3, "Counted runs; figures are medians.", lower_bound=1)
    flags.DEFINE_integer(
        "searches", 8, "Most steps of the search for the wanted acceptance.", lower_bound=1
    )
    flags.DEFINE_integer(
        "copy_bytes", 2**30, "Size of the array whose copy shows the bandwidth.", lower_bound=1
    )
    flags.DEFINE_integer(
        "page_size", 64, "Positions per page of the key/value caches.", lower_bound=1
    )
    flags.DEFINE_enum(
        "implementation", None, dispatch.IMPLEMENTATIONS, "Of attention and verification."
    )
    flags.DEFINE_integer("seed", 0, "Of everything random.", lower_bound=0)
    flags.DEFINE_string(
        "output", None, "JSON file to write the figures to; it must not exist.", required=True
    )


def main(argv: list[str]) -> None:
    """Runs the benchmark that the flags ask for."""
    del argv
    started = time.perf_counter()
    jsonl.refuse_existing(FLAGS.output)
    cfg = plan.read_model_config(FLAGS.target)
    found = synthetic.run(
        cfg,
        num_draft_layers=FLAGS.draft_layers,
        acceptance=FLAGS.acceptance,
        num_speculative_tokens=FLAGS.num_speculative_tokens,
        max_speculative_tokens=FLAGS.max_speculative_tokens,
        batch_size=FLAGS.batch_size,
        prompt_length=FLAGS.prompt_length,
        max_new_tokens=FLAGS.max_new_tokens,
        dtype=dtypes.DTYPES[FLAGS.dtype],
        repeats=FLAGS.repeats,
        searches=FLAGS.searches,
        copy_bytes=FLAGS.copy_bytes,
        implementation=FLAGS.implementation,
        page_size=FLAGS.page_size,
        seed=FLAGS.seed,
    )
    share = found.weights_bandwidth / found.copy_bandwidth
    speedup = found.speculative / found.plain
    lines = {
        "plain tokens/s": f"{found.plain:.1f}",
        "weights read, of the bandwidth of a copy": f"{found.weights_bandwidth / 1e9:.0f} of "
        f"{found.copy_bandwidth / 1e9:.0f} GB/s ({share:.0%})",
        "tokens/s with drafts": f"{found.speculative:.1f}",
        "speedup": f"{speedup:.2f}x",
        "acceptance α (wanted)": f"{found.acceptance:.3f} ({FLAGS.acceptance:g})",
        "tokens per round": f"{found.tokens_per_round:.2f}",
        "c": f"{found.draft:.3f}",
        **{f"v({k})": f"{v:.3f}" for k, v in found.verify_by_k.items()},
        "predicted speedup": f"{found.predicted:.2f}x",
        "realised / predicted": f"{speedup / found.predicted:.2f}",
        "host's part of a call": f"{1e3 * found.seconds_per_call:.2f} ms",
    }
    common.console().print(
        common.table(
            f"{FLAGS.target}, {FLAGS.dtype}, batch {FLAGS.batch_size}", ("", ""), lines.items()
        )
    )
    common.write_figures(
        __name__,
        {
            **dataclasses.asdict(found),
            "speedup": speedup,
            "bandwidth_share": share,
            "seconds": time.perf_counter() - started,
        },
    )
