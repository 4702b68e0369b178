"""The training loop: batches in an order that the seed decides, AdamW, checkpoints that resume
exactly, evaluation."""

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

from specjax import files, parallel
from specjax.errors import SpecJAXError
from specjax.train import evaluate
from specjax.train.data import SKIPPED, Dataset
from specjax.train.evaluate import Evaluation
from specjax.train.objective import Objective

RUN = "run.json"  # says of a folder which run it is of
# Of batches that are stacked: with one axis more than their names have letters they are unnamed to
# `parallel.specs`.
STACKED = jax.sharding.PartitionSpec(None, parallel.DATA)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
      steps: updates of the parameters in all.
      batch_size: rows per update and
      accumulate: in how many parts they are read, one after the other.
      learning_rate: the highest; it rises over `warmup` steps and falls along a cosine to a
        twentieth.
      weight_decay: of AdamW.
      clip: largest norm of a gradient.
      unroll_from: share of the steps from which on heads are fed their own features (before, only
        the target's).
      prompt_weight: weight of the tokens of prompts; those behind have 1.
      eval_every: steps between evaluations; 0 is only at the end.
      save_every: steps between checkpoints.
      patience: evaluations without a better one after which training ends early; 0 is never.
      seed: of the order of the rows.
    """

    steps: int
    batch_size: int = 4
    accumulate: int = 1
    learning_rate: float = 2e-3
    warmup: int = 30
    weight_decay: float = 0.01
    clip: float = 1.0
    unroll_from: float = 0.4
    prompt_weight: float = 0.4
    eval_every: int = 500
    save_every: int = 200
    patience: int = 0
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise SpecJAXError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "warmup",
            "eval_every",
            "patience",
            "weight_decay",
            "prompt_weight",
            "unroll_from",
            "seed",
        ):
            if getattr(self, name) < 0:
                raise SpecJAXError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < np.inf:
                raise SpecJAXError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise SpecJAXError(
                f"accumulate={self.accumulate} does not divide batch_size={self.batch_size}"
            )

    def check(self, num_rows: int, mesh: jax.sharding.Mesh | None) -> None:
        """Raises SpecJAXError where there are too few rows, or batches cannot be split over the
        mesh."""
        if num_rows < self.batch_size:
            raise SpecJAXError(
                f"there are {num_rows} rows to train on, fewer than a batch of {self.batch_size}"
            )
        size, parts = self.batch_size // self.accumulate, parallel.dp_size(mesh)
        if size % parts:
            raise SpecJAXError(
                f"{size} rows at a time (batch_size / accumulate) cannot be split over "
                f"data_parallel={parts}"
            )


def optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) behind a clipped gradient."""
    warmup = min(cfg.warmup, cfg.steps - 1)

    def decayed(params):
        names = ("norm", "bias")
        return jax.tree.map_with_path(
            lambda path, _: not any(name in path[-1].key for name in names), params
        )

    schedule = optax.warmup_cosine_decay_schedule(
        cfg.learning_rate / (warmup + 1),
        cfg.learning_rate,
        warmup,
        cfg.steps,
        cfg.learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=cfg.weight_decay, mask=decayed),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def update(
    objective: Objective,
    cfg: TrainConfig,
    num_steps: int,
    params,
    opt_state,
    target_params,
    draft_ids_U,
    batches,
):
    """One step over the gradients of some batches, stacked on a first axis; they are read one after
    the other.

    Returns:
      Parameters, state of the optimizer, and the loss, the distance and the acceptance by draft
      position.
    """

    def add(total, batch):
        (loss, parts), gradient = jax.value_and_grad(objective.loss, has_aux=True)(
            params, target_params, draft_ids_U, batch, num_steps, weights_I
        )
        return jax.tree.map(jnp.add, total, (gradient, (loss, *parts))), None

    weights_I = jax.vmap(lambda batch: objective.weights(batch, num_steps))(batches).sum(
        0
    )  # of all parts together
    zeros = jnp.zeros(()), jnp.zeros(len(weights_I)), jnp.zeros(len(weights_I))
    (gradient, figures), _ = jax.lax.scan(
        add, (jax.tree.map(jnp.zeros_like, params), zeros), batches
    )
    updates, opt_state = optimizer(cfg).update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, figures


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The rows of an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(size)


def indices(cfg: TrainConfig, size: int, step: int) -> list[int]:
    """The rows of a step: a function of its number, so that a run that is resumed reads what it
    would have read."""
    places = range(step * cfg.batch_size, (step + 1) * cfg.batch_size)
    return [int(order(cfg.seed, place // size, size)[place % size]) for place in places]


@dataclasses.dataclass
class Result:
    """What training has come to.

    Attributes:
      params: the best parameters that an evaluation has seen, by `evaluate.chain_length`; the last
        ones where there was none.
      scores: of them.
      step: when that was.
      history: a record per logged step or evaluation.
      out_of_time: whether it ended for want of time.
    """

    params: Any
    scores: list[evaluate.Score]
    step: int
    history: list[dict]
    out_of_time: bool


def train(
    objective: Objective,
    cfg: TrainConfig,
    folder: pathlib.Path,
    params,
    target_params,
    draft_ids_U,
    rows: Dataset,
    evaluation: Evaluation | None,
    identity: dict,
    *,
    on_record: Callable[[dict], None] | None = None,
    max_seconds: float | None = None,
) -> Result:
    """Trains, or goes on with what is in `folder`.

    Args:
      objective: what is learned.
      cfg: how.
      folder: where checkpoints and the log are kept; a run that finds its own there goes on with
        it.
      params: initial parameters, float32.
      target_params, draft_ids_U: see `Objective.loss`.
      rows: to train on.
      evaluation: of held-out rows; None for none.
      identity: whatever must be the same for a run to be gone on with, for JSON; fields of `cfg`
        are added.
      on_record: called with each record of the history.
      max_seconds: a run ends after this time, with a checkpoint, and can be gone on with.

    Raises:
      SpecJAXError: `folder` is of a run with another configuration (naming the field), see
        `TrainConfig.check`, no row is long enough, or the loss is no number any more.
    """
    cfg.check(len(rows), objective.mesh)
    if rows.fields("length_R").max() <= SKIPPED + 2:
        raise SpecJAXError(
            f"no row has more than {SKIPPED + 2} tokens; the first {SKIPPED} are not guessed"
        )
    identity = identity | dataclasses.asdict(cfg)
    files.claim_run_folder(folder, RUN, identity)
    started = time.perf_counter()
    opt_state = jax.jit(optimizer(cfg).init)(params)
    history: list[dict] = []
    best: dict = {"params": jax.tree.map(jnp.copy, params), "step": -1, "scores": []}
    step = 0
    # Not in the background: the next step gives away the buffers that would still be written.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, create=True, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        if (latest := manager.latest_step()) is not None:
            like = {"params": params, "opt_state": opt_state, "best": best["params"]}
            restored = manager.restore(
                latest,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardRestore(
                        jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
                    ),
                    log=ocp.args.JsonRestore(),
                ),
            )
            params, opt_state = restored["arrays"]["params"], restored["arrays"]["opt_state"]
            history = restored["log"]["history"]
            best = {
                "params": restored["arrays"]["best"],
                "step": restored["log"]["best_step"],
                "scores": [
                    evaluate.Score(**{**score, "by_position": tuple(score["by_position"])})
                    for score in restored["log"]["best_scores"]
                ],
            }
            step = latest

        def record(**fields):
            history.append(
                json.loads(json.dumps({"step": step, **fields}))
            )  # as a run that is resumed reads it
            if on_record:
                on_record(history[-1])

        def save():
            if manager.latest_step() != step:
                log = {
                    "history": history,
                    "best_step": best["step"],
                    "best_scores": [dataclasses.asdict(score) for score in best["scores"]],
                }
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave(
                            {"params": params, "opt_state": opt_state, "best": best["params"]}
                        ),
                        log=ocp.args.JsonSave(log),
                    ),
                )

        def stopped_early():
            return (
                cfg.patience > 0
                and sum("held_out" in entry and entry["step"] > best["step"] for entry in history)
                >= cfg.patience
            )

        out_of_time = False
        while step < cfg.steps and not stopped_early() and not out_of_time:
            num_steps = objective.num_steps if step >= cfg.unroll_from * cfg.steps else 1
            batch = rows.batch(
                indices(cfg, len(rows), step), objective.aux_layers, cfg.prompt_weight
            )
            parts = [
                jax.tree.map(lambda x, i=i: x[i :: cfg.accumulate], batch)
                for i in range(cfg.accumulate)
            ]
            stacked = jax.tree.map(lambda *x: np.stack(x), *parts)
            stacked = parallel.put(stacked, objective.mesh, STACKED)
            params, opt_state, (loss, distance, accepted) = update(
                objective, cfg, num_steps, params, opt_state, target_params, draft_ids_U, stacked
            )
            if not np.isfinite(loss):
                raise SpecJAXError(
                    f"the loss of step {step} is {float(loss)}: try a lower learning_rate"
                )
            step += 1
            record(
                loss=float(loss),
                distance=np.asarray(distance).tolist(),
                accepted=np.asarray(accepted).tolist(),
                tokens=int((batch.weight_BS > 0).sum()),
                seconds=time.perf_counter() - started,
            )
            last = step == cfg.steps
            if evaluation and (last or (cfg.eval_every and step % cfg.eval_every == 0)):
                scores = evaluation(params, draft_ids_U)
                if not best["scores"] or evaluate.chain_length(scores) > evaluate.chain_length(
                    best["scores"]
                ):
                    best = {
                        "params": jax.tree.map(jnp.copy, params),
                        "step": step,
                        "scores": scores,
                    }
                record(held_out=[dataclasses.asdict(score) for score in scores])
            out_of_time = max_seconds is not None and time.perf_counter() - started > max_seconds
            if last or out_of_time or step % cfg.save_every == 0 or stopped_early():
                save()
        manager.wait_until_finished()
    if not best["scores"]:
        best = {"params": params, "step": step, "scores": []}
    return Result(
        best["params"],
        best["scores"],
        best["step"],
        history,
        out_of_time and step < cfg.steps and not stopped_early(),
    )
