"""specjax generate: text from a model, with speculative decoding."""

from __future__ import annotations

from absl import flags
from rich.console import Console

from specjax.cli import common, jsonl
from specjax.engine import generate as generation
from specjax.errors import SpecJAXError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of `specjax generate`."""
    flags.DEFINE_string(
        "target",
        None,
        "The model: a SpecJAX checkpoint or a Hugging Face Llama folder.",
        required=True,
    )
    common.define_decoding_flags(default="ngram")
    flags.adopt_module_key_flags(common)  # so that they are in the help text
    flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
    flags.DEFINE_string(
        "prompts_file",
        None,
        "JSONL file of prompts: strings, or objects with 'prompt' or 'messages' "
        f"and, if wanted, a sampling option of their own ({', '.join(jsonl.ROW_OPTIONS)}).",
    )
    flags.DEFINE_bool(
        "chat", False, "Wrap each prompt in the model's chat template as a message of the user."
    )
    flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate per prompt.")
    flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
    flags.DEFINE_integer("top_k", 0, "Sample from this many most likely tokens; 0 is off.")
    flags.DEFINE_float(
        "top_p", 1.0, "Sample from the smallest set of most likely tokens with this mass."
    )
    flags.DEFINE_float(
        "min_p", 0.0, "Sample from tokens with at least this share of the largest probability."
    )
    flags.DEFINE_integer("seed", 0, "Seed of every prompt; the same seed gives the same text.")
    flags.DEFINE_bool("ignore_eos", False, "Go on after end-of-sequence tokens.")
    flags.DEFINE_bool("compare", False, "Also decode without speculation, and report both.")
    flags.DEFINE_string("output", None, "JSONL file to write completions to; it must not exist.")


def main(argv: list[str]) -> int:
    """Runs the generation that the flags ask for; returns 1 where --compare finds texts that should
    be equal and are not."""
    del argv
    rows = jsonl.read_prompts(FLAGS.prompts_file, jsonl.ROW_OPTIONS) if FLAGS.prompts_file else []
    prompts = [row["prompt"] for row in rows] + FLAGS.prompt
    if not prompts:
        raise SpecJAXError("there is no prompt: give --prompt or --prompts_file")
    if FLAGS.compare and FLAGS.drafter == "none":
        raise SpecJAXError(
            "--compare compares a drafter with plain decoding; with --drafter=none there is nothing to "
            "compare"
        )
    common.join_processes()
    if FLAGS.output and common.is_first_process():
        jsonl.refuse_existing(FLAGS.output)
    options = {
        name: [row.get(name, getattr(FLAGS, name)) for row in rows]
        + [getattr(FLAGS, name)] * len(FLAGS.prompt)
        for name in jsonl.ROW_OPTIONS
    }
    if FLAGS.ignore_eos:
        options["eos_ids"] = ()
    if FLAGS.chat:
        prompts = [
            [{"role": "user", "content": p}] if isinstance(p, str) and p else p for p in prompts
        ]

    target, draft = common.load_models()
    console = Console(highlight=False)
    stream = None
    if console.is_terminal and target.tokenizer and common.is_alone():
        stream = common.TextStream(
            console, target, [jsonl.headline(prompt) for prompt in prompts]
        ).on_tokens
    drafter = common.drafters(draft)[FLAGS.drafter]
    result = generation.generate(
        target,
        prompts=prompts,
        on_tokens=stream,
        **drafter,
        **common.decoding_arguments(),
        **options,
    )
    runs = {"plain" if FLAGS.drafter == "none" else "speculative": [result]}
    if FLAGS.output and common.is_first_process():
        jsonl.write_completions(FLAGS.output, prompts, result)
    if not stream:
        for prompt, completion in zip(prompts, result.completions, strict=True):
            print(
                f"{jsonl.headline(prompt)}\n{completion.tokens if completion.text is None else completion.text}\n"
            )
    if FLAGS.compare:
        plain = generation.generate(
            target, "none", prompts, **common.decoding_arguments(), **options
        )
        runs = {"plain": [plain], **runs}
    k = drafter["num_speculative_tokens"] or 0
    if unusable := sum(completion.unusable_drafts for completion in result.completions):
        print(
            f"Warning: the drafter's logits were NaN, or all -inf, for {unusable} drafts: its weights are damaged, or too "
            "large for the dtype. The text is the target's all the same."
        )
    console.print(common.speed_table(f"{FLAGS.drafter}, K = {k}", runs, {"speculative": k}))
    return _report_comparison(runs, options["temperature"]) if FLAGS.compare else 0


def _report_comparison(runs, temperatures) -> int:
    """Says what speculation did to speed and text. Returns the exit code."""
    if common.tokens_per_second(runs["speculative"]) < common.tokens_per_second(runs["plain"]):
        print(
            "Speculation was slower than plain decoding here: try a smaller --num_speculative_tokens, or "
            "--drafter=none."
        )
    if FLAGS.verify == "coupled" or not any(temperatures):
        return common.report_equality(runs)
    print(
        "Sampled texts differ with speculation, their distribution does not. --verify=coupled makes the texts equal, too."
    )
    return 0
