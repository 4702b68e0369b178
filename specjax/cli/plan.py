"""specjax plan: what fits on a GPU, how long a pass takes at least, and the speedup to expect."""

from __future__ import annotations

from absl import flags
from rich.console import Console

from specjax.bench import plan
from specjax.cli import flags as common_flags
from specjax.drafters import registry
from specjax.dtypes import DTYPES
from specjax.engine import generate as generation
from specjax.engine import load, speculative
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS
COUNTS = {
    "tensor_parallel": (1, "Number of GPUs that share one copy of the target."),
    "draft_tensor_parallel": (1, "Number of GPUs that share one copy of the draft model."),
    "data_parallel": (1, "Number of data-parallel replicas of both models."),
    "batch_size": (1, "Sequences, on all GPUs together."),
    "context": (1024, "Tokens of each sequence; their keys and values are read in every pass."),
}


def define_flags() -> None:
    """Defines the flags of `specjax plan`."""
    common_flags.define_target(
        "The model: a checkpoint, any folder with its config.json, or a Hugging Face repository."
    )
    common_flags.define_path(
        "draft", None, "The draft model, likewise; without one, drafts are assumed to cost nothing."
    )
    common_flags.define_path(
        "speculative_model",
        None,
        "Instead of --draft: the draft model, or the name of a drafter that needs none.",
    )
    flags.DEFINE_enum("gpu", "h100-80gb", list(plan.GPUS), "GPU to plan for.")
    for name, (default, text) in COUNTS.items():
        flags.DEFINE_integer(name, default, text, lower_bound=1)
    flags.DEFINE_integer(
        "num_speculative_tokens",
        5,
        "K, tokens to draft per round.",
        lower_bound=1,
        upper_bound=generation.MAX_SPECULATIVE_TOKENS,
    )
    flags.DEFINE_float("gpu_memory_utilization", 0.92, "Share of the memory that may be used.")
    flags.DEFINE_list(
        "acceptance", ["0.8"], "α, the probability that a draft is accepted; may be a list."
    )
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["bfloat16", "float16"], "dtype of weights, keys and values."
    )
    flags.DEFINE_float(
        "plain_tokens_per_second",
        None,
        "Measured speed of plain decoding: the time of a pass beyond its roofline is added to "
        "every pass of the target.",
        lower_bound=0.001,
    )


def main(argv: list[str]) -> None:
    """Prints the plan for the values of the flags."""
    del argv
    workload = common_flags.read(plan.Workload, dtype=DTYPES[FLAGS.dtype])
    rates = _read_rates(FLAGS.acceptance)
    target = load.read_model_config(FLAGS.target)
    draft_path = _draft_path(FLAGS.draft, FLAGS.speculative_model)
    draft = load.read_model_config(draft_path) if draft_path else None
    made = plan.make(target, draft, plan.GPUS[FLAGS.gpu], workload)
    num_gpus = FLAGS.data_parallel * FLAGS.tensor_parallel
    console = Console(highlight=False)
    for table in (
        plan.memory_table(made, f"{num_gpus} x {FLAGS.gpu}", FLAGS.gpu_memory_utilization),
        plan.pass_table(made, f"{FLAGS.batch_size} x {FLAGS.context:,}"),
    ):
        console.print(table, end="\n\n")
    print("The roofline is the longer of the two, without launches, all-reduces and sampling.\n")
    console.print(plan.speedup_table(made, rates), end="\n\n")
    print(plan.explanation(made))


def _draft_path(draft: str | None, speculative_model: str | None) -> str | None:
    """The draft model of the flags of these names; None if drafts cost nothing."""
    if speculative_model is None:
        return draft
    common_flags.check_exclusive("speculative_model", "draft")
    if not speculative.is_drafter(speculative_model):
        return speculative_model
    if any(registry.draft_config_types(speculative_model)):
        raise SpecJAXError(
            f"--speculative_model={speculative_model}: give the draft model, or a drafter that "
            "needs none"
        )
    return None


def _read_rates(items: list[str]) -> list[float]:
    """The values of --acceptance."""
    try:
        rates = [float(item) for item in items]
    except ValueError as error:
        raise SpecJAXError(f"--acceptance: {error}") from error
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise SpecJAXError(f"--acceptance must be numbers from 0 to 1, got {','.join(items)}")
    return rates
