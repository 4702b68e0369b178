"""specjax train: trains a drafter for a target, such as an EAGLE head or a small draft model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from typing import Any

import numpy as np
from absl import flags
from rich import progress as progress_lib
from rich.console import Console
from rich.table import Table

from specjax import devices, dtypes, files
from specjax.checkpoints_convert.table import CheckpointReader
from specjax.cli import flags as common_flags
from specjax.cli import jsonl
from specjax.drafters import registry
from specjax.engine import batch, load
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.report import provenance, tables
from specjax.train import curves, data, evaluate, identity, loop, losses, self_generate
from specjax.train.data import Dataset, Rows
from specjax.train.evaluate import Score
from specjax.train.loop import TrainConfig
from specjax.train.losses import Objective, Start
from specjax.train.self_generate import GenerateConfig

LOG_EVERY = 50  # steps between lines where there is no progress bar
RATE_STEPS = 20  # steps that the shown loss and speed are averaged over
# Options that must match for a run to resume, besides those of `TrainConfig`.
RUN_OPTIONS = (
    "target",
    "drafter",
    "draft",
    "data",
    "held_out",
    "self_generate",
    "loss",
    "ttt_steps",
    "dtype",
)
GENERATE_FLAGS = ("only_generate", "temperatures", "generate_batch_size", "stop_at_eos")
CONFIG_HELP = {
    "batch_size": "Rows per update.",
    "gradient_accumulation_steps": "Equal parts of a batch, whose gradients are accumulated.",
    "learning_rate": "Highest learning rate, after the warm-up.",
    "warmup": "Steps over which the learning rate rises.",
    "weight_decay": "Weight decay of AdamW.",
    "max_grad_norm": "Larger gradients are scaled down to this norm.",
    "unroll_from": "Fraction of the steps after which --ttt_steps applies; before, it is 1.",
    "prompt_weight": "Weight of the tokens of prompts; those after prompts have 1.",
    "eval_every": "Steps between evaluations; 0 evaluates at the end only.",
    "save_every": "Steps between checkpoints.",
    "patience": "Evaluations without improvement after which training ends early; 0 is off.",
    "seed": "Seed of the order of the rows, of new parameters and of --self_generate.",
}


def define_flags() -> None:
    """Defines the flags of `specjax train`."""
    common_flags.define_target()
    drafters = losses.trainable_drafters()
    flags.DEFINE_enum("drafter", registry.DEFAULT_TRAINED, drafters, "Kind of drafter to train.")
    common_flags.define_path(
        "output",
        None,
        "Folder of the run. The same command resumes a run that was interrupted.",
        required=True,
    )
    _define_data_flags()
    _define_draft_flags()
    flags.DEFINE_enum(
        "loss",
        "kl",
        list(losses.DISTANCES),
        "Distance from the target's distribution: Kullback-Leibler divergence or total variation.",
    )
    flags.DEFINE_integer("steps", None, "Number of updates of the parameters.", required=True)
    for field in dataclasses.fields(TrainConfig):
        if field.name in CONFIG_HELP:
            is_integer = isinstance(field.default, int)
            define = flags.DEFINE_integer if is_integer else flags.DEFINE_float
            define(field.name, field.default, CONFIG_HELP[field.name])
    flags.DEFINE_float(
        "max_minutes", None, "End after this time; the same command resumes the run."
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        list(dtypes.DTYPES),
        "dtype to compute in; by default float32 on a CPU, else that of the target. Trained "
        "parameters are float32.",
    )
    common_flags.define_mesh_flags()


def _define_data_flags() -> None:
    common_flags.define_paths(
        "data",
        "Texts (.txt, .jsonl) to train on, or folders of rows that --self_generate has written.",
    )
    common_flags.define_paths("held_out", "Texts or folders of rows, for evaluation only.")
    common_flags.define_path(
        "self_generate",
        None,
        "JSONL file of prompts, optionally with a 'domain': train on the target's continuations, "
        "which are kept in OUTPUT/rows.",
    )
    flags.DEFINE_integer("max_seq_len", 256, "Tokens of a row, prompt and continuation.")
    flags.DEFINE_integer("generate_batch_size", 64, "Prompts to continue at a time.", lower_bound=1)
    flags.DEFINE_list(
        "temperatures",
        ["0", "0", "0.7", "1", "1"],
        "Temperatures of the continuations; a repeated value is used more often.",
    )
    flags.DEFINE_bool(
        "stop_at_eos",
        False,
        "End a continuation at an end-of-sequence token. By default it continues to --max_seq_len; "
        "chat models then write another turn.",
    )
    flags.DEFINE_bool("only_generate", False, "End after --self_generate, without training.")


def _define_draft_flags() -> None:
    common_flags.define_path(
        "draft",
        None,
        "EAGLE head or draft model to train further. By default a new EAGLE head starts as a copy "
        "of the target's last layer.",
    )
    common_flags.define_path(
        "draft_config", None, "Folder with the config.json of a new draft model."
    )
    flags.DEFINE_list(
        "aux_layers",
        [],
        "Target layers that a new EAGLE head reads: three for EAGLE-3 (the default), the last for "
        "EAGLE-1.",
    )
    flags.DEFINE_integer(
        "num_draft_tokens",
        None,
        "Number of tokens that a new EAGLE head can draft, the most frequent of the rows; by "
        "default all.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "ttt_steps",
        3,
        "Consecutive tokens that an EAGLE head predicts, from the second on with its own features.",
        lower_bound=1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is made of, besides the hyperparameters of `TrainConfig`.

    Attributes:
      target: path of the target.
      output: folder of the run.
      drafter: kind of drafter to train.
      draft: path of a draft to train further; None for a new one.
      draft_config: folder of the config.json of a new draft model.
      aux_layers: target layers that a new EAGLE head reads, as text; [] for the default.
      num_draft_tokens: number of tokens that a new EAGLE head can draft; None for all.
      ttt_steps: consecutive tokens that an EAGLE head predicts.
      loss: distance from the target's distribution.
      dtype: name of the dtype to compute in; None for the default.
      data: texts and folders of rows to train on.
      held_out: texts and folders of rows for evaluation.
      max_seq_len: tokens of a row.
      self_generate: file of prompts to continue; None for none.
      generate_batch_size: prompts to continue at a time.
      temperatures: temperatures of the continuations, as text.
      stop_at_eos: ends a continuation at an end-of-sequence token.
      only_generate: ends the run after the continuations.
      max_minutes: minutes after which training pauses; None for no limit.
      degrees: tensor parallelism of target and draft, and data parallelism.
      given: names of the flags that were given.
    """

    target: str
    output: str
    drafter: str
    draft: str | None
    draft_config: str | None
    aux_layers: list[str]
    num_draft_tokens: int | None
    ttt_steps: int
    loss: str
    dtype: str | None
    data: list[str]
    held_out: list[str]
    max_seq_len: int
    self_generate: str | None
    generate_batch_size: int
    temperatures: list[str]
    stop_at_eos: bool
    only_generate: bool
    max_minutes: float | None
    degrees: tuple[int, int, int]
    given: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
      rows: training data.
      held_out: for evaluation.
      prompts: to continue, see `jsonl.read_prompts`.
    """

    rows: Dataset
    held_out: Dataset
    prompts: list[dict]


def main(argv: list[str]) -> None:
    """Trains with the values of the flags."""
    del argv
    config = common_flags.read(TrainConfig)
    options = common_flags.read(
        Options,
        degrees=common_flags.mesh_degrees(),
        given=common_flags.given(__name__),
    )
    run(options, config, common_flags.invocation(__name__))


def run(options: Options, config: TrainConfig, invocation: provenance.Invocation) -> None:
    """Trains a drafter, and writes it with its evaluation.

    Raises:
      SpecJAXError: for options, files or data that cannot be used.
    """
    _check_options(options, config)
    reader = load.open_source(options.target)
    start = _start(options)
    objective = _objective(options, reader, start)
    loaded = _read_data(options, reader)
    num_rows = len(loaded.rows) + len(loaded.prompts)
    config.check_batches(num_rows, objective.mesh)
    values = {name: getattr(options, name) for name in RUN_OPTIONS}
    values["shape"] = dataclasses.asdict(objective.draft_config)
    values["held_out_contents"] = loaded.held_out.checksum
    output = pathlib.Path(options.output)
    # Training checks this again, with more values.
    identity.check(output / "run", loop.RUN, values | dataclasses.asdict(config))
    if not (output / "run").exists():
        files.check_not_exists(output / "drafter")
    files.make_folder(output)

    target = load.load(options.target, dtype=options.dtype, mesh=objective.mesh)
    objective = dataclasses.replace(objective, dtype=target.dtype)
    evaluation = None
    if options.held_out:
        evaluation = evaluate.Evaluation(objective, target.params, loaded.held_out)
    rows = loaded.rows
    if loaded.prompts:
        prompts = _fitting(options, target, loaded.prompts)
        if not options.only_generate:
            config.check_batches(len(rows) + len(prompts), objective.mesh)
        generating = _generate_config(options, config.seed, objective.aux_layers)
        shards = _continue(target, prompts, output / "rows", generating)
        rows = Dataset((*rows.shards, *shards))
        if options.only_generate:
            return
    values |= {"rows": len(rows), "tokens": rows.num_tokens, "contents": rows.checksum}
    params, draft_ids_U = objective.initial(target, rows, start, config.seed)
    training = loop.Run(objective, config, target.params, draft_ids_U, rows, evaluation)
    result = _train(training, params, output / "run", values, options.max_minutes)
    if result.out_of_time:
        step = result.history[-1]["step"]
        print(f"step {step} of {config.steps}: the same command resumes the run")
    _write(output, training, target, result, invocation)
    if result.scores:
        Console().print(score_table(result.scores))


def _check_options(options: Options, config: TrainConfig) -> None:
    """Raises SpecJAXError for options that contradict each other or have no effect."""
    if not options.self_generate and not options.data:
        raise SpecJAXError("no training data was given; use --data or --self_generate")
    for name in GENERATE_FLAGS:
        if name in options.given and not options.self_generate:
            raise SpecJAXError(f"--{name} applies only with --self_generate")
    if config.patience and not options.held_out:
        raise SpecJAXError(f"--patience={config.patience} requires --held_out")
    if "eval_every" in options.given and not options.held_out:
        raise SpecJAXError("--eval_every requires --held_out")
    if config.patience and not config.eval_every:
        raise SpecJAXError(
            f"--patience={config.patience} requires evaluations before the end, got --eval_every=0"
        )
    common_flags.numbers("temperatures", options.temperatures)
    for drafter in losses.trainable_drafters():
        for name in losses.objective_class(drafter).OPTIONS:
            own = losses.objective_class(options.drafter).OPTIONS
            if name in options.given and name not in own:
                raise SpecJAXError(f"--{name} applies only to --drafter={drafter}")


def _start(options: Options) -> Start:
    """The starting point of training."""
    try:
        aux_layers = tuple(map(int, options.aux_layers))
    except ValueError:
        given = ",".join(options.aux_layers)
        raise SpecJAXError(f"--aux_layers must be numbers of layers, got {given}") from None
    config = load.read_model_config(options.draft_config) if options.draft_config else None
    draft = load.resolve_draft(options.draft)
    return Start(draft and str(draft), config, aux_layers, options.num_draft_tokens)


def _objective(options: Options, reader: CheckpointReader, start: Start) -> Objective:
    """The objective in the default dtype."""
    kind = losses.objective_class(options.drafter)
    limit = reader.config.max_position_embeddings
    if options.max_seq_len > limit:
        raise SpecJAXError(
            f"--max_seq_len={options.max_seq_len} exceeds the context of the target, {limit} tokens"
        )
    draft_config = kind.make_config(start, reader.config)
    mesh = devices.make_mesh(*options.degrees)
    ttt_steps = options.ttt_steps if "ttt_steps" in kind.OPTIONS else 1
    objective = kind(reader.config, draft_config, options.loss, ttt_steps, mesh=mesh)
    least = data.SKIPPED + 3 + ttt_steps
    if options.max_seq_len < least:
        raise SpecJAXError(
            f"--max_seq_len must be at least {least}, got {options.max_seq_len}: no token would be "
            "predicted"
        )
    objective.check_shardable()
    return objective


def _read_data(options: Options, reader: CheckpointReader) -> Data:
    """Reads rows to train on, held-out rows and prompts."""
    prompts = jsonl.read_prompts(options.self_generate) if options.self_generate else []
    rows = _open(options, options.data, reader)
    held_out = _open(options, options.held_out, reader)
    if prompts or "max_seq_len" in options.given:
        wanted = options.max_seq_len
        for shard in rows.shards:
            length = shard.tokens_BS.shape[1]
            if length != wanted:
                raise SpecJAXError(
                    f"--max_seq_len={wanted}, but rows of --data have {length} positions"
                )
    return Data(rows, held_out, prompts)


def _open(options: Options, paths: list[str], reader: CheckpointReader) -> Dataset:
    """Rows of folders and text files."""
    shards: list[Rows] = []
    texts = []
    for path in paths:
        if pathlib.Path(path).is_dir():
            shards += data.read_folder(path, reader.config)
        else:
            texts.append(path)
    if texts:
        if reader.tokenizer is None:
            raise SpecJAXError(f"{options.target} has no tokenizer, which texts require")
        shards.append(data.read_texts(texts, reader.tokenizer, options.max_seq_len))
    return Dataset(tuple(shards))


@dataclasses.dataclass(frozen=True)
class _Prompt:
    ids: tuple[int, ...]
    domain: str


def _fitting(options: Options, target: Model, rows: list[dict]) -> list[_Prompt]:
    """The prompts that are not too long."""
    limit = options.max_seq_len // 2
    fitting = []
    for row in rows:
        ids = batch.encode(target, row["prompt"], row["where"])
        if len(ids) <= limit:
            fitting.append(_Prompt(ids, row.get("domain", "")))
    left_out = len(rows) - len(fitting)
    if left_out:
        print(
            f"{left_out} of {len(rows)} prompts are longer than half a row ({limit} tokens) and "
            "are left out"
        )
    if not fitting:
        raise SpecJAXError(
            f"{options.self_generate}: no prompt fits into half of "
            f"--max_seq_len={options.max_seq_len}"
        )
    return fitting


def _generate_config(options: Options, seed: int, aux_layers: tuple[int, ...]) -> GenerateConfig:
    """How continuations are generated."""
    return GenerateConfig(
        max_seq_len=options.max_seq_len,
        batch_size=options.generate_batch_size,
        temperatures=tuple(common_flags.numbers("temperatures", options.temperatures)),
        seed=seed,
        aux_layers=aux_layers,
        eos_ids=None if options.stop_at_eos else (),
    )


def _continue(
    target: Model, prompts: list[_Prompt], folder: pathlib.Path, config: GenerateConfig
) -> list[Rows]:
    """The target's continuations of prompts."""
    ids = [prompt.ids for prompt in prompts]
    domains = [prompt.domain for prompt in prompts]
    console = Console()
    with progress_lib.Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("generating", total=None)

        def on_shard(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        paths = self_generate.self_generate(target, ids, domains, folder, config, on_shard)
    return [data.read_shard(path) for path in paths]


def _train(
    training: loop.Run,
    params: Any,
    folder: pathlib.Path,
    values: dict[str, Any],
    max_minutes: float | None,
) -> loop.Result:
    """Trains with a progress bar."""
    console = Console()
    columns = (*progress_lib.Progress.get_default_columns(), "{task.fields[figures]}")
    max_seconds = None if max_minutes is None else 60 * max_minutes
    with progress_lib.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=training.config.steps, figures="")
        reporter = _Reporter(bar, task)
        return loop.train(
            training, params, folder, values, on_record=reporter, max_seconds=max_seconds
        )


class _Reporter:
    """Shows the loss, tokens per second and acceptance on held-out rows during training."""

    def __init__(self, bar: progress_lib.Progress, task: progress_lib.TaskID):
        self._bar, self._task = bar, task
        self._seen: list[dict] = []
        self._held_out = ""

    def __call__(self, record: dict) -> None:
        if "held_out" in record:
            means = evaluate.summary(evaluate.read_scores(record["held_out"]))
            self._held_out = "held out: " + " ".join(f"{mean:.2f}" for mean in means)
            self._show(f"step {record['step']}: {self._held_out}")
            return
        self._seen = [*self._seen[-RATE_STEPS:], record]
        first, *others = self._seen
        seconds = record["seconds"] - first["seconds"]
        num_tokens = sum(other["tokens"] for other in others)
        rate = num_tokens / seconds if seconds > 0 else 0
        loss = np.mean([other["loss"] for other in self._seen])
        figures = f"loss {loss:.3f}  {rate:,.0f} tokens/s  {self._held_out}"
        self._bar.update(self._task, completed=record["step"], figures=figures)
        if record["step"] % LOG_EVERY == 0 and others:
            self._show(f"step {record['step']}: {figures}")

    def _show(self, line: str) -> None:
        if self._bar.disable:  # without a terminal: a line now and then
            print(line, flush=True)


def _write(
    output: pathlib.Path,
    training: loop.Run,
    target: Model,
    result: loop.Result,
    invocation: provenance.Invocation,
) -> None:
    """Writes the drafter, its scores and the curves; replaces earlier ones of the same run."""
    curves.draw(result.history, output / "curves.png")
    scores = [dataclasses.asdict(score) for score in result.scores]
    (output / "evaluation.json").unlink(missing_ok=True)
    provenance.write_figures(
        output / "evaluation.json",
        {"step": result.step, "scores": scores},
        invocation,
    )
    folder, new = output / "drafter", output / f"drafter.new-{os.getpid()}"
    training.objective.save(new, target, result.params, training.draft_ids_U)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    print(f"wrote {folder}, the drafter at step {result.step}")


def score_table(scores: list[Score]) -> Table:
    """Acceptance by draft position."""
    num_columns = len(scores[0].by_position)
    numbers = map(str, range(1, num_columns + 1))
    rows = []
    for score in scores:
        rates = map(tables.number, score.by_position)
        count = f"{score.num_positions:,}"
        rows.append([score.domain, score.text, str(score.temperature), count, *rates])
    return tables.table(
        "Accepted on held-out rows, by draft position",
        ("domain", "text", "temperature", "positions", *numbers),
        rows,
        num_texts=2,
    )
