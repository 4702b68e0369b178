"""specjax train: a drafter of your own for a target: an EAGLE head, or a small draft model."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich import progress as progress_lib
from rich.console import Console
from rich.table import Table

from specjax import dtypes, files, llama, parallel
from specjax.bench import plan
from specjax.checkpoints_convert import eagle as heads
from specjax.checkpoints_convert import table
from specjax.cli import flags as common_flags
from specjax.cli import jsonl, processes
from specjax.engine import batch
from specjax.engine import load as checkpoint
from specjax.errors import SpecJAXError
from specjax.report import provenance, tables
from specjax.train import curves, data, evaluate, init_head, self_generate
from specjax.train import loop as trainer
from specjax.train.evaluate import Score
from specjax.train.loop import TrainConfig
from specjax.train.objective import DISTANCES, Objective

FLAGS = flags.FLAGS
LOG_EVERY = 50  # steps, where there is no progress bar
RUN_FLAGS = (
    "target",
    "drafter",
    "draft",
    "data",
    "held_out",
    "self_generate",
    "loss",
    "num_steps",
    "dtype",
)
GENERATE_FLAGS = ("only_generate", "temperatures", "generate_batch_size", "stop_at_eos")
DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(TrainConfig)
}  # but "steps", which has none


def define_flags() -> None:
    """Defines the flags of `specjax train`."""
    flags.DEFINE_string(
        "target",
        None,
        "The model to draft for: a checkpoint or a Hugging Face folder.",
        required=True,
    )
    flags.DEFINE_enum("drafter", "eagle", ["eagle", "draft_model"], "What to train.")
    flags.DEFINE_string(
        "output",
        None,
        "Folder of the run. One that was interrupted goes on, with the same flags.",
        required=True,
    )
    flags.DEFINE_list(
        "data", [], "Texts (.txt, .jsonl), or folders of rows that a run has generated itself."
    )
    flags.DEFINE_list("held_out", [], "The same, for evaluation only.")
    flags.DEFINE_string(
        "self_generate",
        None,
        "JSONL file of prompts, perhaps with a 'domain' each: train on the "
        "target's own continuations, which are kept in OUTPUT/rows.",
    )
    flags.DEFINE_integer("max_seq_len", 256, "Tokens of a row: prompt and continuation.")
    flags.DEFINE_integer("generate_batch_size", 64, "Prompts to continue at a time.", lower_bound=1)
    flags.DEFINE_list(
        "temperatures",
        ["0", "0", "0.7", "1", "1"],
        "Of the continuations, each as often as it is named.",
    )
    flags.DEFINE_bool(
        "stop_at_eos",
        False,
        "End a continuation at an end of sequence. Otherwise the target goes on, "
        "as chat models do with another question, and no row is idle.",
    )
    flags.DEFINE_bool("only_generate", False, "Stop when the rows of --self_generate are there.")
    flags.DEFINE_string(
        "draft",
        None,
        "Begin with this head or draft model. By default a head begins with the "
        "target's last layer.",
    )
    flags.DEFINE_string(
        "draft_config", None, "For a draft model without --draft: a folder with its config.json."
    )
    flags.DEFINE_list(
        "aux_layers",
        [],
        "Target layers that a head reads: three for EAGLE-3 (the default), the last for EAGLE-1.",
    )
    flags.DEFINE_integer(
        "num_draft_tokens",
        None,
        "How many tokens a head can guess: those that the rows have most often; by default all.",
        lower_bound=1,
    )
    flags.DEFINE_enum("loss", "kl", list(DISTANCES), "Divergence, or total variation.")
    flags.DEFINE_integer(
        "num_steps",
        3,
        "How many tokens in a row a head guesses, from the second on with its own features.",
        lower_bound=1,
    )
    flags.DEFINE_integer("steps", None, "Updates of the parameters.", required=True)
    for name in (
        "batch_size",
        "accumulate",
        "warmup",
        "eval_every",
        "save_every",
        "patience",
        "seed",
    ):
        flags.DEFINE_integer(name, DEFAULTS[name], "See specjax.train.trainer.TrainConfig.")
    for name in ("learning_rate", "weight_decay", "clip", "unroll_from", "prompt_weight"):
        flags.DEFINE_float(name, DEFAULTS[name], "See specjax.train.trainer.TrainConfig.")
    flags.DEFINE_float("max_minutes", None, "End after this time; the same command goes on.")
    flags.DEFINE_enum(
        "dtype",
        None,
        list(dtypes.DTYPES),
        "dtype to compute in; by default float32 on CPU, else that of "
        "the target. What is trained is float32.",
    )
    common_flags.define_mesh_flags()


def main(argv: list[str]) -> None:
    """Runs the training that the flags ask for."""
    del argv
    cfg = TrainConfig(**{name: getattr(FLAGS, name) for name in DEFAULTS})
    output = pathlib.Path(FLAGS.output)
    _check_flags()
    opened = checkpoint.open_source(FLAGS.target)
    prompts = jsonl.read_prompts(FLAGS.self_generate) if FLAGS.self_generate else []
    if opened.tokenizer is None and any(
        not pathlib.Path(path).is_dir() for path in [*FLAGS.data, *FLAGS.held_out]
    ):
        raise SpecJAXError(f"{FLAGS.target} has no tokenizer, which texts need")
    if FLAGS.max_seq_len > opened.config.max_position_embeddings:
        raise SpecJAXError(
            f"--max_seq_len={FLAGS.max_seq_len} is beyond the context of the target, "
            f"{opened.config.max_position_embeddings}"
        )
    mesh = processes.make_mesh(*common_flags.mesh_degrees())
    shape = _shape(opened.config)
    is_head = FLAGS.drafter == "eagle"
    parallel.check_shardable(
        shape.layer if is_head else shape,
        parallel.degree(mesh, "draft"),
        "head" if is_head else "draft",
    )
    rows, held_out = (_open(paths, opened) for paths in (FLAGS.data, FLAGS.held_out))
    if (prompts or FLAGS["max_seq_len"].present) and any(
        x.tokens_RS.shape[1] != FLAGS.max_seq_len for x in rows.shards
    ):
        raise SpecJAXError(
            f"--max_seq_len={FLAGS.max_seq_len}: rows of --data have another number of positions"
        )
    cfg.check(len(rows) + len(prompts), mesh)
    identity = {name: getattr(FLAGS, name) for name in RUN_FLAGS}
    identity |= {"shape": dataclasses.asdict(shape), "held_out_contents": held_out.checksum}
    files.check_run_identity(
        output / "run", trainer.RUN, identity | dataclasses.asdict(cfg)
    )  # as training will, and more
    if not (output / "run").exists():
        files.check_not_exists(output / "drafter")
    files.make_folder(output)

    target = checkpoint.load(FLAGS.target, dtype=FLAGS.dtype, mesh=mesh)
    objective = Objective(
        target.config,
        shape,
        FLAGS.loss,
        _num_steps(),
        dtype=target.dtype,
        mesh=mesh,
    )
    evaluation = evaluate.Evaluation(objective, target.params, held_out) if FLAGS.held_out else None
    if prompts:
        prompts = _fitting(target, prompts)
        if not FLAGS.only_generate:
            cfg.check(len(rows) + len(prompts), mesh)
        rows = data.Dataset(
            (*rows.shards, *_continue(target, prompts, output / "rows", objective.aux_layers))
        )
        if FLAGS.only_generate:
            return
    params, draft_ids_U = _initial(objective, target, rows)
    console = Console()
    bar = progress_lib.Progress(
        *progress_lib.Progress.get_default_columns(),
        "{task.fields[figures]}",
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("training", total=cfg.steps, figures="")
        result = trainer.train(
            objective,
            cfg,
            output / "run",
            params,
            target.params,
            draft_ids_U,
            rows,
            evaluation,
            identity | {"rows": len(rows), "tokens": rows.num_tokens, "contents": rows.checksum},
            on_record=_Reporter(bar, task),
            max_seconds=None if FLAGS.max_minutes is None else 60 * FLAGS.max_minutes,
        )
    if result.out_of_time:
        print(f"step {result.history[-1]['step']} of {cfg.steps}: the same command goes on")
    _write(output, objective, target, result, draft_ids_U)
    if result.scores:
        console.print(score_table(result.scores))


def _check_flags() -> None:
    """Raises SpecJAXError for flags that do not go together, or that nothing would come of."""
    if not FLAGS.self_generate and not FLAGS.data:
        raise SpecJAXError("there is nothing to train on: give --data or --self_generate")
    if FLAGS.patience and not FLAGS.held_out:
        raise SpecJAXError(f"--patience={FLAGS.patience}: nothing is evaluated without --held_out")
    if given := [
        name for name in GENERATE_FLAGS if FLAGS[name].present and not FLAGS.self_generate
    ]:
        raise SpecJAXError(f"--{given[0]} is for --self_generate")
    if FLAGS["eval_every"].present and not FLAGS.held_out:
        raise SpecJAXError("--eval_every: nothing is evaluated without --held_out")
    if FLAGS.patience and not FLAGS.eval_every:
        raise SpecJAXError(
            f"--patience={FLAGS.patience}: with --eval_every=0 nothing is evaluated before the end"
        )
    common_flags.numbers("temperatures", FLAGS.temperatures)
    if (least := data.SKIPPED + 3 + _num_steps()) > FLAGS.max_seq_len:
        raise SpecJAXError(
            f"--max_seq_len must be at least {least}, got {FLAGS.max_seq_len}: nothing would be guessed"
        )
    if FLAGS.drafter == "draft_model":
        given = [
            name
            for name in ("aux_layers", "num_draft_tokens", "num_steps", "unroll_from")
            if FLAGS[name].present
        ]
        if given:
            raise SpecJAXError(f"--{given[0]} is for heads")


def _num_steps() -> int:
    """A draft model is fed nothing of its own."""
    return FLAGS.num_steps if FLAGS.drafter == "eagle" else 1


def _shape(target):
    """Configuration of what is to be trained."""
    if FLAGS.drafter == "draft_model":
        if (FLAGS.draft is None) == (FLAGS.draft_config is None):
            raise SpecJAXError("a draft model begins with either --draft or --draft_config")
        cfg = (
            checkpoint.open_source(FLAGS.draft).config
            if FLAGS.draft
            else plan.read_model_config(FLAGS.draft_config)
        )
        if cfg.vocab_size != target.vocab_size:
            raise SpecJAXError(
                f"the draft model has {cfg.vocab_size} tokens, the target {target.vocab_size}"
            )
        return cfg
    if FLAGS.draft_config:
        raise SpecJAXError("--draft_config is for draft models")
    if FLAGS.draft:
        if FLAGS.aux_layers or FLAGS.num_draft_tokens is not None:
            raise SpecJAXError(
                "--aux_layers and --num_draft_tokens are those of the head that --draft names"
            )
        heads.check(FLAGS.draft, target)
        return heads.read(FLAGS.draft)[0]
    try:
        aux_layers = tuple(map(int, FLAGS.aux_layers))
    except ValueError:
        raise SpecJAXError(
            f"--aux_layers must be numbers of layers, got {','.join(FLAGS.aux_layers)}"
        ) from None
    return init_head.config(target, aux_layers, FLAGS.num_draft_tokens)


def _open(paths: list[str], opened: table.CheckpointReader) -> data.Dataset:
    """Rows of folders and files."""
    folders = [pathlib.Path(path) for path in paths if pathlib.Path(path).is_dir()]
    texts = [path for path in paths if not pathlib.Path(path).is_dir()]
    rows = [shard for folder in folders for shard in data.read_folder(folder, opened.config)]
    return data.Dataset(
        (*rows, *([data.read_texts(texts, opened.tokenizer, FLAGS.max_seq_len)] if texts else []))
    )


def _fitting(target: checkpoint.Model, prompts: list[dict]) -> list[tuple[tuple[int, ...], str]]:
    """The tokens and the domain of each prompt that is not too long."""
    encoded = [
        (
            batch.encode(target, row["prompt"], row["where"]),
            row.get("domain", ""),
        )
        for row in prompts
    ]
    fitting = [prompt for prompt in encoded if len(prompt[0]) <= FLAGS.max_seq_len // 2]
    if len(fitting) < len(prompts):
        print(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are longer than half a row "
            f"({FLAGS.max_seq_len // 2} tokens) and are left out"
        )
    if not fitting:
        raise SpecJAXError(
            f"{FLAGS.self_generate}: no prompt fits into half of --max_seq_len={FLAGS.max_seq_len}"
        )
    return fitting


def _continue(
    target: checkpoint.Model,
    prompts: list[tuple[tuple[int, ...], str]],
    folder: pathlib.Path,
    aux_layers: tuple[int, ...],
):
    """The target's continuations of prompts."""
    console = Console()
    with progress_lib.Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("generating", total=None)
        paths = self_generate.self_generate(
            target,
            *zip(*prompts, strict=True),
            folder,
            max_seq_len=FLAGS.max_seq_len,
            batch_size=FLAGS.generate_batch_size,
            temperatures=common_flags.numbers("temperatures", FLAGS.temperatures),
            seed=FLAGS.seed,
            aux_layers=aux_layers,
            eos_ids=None if FLAGS.stop_at_eos else (),
            on_shard=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return list(map(data.read_shard, paths))


def _initial(objective: Objective, target: checkpoint.Model, rows: data.Dataset):
    """Parameters to begin with, and the tokens that can be guessed."""
    rng = jax.random.key(FLAGS.seed)
    if not objective.is_head:
        if FLAGS.draft:
            return checkpoint.load(
                FLAGS.draft, dtype="float32", mesh=target.mesh, role="draft"
            ).params, None
        return parallel.place(llama.init(rng, objective.drafter), target.mesh, "draft"), None
    if FLAGS.draft:
        _, params, draft_ids_U = heads.read(FLAGS.draft)
        return parallel.place(
            jax.tree.map(lambda x: x.astype(jnp.float32), params), target.mesh, "draft"
        ), draft_ids_U
    params = init_head.initial_params(
        objective.drafter, target.params, rng, init_head.residual_size(objective, target, rows)
    )
    return parallel.place(params, target.mesh, "draft"), init_head.likely_tokens(
        rows, objective.drafter
    )


class _Reporter:
    """Shows the progress of training: the loss, tokens per second and what is accepted on held-out
    rows."""

    def __init__(self, bar: progress_lib.Progress, task):
        self._bar, self._task = bar, task
        self._seen, self._held_out = [], ""

    def __call__(self, record: dict) -> None:
        if "held_out" in record:
            means = evaluate.summary([Score(**score) for score in record["held_out"]])
            self._held_out = "held out: " + " ".join(f"{mean:.2f}" for mean in means)
            self._show(f"step {record['step']}: {self._held_out}")
            return
        self._seen = [*self._seen[-20:], record]
        first, seconds = self._seen[0], record["seconds"] - self._seen[0]["seconds"]
        rate = sum(other["tokens"] for other in self._seen[1:]) / seconds if seconds > 0 else 0
        loss = np.mean([other["loss"] for other in self._seen])
        figures = f"loss {loss:.3f}  {rate:,.0f} tokens/s  {self._held_out}"
        self._bar.update(self._task, completed=record["step"], figures=figures)
        if record["step"] % LOG_EVERY == 0 and first is not record:
            self._show(f"step {record['step']}: {figures}")

    def _show(self, line: str) -> None:
        if self._bar.disable:  # no terminal: a line now and then
            print(line, flush=True)


def _write(
    output: pathlib.Path,
    objective: Objective,
    target: checkpoint.Model,
    result: trainer.Result,
    draft_ids_U,
):
    """The drafter, its scores and the curves; those of an earlier end of the same run are replaced."""
    curves.draw(result.history, output / "curves.png")
    (output / "evaluation.json").unlink(missing_ok=True)
    provenance.write_figures(
        output / "evaluation.json",
        {
            "step": result.step,
            "scores": [dataclasses.asdict(score) for score in result.scores],
        },
        common_flags.invocation(__name__),
    )
    folder, new = output / "drafter", output / f"drafter.new-{os.getpid()}"
    if objective.is_head:
        heads.save(new, objective.drafter, result.params, draft_ids_U)
    else:
        checkpoint.save(
            new, dataclasses.replace(target, config=objective.drafter, params=result.params)
        )
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    print(f"wrote {folder}, the drafter as it was at step {result.step}")


def score_table(scores: list[Score]) -> Table:
    """Acceptance by draft position."""
    return tables.table(
        "Accepted on held-out rows, by draft position",
        (
            "domain",
            "text",
            "temperature",
            "places",
            *map(str, range(1, 1 + len(scores[0].by_position))),
        ),
        [
            (
                score.domain,
                score.text,
                str(score.temperature),
                f"{score.places:,}",
                *map(tables.number, score.by_position),
            )
            for score in scores
        ],
        num_texts=2,
    )
