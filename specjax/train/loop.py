"""The training loop: batches in a seeded order, AdamW, exact resumption, evaluation."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from specjax import parallel
from specjax.errors import SpecJAXError
from specjax.train import evaluate, identity
from specjax.train.data import SKIPPED, Batch, Dataset
from specjax.train.evaluate import Evaluation
from specjax.train.losses import Objective

RUN = "run.json"  # describes the run of a folder
# Of stacked batches: these have one axis more than their names have letters, so that
# `parallel.specs` cannot be used.
STACKED = jax.sharding.PartitionSpec(None, parallel.DATA)
FINAL_DIVISOR = 20  # the highest learning rate, relative to that of the last step
CHECKPOINTS_KEPT = 2
POSITIVE = ("steps", "batch_size", "gradient_accumulation_steps", "save_every")
NOT_NEGATIVE = (
    "warmup",
    "eval_every",
    "patience",
    "weight_decay",
    "prompt_weight",
    "unroll_from",
    "seed",
)
POSITIVE_AND_FINITE = ("learning_rate", "max_grad_norm")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of a run.

    Attributes:
      steps: number of updates of the parameters.
      batch_size: rows per update.
      gradient_accumulation_steps: number of equal parts of a batch; their gradients are
        accumulated.
      learning_rate: the highest one; it rises over `warmup` steps and falls along a cosine to a
        twentieth.
      warmup: number of steps over which the learning rate rises.
      weight_decay: weight decay of AdamW.
      max_grad_norm: larger gradients are scaled down to this norm.
      unroll_from: fraction of the steps after which the objective's `ttt_steps` applies; before, it
        is 1.
      prompt_weight: weight of the tokens of prompts; those after prompts have 1.
      eval_every: steps between evaluations; 0 evaluates at the end only.
      save_every: steps between checkpoints.
      patience: number of evaluations without improvement after which training ends early; 0 is off.
      seed: seed of the order of the rows.

    Raises:
      SpecJAXError: for a value out of range.
    """

    steps: int
    batch_size: int = 4
    gradient_accumulation_steps: int = 1
    learning_rate: float = 2e-3
    warmup: int = 30
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    unroll_from: float = 0.4
    prompt_weight: float = 0.4
    eval_every: int = 500
    save_every: int = 200
    patience: int = 0
    seed: int = 0

    def __post_init__(self):
        for name in POSITIVE:
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in NOT_NEGATIVE:
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in POSITIVE_AND_FINITE:
            self._check(name, 0 < getattr(self, name) < np.inf, "positive and finite")
        if self.batch_size % self.gradient_accumulation_steps:
            raise SpecJAXError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} does not divide "
                f"batch_size={self.batch_size}"
            )

    def _check(self, name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise SpecJAXError(f"{name} must be {expected}, got {getattr(self, name)}")

    def check_batches(self, num_rows: int, mesh: jax.sharding.Mesh | None) -> None:
        """Checks that there are enough rows, and that batches can be split over the mesh.

        Raises:
          SpecJAXError: too few rows, or batches that cannot be split.
        """
        if num_rows < self.batch_size:
            raise SpecJAXError(
                f"there are {num_rows} rows to train on, fewer than a batch of {self.batch_size}"
            )
        size = self.batch_size // self.gradient_accumulation_steps
        dp_size = parallel.dp_size(mesh)
        if size % dp_size:
            raise SpecJAXError(
                f"{size} rows at a time (batch_size / gradient_accumulation_steps) cannot be split "
                f"over data_parallel={dp_size}"
            )


# --- One step -------------------------------------------------------------------------------------


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov & Hutter 2019) with clipped gradients.

    Norms and biases do not decay.
    """
    warmup = min(config.warmup, config.steps - 1)

    def is_decayed(path, _):
        name = path[-1].key
        return "norm" not in name and "bias" not in name

    def decayed(params):
        return jax.tree.map_with_path(is_decayed, params)

    schedule = optax.warmup_cosine_decay_schedule(
        config.learning_rate / (warmup + 1),
        config.learning_rate,
        warmup,
        config.steps,
        config.learning_rate / FINAL_DIVISOR,
    )
    weight_decay = config.weight_decay
    adamw = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def update(
    objective: Objective,
    config: TrainConfig,
    num_steps: int,
    params,
    opt_state,
    target_params,
    draft_ids_U,
    batches: Batch,
):
    """Updates the parameters with the gradient of some batches.

    Args:
      objective: the loss that is minimised (static).
      config: configuration of the optimizer (static).
      num_steps: steps of the objective, at most its `ttt_steps` (static).
      params: parameters of the drafter, donated.
      opt_state: state of `optimizer`, donated.
      target_params: parameters of the target.
      draft_ids_U: tokens that can be drafted; None for all.
      batches: stacked on a first axis, read one after the other.

    Returns:
      The parameters, the optimizer's state, and (loss, distance by step, acceptance by step).
    """

    def add(total, batch):
        (loss, parts), gradient = jax.value_and_grad(objective.loss, has_aux=True)(
            params, target_params, draft_ids_U, batch, num_steps, step_weights
        )
        return jax.tree.map(jnp.add, total, (gradient, (loss, *parts))), None

    by_batch = jax.vmap(lambda batch: objective.step_weights(batch, num_steps))(batches)
    step_weights = by_batch.sum(0)
    zeros = jnp.zeros(()), jnp.zeros(len(step_weights)), jnp.zeros(len(step_weights))
    total = jax.tree.map(jnp.zeros_like, params), zeros
    (gradient, figures), _ = jax.lax.scan(add, total, batches)
    updates, opt_state = optimizer(config).update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, figures


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Returns the rows of an epoch, in their order."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def indices(config: TrainConfig, num_rows: int, step: int) -> list[int]:
    """Returns the rows of a step: a function of its number, so that resumed runs read the same."""
    chosen = []
    for i in range(step * config.batch_size, (step + 1) * config.batch_size):
        epoch, position = divmod(i, num_rows)
        chosen.append(int(order(config.seed, epoch, num_rows)[position]))
    return chosen


# --- The run --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The objective and the data of a run.

    Attributes:
      objective: what is minimised.
      config: hyperparameters.
      target_params: parameters of the target.
      draft_ids_U: tokens that the drafter can draft; None for all.
      rows: training data.
      evaluation: evaluation of held-out rows; None for none.
    """

    objective: Objective
    config: TrainConfig
    target_params: Any
    draft_ids_U: jax.Array | None
    rows: Dataset
    evaluation: Evaluation | None = None

    def check(self) -> None:
        """Raises SpecJAXError if there are too few rows or tokens to train on."""
        self.config.check_batches(len(self.rows), self.objective.mesh)
        if self.rows.fields("length_B").max() <= SKIPPED + 2:
            raise SpecJAXError(
                f"no row has more than {SKIPPED + 2} tokens; the first {SKIPPED} have no weight"
            )


@dataclasses.dataclass
class Result:
    """The result of a run.

    Attributes:
      params: the best parameters of all evaluations, by `evaluate.chain_length`; the last ones if
        there was no evaluation.
      scores: their scores.
      step: the step of these parameters.
      history: one record per step or evaluation.
      out_of_time: whether the time limit ended the run.
    """

    params: Any
    scores: list[evaluate.Score]
    step: int
    history: list[dict]
    out_of_time: bool


@dataclasses.dataclass
class _Best:
    """The best parameters so far, their step and scores; no scores before an evaluation."""

    params: Any
    step: int = -1
    scores: list[evaluate.Score] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Progress:
    """The content of a checkpoint: parameters, the optimizer's state, the history and the best."""

    params: Any
    opt_state: Any
    best: _Best
    step: int = 0
    history: list[dict] = dataclasses.field(default_factory=list)

    def arrays(self) -> dict[str, Any]:
        return {"params": self.params, "opt_state": self.opt_state, "best": self.best.params}

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes a checkpoint of this step if there is none."""
        if manager.latest_step() == self.step:
            return
        log = {
            "history": self.history,
            "best_step": self.best.step,
            "best_scores": [dataclasses.asdict(score) for score in self.best.scores],
        }
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(self.arrays()), log=ocp.args.JsonSave(log)
        )
        manager.save(self.step, args=items)

    def restore(self, manager: ocp.CheckpointManager) -> None:
        """Reads the latest checkpoint if there is one."""
        latest = manager.latest_step()
        if latest is None:
            return
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.arrays())
        items = ocp.args.Composite(
            arrays=ocp.args.StandardRestore(like), log=ocp.args.JsonRestore()
        )
        restored = manager.restore(latest, args=items)
        arrays, log = restored["arrays"], restored["log"]
        self.params, self.opt_state = arrays["params"], arrays["opt_state"]
        self.history, self.step = log["history"], latest
        scores = evaluate.read_scores(log["best_scores"])
        self.best = _Best(arrays["best"], log["best_step"], scores)


def train(
    run: Run,
    params,
    folder: pathlib.Path,
    values: dict,
    *,
    on_record: Callable[[dict], None] | None = None,
    max_seconds: float | None = None,
) -> Result:
    """Trains, or resumes the run in `folder`.

    Args:
      run: what is trained.
      params: initial parameters, float32; the run takes over their buffers.
      folder: folder of checkpoints and the log.
      values: JSON-serialisable values that must match for a run to resume; the fields of
        `run.config` are added.
      on_record: called with each record of the history.
      max_seconds: the run ends after this time, with a checkpoint from which it can resume.

    Raises:
      SpecJAXError: `folder` has a run with other values (the message names one); there are too few
        rows or tokens; the loss is not finite.
    """
    run.check()
    identity.claim(folder, RUN, values | dataclasses.asdict(run.config))
    opt_state = jax.jit(optimizer(run.config).init)(params)
    best = _Best(jax.tree.map(jnp.copy, params))
    progress = _Progress(params, opt_state, best)
    # Not in the background: the next step donates the buffers that would still be written.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=CHECKPOINTS_KEPT, create=True, enable_async_checkpointing=False
    )
    checkpoints = (folder / "checkpoints").absolute()
    with ocp.CheckpointManager(checkpoints, options=options) as manager:
        progress.restore(manager)
        out_of_time = _train(run, progress, manager, on_record, max_seconds)
        manager.wait_until_finished()
    best = progress.best
    if not best.scores:
        best = _Best(progress.params, progress.step)
    is_done = progress.step >= run.config.steps or _stopped_early(run.config, progress)
    is_cut = out_of_time and not is_done
    return Result(best.params, best.scores, best.step, progress.history, is_cut)


def _train(
    run: Run,
    progress: _Progress,
    manager: ocp.CheckpointManager,
    on_record: Callable[[dict], None] | None,
    max_seconds: float | None,
) -> bool:
    """Trains to the end or the time limit; returns whether the time is over."""
    config = run.config
    started = time.perf_counter()

    def seconds() -> float:
        return time.perf_counter() - started

    def record(fields: dict) -> None:
        # The same values as in a resumed run.
        fields = json.loads(json.dumps({"step": progress.step, **fields}))
        progress.history.append(fields)
        if on_record:
            on_record(fields)

    out_of_time = False
    while progress.step < config.steps and not out_of_time:
        if _stopped_early(config, progress):
            break
        figures = _step(run, progress)
        record(figures | {"seconds": seconds()})
        is_last = progress.step == config.steps
        if run.evaluation and (is_last or _is_due(progress.step, config.eval_every)):
            record({"held_out": _evaluate(run, progress)})
        out_of_time = max_seconds is not None and seconds() > max_seconds
        is_end = is_last or out_of_time or _stopped_early(config, progress)
        if is_end or _is_due(progress.step, config.save_every):
            progress.save(manager)
    return out_of_time


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stopped_early(config: TrainConfig, progress: _Progress) -> bool:
    """Whether `patience` evaluations have passed without improvement."""
    worse = 0
    for record in progress.history:
        worse += "held_out" in record and record["step"] > progress.best.step
    return 0 < config.patience <= worse


def _step(run: Run, progress: _Progress) -> dict[str, Any]:
    """Makes one step, and returns its figures."""
    config, objective = run.config, run.objective
    is_unrolled = progress.step >= config.unroll_from * config.steps
    num_steps = objective.ttt_steps if is_unrolled else 1
    chosen = indices(config, len(run.rows), progress.step)
    batch = run.rows.batch(chosen, objective.aux_layers, config.prompt_weight)
    batches = parallel.put(
        _split(batch, config.gradient_accumulation_steps), objective.mesh, STACKED
    )
    progress.params, progress.opt_state, figures = update(
        objective,
        config,
        num_steps,
        progress.params,
        progress.opt_state,
        run.target_params,
        run.draft_ids_U,
        batches,
    )
    loss, distance, accepted = figures
    if not np.isfinite(loss):
        raise SpecJAXError(
            f"the loss of step {progress.step} is {float(loss)}: try a lower learning_rate"
        )
    progress.step += 1
    return {
        "loss": float(loss),
        "distance": np.asarray(distance).tolist(),
        "accepted": np.asarray(accepted).tolist(),
        "tokens": int((batch.weight_BS > 0).sum()),
    }


def _split(batch: Batch, num_parts: int) -> Batch:
    """Returns a batch in equal parts, stacked on a first axis."""

    def split(x_B):
        return np.stack([x_B[i::num_parts] for i in range(num_parts)])

    return jax.tree.map(split, batch)


def _evaluate(run: Run, progress: _Progress) -> list[dict]:
    """Returns the scores of the parameters, for JSON, and keeps these if they are the best."""
    scores = run.evaluation(progress.params, run.draft_ids_U)
    best = progress.best.scores
    if not best or evaluate.chain_length(scores) > evaluate.chain_length(best):
        params = jax.tree.map(jnp.copy, progress.params)
        progress.best = _Best(params, progress.step, scores)
    return [dataclasses.asdict(score) for score in scores]
