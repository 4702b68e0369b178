"""specjax plan: what fits on a GPU, how long a pass must take there, and the speedup to expect;
nothing is run."""

from __future__ import annotations

from absl import flags
from rich.console import Console

from specjax import dtypes
from specjax.bench import plan
from specjax.cli import common
from specjax.engine import metrics
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS
COUNTS = {
    "tensor_parallel": (1, "GPUs that share one copy of the target."),
    "draft_tensor_parallel": (1, "GPUs that share one copy of the draft model."),
    "data_parallel": (1, "Parts of the batch, each with copies of both models of its own."),
    "num_speculative_tokens": (5, "K, tokens to guess per round."),
    "batch_size": (1, "Sequences, on all GPUs together."),
    "context": (1024, "Tokens of each sequence, whose keys and values a pass reads."),
}


def define_flags() -> None:
    """Defines the flags of `specjax plan`."""
    flags.DEFINE_string(
        "target",
        None,
        "The model: a checkpoint, or any folder with its config.json.",
        required=True,
    )
    flags.DEFINE_string(
        "draft", None, "The draft model, likewise; without one drafts are taken to cost nothing."
    )
    flags.DEFINE_enum("gpu", "h100-80gb", list(plan.GPUS), "What to run on.")
    for name, (default, text) in COUNTS.items():
        flags.DEFINE_integer(name, default, text, lower_bound=1)
    flags.DEFINE_float("gpu_memory_utilization", 0.92, "Share of the memory that may be used.")
    flags.DEFINE_list(
        "acceptance", ["0.8"], "α, the probability that a draft is accepted; may be a list."
    )
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16"], "Of weights, keys and values.")
    flags.DEFINE_float(
        "plain_tokens_per_second",
        None,
        "Measured speed of plain decoding: the time by which it misses "
        "its roofline is added to every pass of the target.",
        lower_bound=0.001,
    )


def main(argv: list[str]) -> None:
    """Prints the plan that the flags ask for."""
    del argv
    try:
        rates = [float(item) for item in FLAGS.acceptance]
    except ValueError as error:
        raise SpecJAXError(f"--acceptance: {error}") from error
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise SpecJAXError(
            f"--acceptance must be numbers from 0 to 1, got {','.join(FLAGS.acceptance)}"
        )
    names = (*COUNTS, "gpu_memory_utilization", "plain_tokens_per_second")
    made = plan.make(
        plan.read_model_config(FLAGS.target),
        FLAGS.draft and plan.read_model_config(FLAGS.draft),
        plan.GPUS[FLAGS.gpu],
        dtype=dtypes.DTYPES[FLAGS.dtype],
        **{name: getattr(FLAGS, name) for name in names},
    )
    K, held = FLAGS.num_speculative_tokens, (made.target, made.draft, made.both)
    num_gpus = FLAGS.data_parallel * FLAGS.tensor_parallel
    _print(
        f"memory of each of {num_gpus} x {FLAGS.gpu}",
        ("target", "draft", "both"),
        [
            ("weights", *(f"{share.weights / 1e9:.2f} GB" for share in held)),
            ("KV bytes per token", *(f"{share.kv_per_token:,}" for share in held)),
            ("logits and activations", "", "", f"{made.reserve / 1e9:.2f} GB"),
            (
                f"tokens of KV that fit at {FLAGS.gpu_memory_utilization:g}",
                "",
                "",
                f"{made.kv_tokens:,}",
            ),
        ],
    )
    passes = {
        "target, 1 token": made.plain,
        f"target, {K + 1} tokens": made.verify,
        "draft, 1 token": made.drafting,
    }
    _print(
        f"a pass, {FLAGS.batch_size} x {FLAGS.context:,} tokens in the cache",
        ("reading", "computing", "roofline"),
        [(name, *map(_ms, (*step, step.roofline))) for name, step in passes.items()],
    )
    print("The roofline is the longer of the two, without launches, all-reduces and sampling.\n")
    columns = ("tokens/round", "speedup", "tokens/s")
    _print(
        f"predicted, K = {K}; plain: {made.tokens_per_second:.1f} tokens/s",
        columns,
        [
            (
                f"α = {rate:g}",
                f"{metrics.expected_tokens(rate, K):.2f}",
                f"{made.speedup(rate):.2f}x",
                f"{made.speedup(rate) * made.tokens_per_second:.1f}",
            )
            for rate in rates
        ],
    )
    print(
        f"A pass of the target lasts {_ms(made.overhead)} longer than its roofline, as measured."
        if made.overhead
        else "Every pass at its roofline; --plain_tokens_per_second=MEASURED makes this a prediction for a machine."
    )


def _print(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    Console(highlight=False).print(common.table(title, ("", *columns), rows), end="\n\n")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
