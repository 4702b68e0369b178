"""specjax generate: text from a model, with speculative decoding."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from absl import flags
from rich.console import Console

from specjax.cli import flags as common_flags
from specjax.cli import jsonl, models, outputs, processes
from specjax.cli.flags import Decoding
from specjax.engine import batch
from specjax.engine.load import Model
from specjax.engine.request import Completion, Generation, Prompt
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.report import tables
from specjax.report.stream import TextStream, print_text

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts of a run, one entry each.

    Attributes:
      prompts: texts or chats.
      names: their names in errors, such as a file and line.
      options: by name, sampling options of every prompt.
    """

    prompts: list[Prompt]
    names: list[str]
    options: dict[str, list[float]]


def define_flags() -> None:
    """Defines the flags of `specjax generate`."""
    common_flags.define_decoding_flags()
    flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
    common_flags.define_path(
        "prompts_file",
        None,
        "JSONL file of prompts: strings, or objects with 'prompt' or 'messages' and, optionally, "
        f"sampling options of their own ({', '.join(jsonl.ROW_OPTIONS)}).",
    )
    flags.DEFINE_bool(
        "chat", False, "Wrap each prompt in the model's chat template as a message of the user."
    )
    flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to generate per prompt.")
    flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 takes the most likely token.")
    flags.DEFINE_integer("top_k", 0, "Sample from this many most likely tokens; 0 is off.")
    flags.DEFINE_float(
        "top_p", 1.0, "Sample from the smallest set of most likely tokens with this mass."
    )
    flags.DEFINE_float(
        "min_p", 0.0, "Sample from tokens with at least this share of the largest probability."
    )
    flags.DEFINE_integer("seed", 0, "Seed of every prompt; the same seed gives the same text.")
    flags.DEFINE_bool("ignore_eos", False, "Continue after end-of-sequence tokens.")
    flags.DEFINE_bool("compare", False, "Also decode without speculation, and report both.")
    common_flags.define_path(
        "output", None, "JSONL file to write completions to; it must not exist."
    )


def main(argv: list[str]) -> int:
    """Runs the generation with the values of the flags.

    Returns:
      The exit code: 1 where --compare finds texts that should be equal and are not.
    """
    del argv
    defaults = {name: getattr(FLAGS, name) for name in jsonl.ROW_OPTIONS}
    prompts = read_prompts(FLAGS.prompts_file, FLAGS.prompt, defaults, FLAGS.chat)
    return run(
        common_flags.decoding(),
        prompts,
        ignore_eos=FLAGS.ignore_eos,
        compare=FLAGS.compare,
        output=FLAGS.output,
    )


def read_prompts(
    path: str | None, texts: list[str], defaults: dict[str, float], is_chat: bool
) -> Prompts:
    """The prompts of a file and of the command line, in this order.

    Args:
      path: path of the file; None for no file.
      texts: texts of the command line.
      defaults: sampling options of prompts without options of their own.
      is_chat: wraps texts as messages of the user.

    Raises:
      SpecJAXError: naming the file and line at fault; or if there is no prompt.
    """
    rows = jsonl.read_prompts(path, jsonl.ROW_OPTIONS) if path else []
    for text in texts:
        rows.append({"prompt": text, "where": f"prompt {len(rows)}"})
    if not rows:
        raise SpecJAXError("no prompt was given; use --prompt or --prompts_file")
    prompts = []
    for row in rows:
        prompt = row["prompt"]
        if is_chat and isinstance(prompt, str) and prompt:
            prompt = [{"role": "user", "content": prompt}]
        prompts.append(prompt)
    options = {}
    for name, default in defaults.items():
        batch.per_prompt(name, default, 1)
        for row in rows:
            if name in row:
                _check_option(name, row)
        options[name] = [row.get(name, default) for row in rows]
    return Prompts(prompts, [row["where"] for row in rows], options)


def _check_option(name: str, row: dict) -> None:
    try:
        batch.per_prompt(name, row[name], 1)
    except SpecJAXError as error:
        raise SpecJAXError(f"{row['where']}: {error}") from error


def run(
    decoding: Decoding, prompts: Prompts, *, ignore_eos: bool, compare: bool, output: str | None
) -> int:
    """Generates completions, and prints and writes them.

    Args:
      decoding: how models are loaded and run.
      prompts: the prompts to complete.
      ignore_eos: continues after end-of-sequence tokens.
      compare: also decodes without speculation, and reports both.
      output: JSONL file to write.

    Returns:
      The exit code.
    """
    (drafter,) = decoding.drafters
    if compare and drafter == "none":
        raise SpecJAXError(
            "--compare compares a drafter with plain decoding; --drafter=none is plain decoding"
        )
    processes.join(decoding.processes)
    outputs.check_output(output)
    options: dict[str, Any] = dict(prompts.options)
    if ignore_eos:
        options["eos_ids"] = ()
    setup, speculations = models.load_models(decoding)
    speculation = speculations[drafter]
    ids = _encode(setup.target, prompts)
    console = Console(highlight=False)
    with outputs.CompletionWriter(output, prompts.prompts) as writer:
        is_live = console.is_terminal and processes.is_only()
        if is_live and setup.target.tokenizer is not None:
            headlines = [jsonl.headline(prompt) for prompt in prompts.prompts]
            stream = TextStream(console, setup.target, headlines)
            result = setup.generate(
                speculation,
                ids,
                on_tokens=stream.on_tokens,
                on_completion=writer.write,
                **options,
            )
        else:
            with _Printer(console, prompts.prompts, writer) as printer:
                result = setup.generate(
                    speculation, ids, on_completion=printer.on_completion, **options
                )
    if writer.error:
        raise SpecJAXError(writer.error)
    runs = {"plain" if drafter == "none" else "speculative": [result]}
    if compare:
        plain = setup.generate(None, ids, **options)
        runs = {"plain": [plain], **runs}
    _warn_of_unusable_drafts(result)
    K = speculation.num_speculative_tokens or 0
    console.print(tables.speed_table(f"{drafter}, K = {K}", runs, {"speculative": K}))
    if not compare:
        return 0
    is_sampled = any(prompts.options["temperature"])
    return _report_comparison(runs, is_exact=decoding.verify == "coupled" or not is_sampled)


def _encode(target: Model, prompts: Prompts) -> list[tuple[int, ...]]:
    """The token ids of every prompt. Raises SpecJAXError, which names the prompt."""
    encoded = []
    for prompt, name in zip(prompts.prompts, prompts.names, strict=True):
        ids = batch.encode(target, prompt, name)
        batch.check_context(target, ids, name)
        encoded.append(ids)
    return encoded


class _Printer:
    """Writes finished completions, and prints them in the order of the prompts.

    A context manager: at its end, even after an interrupt, completions that wait for an earlier one
    are printed as well.
    """

    def __init__(self, console: Console, prompts: list[Prompt], writer: outputs.CompletionWriter):
        self._console, self._prompts, self._writer = console, prompts, writer
        self._waiting: dict[int, Completion] = {}
        self._next = 0

    def __enter__(self) -> _Printer:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, OSError):  # nothing can be printed
            return
        for index in sorted(self._waiting):
            self._print(index)

    def on_completion(self, index: int, completion: Completion) -> None:
        """Callback for `specjax.generate`."""
        self._writer.write(index, completion)
        self._waiting[index] = completion
        while self._next in self._waiting:
            self._print(self._next)
            self._next += 1

    def _print(self, index: int) -> None:
        completion = self._waiting.pop(index)
        text = completion.tokens if completion.text is None else completion.text
        print_text(self._console, f"{jsonl.headline(self._prompts[index])}\n{text}\n\n")
        self._console.file.flush()


def _warn_of_unusable_drafts(result: Generation) -> None:
    unusable = sum(completion.unusable_drafts for completion in result.completions)
    if unusable:
        warnings.warn(
            f"the drafter's logits were NaN, or all -inf, for {unusable} drafts; its weights are "
            "damaged, or too large for the dtype; the text still follows the target",
            SpecJAXWarning,
            stacklevel=2,
        )


def _report_comparison(runs: dict[str, list[Generation]], is_exact: bool) -> int:
    """Prints the effect of speculation on speed and text.

    Args:
      runs: "plain" and "speculative".
      is_exact: whether the texts should be equal.

    Returns:
      The exit code.
    """
    rates = {name: tables.tokens_per_second(batches) for name, batches in runs.items()}
    if rates["speculative"] < rates["plain"]:
        print(
            "Speculation was slower than plain decoding here: try a smaller "
            "--num_speculative_tokens, or --drafter=none."
        )
    if not is_exact:
        print(
            "Sampled texts may differ with speculation; their distribution does not. "
            "--verify=coupled makes the texts equal as well."
        )
        return 0
    same = tables.same_tokens(runs)
    print(tables.equality_line(same))
    return 0 if same else 1
