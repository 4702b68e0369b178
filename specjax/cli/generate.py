"""specjax generate: text from a model, with speculative decoding."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

from absl import flags
from rich.console import Console

from specjax.cli import flags as common_flags
from specjax.cli import jsonl, models, outputs, processes
from specjax.cli.flags import Decoding
from specjax.engine import batch
from specjax.engine.generate import MAX_NUM_SEQS
from specjax.engine.load import Model
from specjax.engine.request import Completion, Generation, OnCompletion, Prompt
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.report import progress, tables
from specjax.report.stream import TextStream, print_text

FLAGS = flags.FLAGS
MANY = 8  # prompts: a terminal shows how many are finished, and their texts are in --output


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
    options: dict[str, list[Any]]

    def part(self, indexes: list[int]) -> Prompts:
        """Returns some of the prompts."""
        options = {name: [x[i] for i in indexes] for name, x in self.options.items()}
        prompts, names = [self.prompts[i] for i in indexes], [self.names[i] for i in indexes]
        return Prompts(prompts, names, options)


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
    flags.DEFINE_integer(
        "min_tokens", 0, "No end-of-sequence token is generated before so many tokens."
    )
    flags.DEFINE_float(
        "presence_penalty", 0.0, "Subtracted from the logits of tokens that are in the output."
    )
    flags.DEFINE_float(
        "frequency_penalty",
        0.0,
        "Subtracted from the logits of tokens once for each time that they are in the output.",
    )
    flags.DEFINE_float(
        "repetition_penalty",
        1.0,
        "Makes tokens of prompt and output less likely, if above 1: their logits are divided by it "
        "if positive, else multiplied.",
    )
    flags.DEFINE_multi_string("stop", [], "A text that ends a completion; may be repeated.")
    flags.DEFINE_bool("ignore_eos", False, "Continue after end-of-sequence tokens.")
    flags.DEFINE_bool("compare", False, "Also decode without speculation, and report both.")
    common_flags.define_path(
        "output",
        None,
        "JSONL file to write completions to, each when it is finished; it must not exist, but with "
        "--resume.",
    )
    flags.DEFINE_bool(
        "resume",
        False,
        "Continue a run that was interrupted: prompts whose completions are in --output are not "
        "generated again.",
    )
    flags.DEFINE_integer(
        "max_num_seqs", MAX_NUM_SEQS, "Most prompts that are decoded at a time; the others wait."
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
        stop=tuple(FLAGS.stop),
        compare=FLAGS.compare,
        output=FLAGS.output,
        resume=FLAGS.resume,
        max_num_seqs=FLAGS.max_num_seqs,
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
    decoding: Decoding,
    prompts: Prompts,
    *,
    ignore_eos: bool,
    stop: tuple[str, ...],
    compare: bool,
    output: str | None,
    resume: bool,
    max_num_seqs: int,
) -> int:
    """Generates completions, and prints and writes them.

    Args:
      decoding: how models are loaded and run.
      prompts: the prompts to complete.
      ignore_eos: continues after end-of-sequence tokens.
      stop: texts that end a completion.
      compare: also decodes without speculation, and reports both.
      output: JSONL file to write.
      resume: continues an earlier run whose file is there.
      max_num_seqs: prompts that are decoded at a time.

    Returns:
      The exit code.
    """
    (drafter,) = decoding.drafters
    _check_options(decoding, compare, output, resume)
    processes.join(decoding.processes)
    outputs.check_output(output, resume=resume)
    for name, value in (("ignore_eos", ignore_eos), ("stop", stop)):
        if value:
            prompts.options[name] = [value] * len(prompts.prompts)
    writer = outputs.CompletionWriter(output, prompts.prompts, _by_prompt(prompts), resume=resume)
    left = [i for i in range(len(prompts.prompts)) if i not in writer.finished]
    if not left:
        print(f"All {len(prompts.prompts)} prompts are finished: see {output}.")
        return 0
    part = prompts.part(left)
    options = {name: part.options[name] for name in jsonl.ROW_OPTIONS}
    options |= {"max_num_seqs": max_num_seqs, "stop": stop}
    if ignore_eos:
        options["eos_ids"] = ()
    setup, speculations = models.load_models(decoding)
    speculation = speculations[drafter]
    ids = _encode(setup.target, part)
    console = Console(highlight=False)

    def write(index: int, completion: Completion) -> None:
        writer.write(left[index], completion)

    with writer:
        generate = functools.partial(setup.generate, speculation, ids, **options)
        shows_bar = output is not None and len(left) > MANY
        result = _generate(generate, part, setup.target, console, write, shows_bar)
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


def _generate(
    generate: Callable[..., Generation],
    prompts: Prompts,
    target: Model,
    console: Console,
    write: OnCompletion,
    shows_bar: bool,
) -> Generation:
    """Generates, and shows on the way what a terminal or a pipe should see.

    Args:
      generate: `Setup.generate` with its other arguments.
      prompts: what is generated.
      target: the model.
      console: the standard output.
      write: called with each finished completion.
      shows_bar: whether a terminal shows a progress bar instead of the texts.
    """
    is_live = console.is_terminal and processes.is_only()
    if is_live and shows_bar:
        with progress.bar("prompts", len(prompts.prompts)) as advance:

            def write_and_advance(index: int, completion: Completion) -> None:
                write(index, completion)
                advance()

            return generate(on_completion=write_and_advance)
    if is_live and target.tokenizer is not None:
        headlines = [jsonl.headline(prompt) for prompt in prompts.prompts]
        stream = TextStream(console, target, headlines)
        return generate(on_tokens=stream.on_tokens, on_completion=write)
    with _Printer(console, prompts.prompts, write) as printer:
        return generate(on_completion=printer.on_completion)


def _check_options(decoding: Decoding, compare: bool, output: str | None, resume: bool) -> None:
    if compare and decoding.drafters == ("none",):
        raise SpecJAXError(
            "--compare compares a drafter with plain decoding; --drafter=none is plain decoding"
        )
    if not resume:
        return
    if output is None:
        raise SpecJAXError("--resume continues an --output, but none is given")
    if compare:
        raise SpecJAXError("--resume skips prompts, so --compare cannot compare all of them")
    if decoding.processes.num_processes is not None:
        raise SpecJAXError("--resume works in one process, not in several")


def _by_prompt(prompts: Prompts) -> list[dict[str, Any]]:
    """Returns the sampling options of each prompt."""
    rows = []
    for i in range(len(prompts.prompts)):
        rows.append({name: values[i] for name, values in prompts.options.items()})
    return rows


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

    def __init__(self, console: Console, prompts: list[Prompt], write: OnCompletion):
        self._console, self._prompts, self._write = console, prompts, write
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
        self._write(index, completion)
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
