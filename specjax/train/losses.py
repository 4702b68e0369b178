"""Distillation losses: the divergence between drafter and target at every predicted position.

Both are compared over the tokens that the drafter can draft, with the target's distribution
renormalised to them: among the distributions over those tokens, it is accepted most often.

An objective defines what is trained for a drafter, and how. The drafter's module names the module
of its objective (`OBJECTIVE`, see `specjax.drafters.registry`), which has a class `OBJECTIVE`
derived from `Objective`.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from specjax import kv_cache, llama, parallel
from specjax.config import LlamaConfig, Runtime
from specjax.drafters import registry
from specjax.engine.load import Model
from specjax.errors import SpecJAXError
from specjax.parallel import DATA
from specjax.train.data import Batch, Dataset

CHUNK = 512  # positions whose distributions are in memory at a time
MIN_WEIGHT = 1e-6  # the sum of weights that a loss is divided by is at least this


# --- Distances of distributions -------------------------------------------------------------------


def kl(p_logits, q_logits):
    """Returns the Kullback-Leibler divergence of p from q, over the last axis."""
    log_p = jax.nn.log_softmax(p_logits)
    log_q = jax.nn.log_softmax(q_logits)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def tv(p_logits, q_logits):
    """Returns the total variation distance, the probability of a rejection, over the last axis."""
    difference = jax.nn.softmax(p_logits) - jax.nn.softmax(q_logits)
    return 0.5 * jnp.abs(difference).sum(-1)


DISTANCES: dict[str, Callable] = {"kl": kl, "tv": tv}


class Projection(NamedTuple):
    """Hidden states, and the output matrix that turns them into logits.

    Attributes:
      hidden_BTD: T positions of each row.
      output_UD: rows of the U tokens that the drafter can draft.
    """

    hidden_BTD: jax.Array
    output_UD: jax.Array


def compare(
    distance: str, p: Projection, q: Projection, weight_BT, trains_output: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns weighted sums over positions of the distance and of the acceptance probability.

    No distributions are kept in memory, and none is computed twice: gradients with respect to `q`
    are computed in the forward pass.

    Args:
      distance: one of `DISTANCES`.
      p: the target.
      q: the drafter.
      weight_BT: weight of each position.
      trains_output: whether gradients with respect to `q.output_UD` are needed.
    """
    B, T, D = p.hidden_BTD.shape
    size = min(max(CHUNK // B, 1), T)

    def chunk_sums(q_BTD, q_UD, p_BTD, weight_BT):
        p_BTU = _logits(p_BTD, p.output_UD)
        q_BTU = _logits(q_BTD, q_UD)
        distance_BT = DISTANCES[distance](p_BTU, q_BTU)
        accepted_BT = 1 - tv(p_BTU, q_BTU)
        return (distance_BT * weight_BT).sum(), (accepted_BT * weight_BT).sum()

    trained = (0, 1) if trains_output else (0,)
    sums_and_gradients = jax.value_and_grad(chunk_sums, trained, has_aux=True)

    def forward(q_BTD, q_UD):
        def add(total, chunk):
            chunk_BTD, *others = chunk
            matrix_UD = q_UD.astype(jnp.float32) if trains_output else q_UD
            sums, gradients = sums_and_gradients(chunk_BTD, matrix_UD, *others)
            by_hidden, *by_matrix = gradients
            total = jax.tree.map(jnp.add, total, (sums, tuple(by_matrix)))
            return total, by_hidden

        zero_sums = (jnp.zeros(()), jnp.zeros(()))
        zero_matrix = (jnp.zeros(q_UD.shape),) if trains_output else ()
        arrays = (q_BTD, p.hidden_BTD, weight_BT)
        chunks = tuple(_in_chunks(x, size) for x in arrays)
        (sums, by_matrix), by_hidden = jax.lax.scan(add, (zero_sums, zero_matrix), chunks)
        by_hidden_BTD = by_hidden.swapaxes(0, 1).reshape(B, -1, D)[:, :T]
        return sums, (by_hidden_BTD, by_matrix)

    @jax.custom_vjp
    def sums(q_BTD, q_UD):
        return forward(q_BTD, q_UD)[0]

    def backward(gradients, cotangents):
        def scale(x):
            return (x * cotangents[0]).astype(q.hidden_BTD.dtype)

        by_hidden, by_matrix = jax.tree.map(scale, gradients)
        return by_hidden, by_matrix[0] if by_matrix else None

    sums.defvjp(forward, backward)
    return sums(q.hidden_BTD, q.output_UD)


def _logits(hidden_BTD, output_UD):
    output_UD = output_UD.astype(hidden_BTD.dtype)
    return jnp.einsum("btd,ud->btu", hidden_BTD, output_UD, preferred_element_type=jnp.float32)


def _in_chunks(x_BT, size: int):
    """Returns `[chunks, B, size, ...]`: cut along the text, so that rows stay on their devices."""
    padding = [(0, 0), (0, -x_BT.shape[1] % size), *[(0, 0)] * (x_BT.ndim - 2)]
    padded = jnp.pad(x_BT, padding)
    return padded.reshape(len(x_BT), -1, size, *x_BT.shape[2:]).swapaxes(0, 1)


def teacher_forward(
    target_params, target_config: LlamaConfig, tokens_BS, aux_layers: tuple[int, ...], mesh=None
) -> tuple[jax.Array, ...]:
    """Returns the target's residual streams `[B, S, D]` at all tokens, after `aux_layers`."""

    def run(params, tokens_BS):
        B, S = tokens_BS.shape
        runtime = Runtime(llama.params_dtype(params), page_size=S, mesh=mesh)
        output = llama.forward(
            params,
            target_config,
            runtime,
            tokens_BS,
            jnp.zeros(B, jnp.int32),
            kv_cache.in_order(B, S, S),
            llama.init_cache(target_config, runtime, B),
            aux_layers=aux_layers,
        )
        return output.aux_hidden

    rows = jax.sharding.PartitionSpec(DATA)

    def in_specs(params, tokens_BS):
        return parallel.specs(params, "target"), rows

    out_specs = tuple(rows for _ in aux_layers)
    mapped = parallel.on_mesh(run, mesh, in_specs, out_specs)
    return mapped(target_params, tokens_BS)


# --- The interface of objectives ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """The starting point of training.

    Attributes:
      draft: path of a draft to train further; None for a new one.
      config: shape of a new draft model.
      aux_layers: target layers that a new EAGLE head reads; () for the default.
      num_draft_tokens: number of tokens that a new EAGLE head can draft; None for all.
    """

    draft: str | None = None
    config: LlamaConfig | None = None
    aux_layers: tuple[int, ...] = ()
    num_draft_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A trained draft and its loss. Hashable: a static argument of `jax.jit`.

    Attributes:
      target_config: configuration of the target.
      draft_config: configuration of the trained draft.
      distance: one of `DISTANCES`.
      ttt_steps: number of consecutive tokens that are predicted from each position, from the second
        on with the drafter's own features (training-time test).
      decay: weight of each such step relative to the one before.
      dtype: dtype of the computation; trained parameters are float32.
      mesh: the devices, None for one.

    Raises:
      SpecJAXError: for a value that cannot be used.
    """

    target_config: LlamaConfig
    draft_config: Any
    distance: str = "kl"
    ttt_steps: int = 1
    decay: float = 0.9
    dtype: Any = jnp.float32
    mesh: jax.sharding.Mesh | None = None

    # Flags of `specjax train` that apply to this objective and not to all.
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    # Position in a row of the target's hidden state that predicts the same token as the first one
    # of the drafter in its first step. Step i is compared from `FIRST_POSITION` + i on.
    FIRST_POSITION: ClassVar[int]
    # Whether the drafter's output matrix is trained, or is the target's.
    TRAINS_OUTPUT: ClassVar[bool]

    def __post_init__(self):
        if self.distance not in DISTANCES:
            choices = ", ".join(DISTANCES)
            raise SpecJAXError(f"unknown loss {self.distance!r}; choose from {choices}")
        if self.ttt_steps < 1:
            raise SpecJAXError(f"ttt_steps must be at least 1, got {self.ttt_steps}")

    @classmethod
    @abc.abstractmethod
    def make_config(cls, start: Start, target_config: LlamaConfig) -> Any:
        """Returns the configuration of the trained draft.

        Raises:
          SpecJAXError: if it does not fit the target, or `start` is incomplete or contradictory.
        """

    @abc.abstractmethod
    def check_shardable(self) -> None:
        """Raises SpecJAXError unless the trained draft can be split over the mesh."""

    @abc.abstractmethod
    def initial(
        self, target: Model, rows: Dataset, start: Start, seed: int
    ) -> tuple[Any, jax.Array | None]:
        """Returns the parameters to start with, and the tokens that can be drafted.

        Args:
          target: the target.
          rows: training data.
          start: as for `make_config`.
          seed: seed of random parameters.

        Returns:
          float32 parameters on the mesh, and int32 ids [U] in rising order, None for all.
        """

    @abc.abstractmethod
    def save(self, folder: pathlib.Path, target: Model, params, draft_ids_U) -> None:
        """Writes a checkpoint that `specjax.load_drafter` reads; `folder` must not exist."""

    @abc.abstractmethod
    def student(
        self, params, target_params, draft_ids_U, batch: Batch, aux_hidden, num_steps: int
    ) -> list[Projection]:
        """Returns the drafter's output for each step.

        Args:
          params: parameters of the drafter.
          target_params: parameters of the target.
          draft_ids_U: tokens that can be drafted; None for all.
          batch: the rows.
          aux_hidden: hidden states of the target after `aux_layers`.
          num_steps: at most `ttt_steps`.
        """

    @property
    def draft_aux_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states the drafter reads."""
        return ()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers that are needed: those of the drafter, and the last for the logits."""
        last = self.target_config.num_layers - 1
        return tuple(sorted({*self.draft_aux_layers, last}))

    def with_steps(self, num_steps: int) -> Objective:
        """Returns the objective with up to `num_steps` steps, for evaluation."""
        del num_steps
        return self

    def step_weights(self, batch: Batch, num_steps: int) -> jax.Array:
        """Returns the sum of the weights of all positions, for each step."""
        T = batch.tokens_BS.shape[1] - self.FIRST_POSITION - num_steps
        sums = []
        for step in range(num_steps):
            first = self.FIRST_POSITION + step + 1
            sums.append(batch.weight_BS[:, first : first + T].sum())
        return jnp.stack(sums)

    def loss(
        self, params, target_params, draft_ids_U, batch: Batch, num_steps: int, step_weights=None
    ):
        """Returns the loss: the weighted mean distance, summed over steps with `decay`.

        Args:
          params: parameters of the drafter, float32; differentiable.
          target_params: parameters of the target; constants.
          draft_ids_U: int32 tokens that the drafter can draft; None for all.
          batch: the rows.
          num_steps: at most `ttt_steps` (static).
          step_weights: divisors of the sums over positions; by default `step_weights` of the batch.

        Returns:
          The loss, and (distance, share of accepted drafts), each by step.
        """
        if step_weights is None:
            step_weights = self.step_weights(batch, num_steps)
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        aux_hidden = self.aux_hidden(target_params, batch)
        hidden_BSD = self.final_hidden(target_params, aux_hidden)
        teacher_UD = llama.output_rows(target_params, draft_ids_U)
        steps = self.student(params, target_params, draft_ids_U, batch, aux_hidden, num_steps)
        distances, accepted = [], []
        for i, q in enumerate(steps):
            first = self.FIRST_POSITION + i
            T = q.hidden_BTD.shape[1]
            weight_BT = batch.weight_BS[:, first + 1 : first + 1 + T]
            weight_BT = weight_BT / jnp.maximum(step_weights[i], MIN_WEIGHT)
            p = Projection(hidden_BSD[:, first : first + T], teacher_UD)
            sums = compare(self.distance, p, q, weight_BT, self.TRAINS_OUTPUT)
            distances.append(sums[0])
            accepted.append(sums[1])
        total = sum(self.decay**i * distance for i, distance in enumerate(distances))
        return total, (jnp.stack(distances), jnp.stack(accepted))

    def aux_hidden(self, target_params, batch: Batch) -> tuple[jax.Array, ...]:
        """Returns the target's residual streams after `aux_layers`, stored or computed."""
        if batch.aux_hidden:
            return tuple(x_BSD.astype(self.dtype) for x_BSD in batch.aux_hidden)
        computed = teacher_forward(
            target_params, self.target_config, batch.tokens_BS, self.aux_layers, self.mesh
        )
        return jax.lax.stop_gradient(computed)

    def final_hidden(self, target_params, aux_hidden: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the input `[B, S, D]` of the target's output matrix."""
        eps = self.target_config.rms_norm_eps
        return llama.rms_norm(aux_hidden[-1], target_params["final_norm_D"], eps)


# --- Objectives by drafter ------------------------------------------------------------------------


def trainable_drafters() -> list[str]:
    """Returns the names of the drafters that can be trained."""
    found = []
    for name in registry.names():
        (module,) = registry.modules(name)
        if module.OBJECTIVE is not None:
            found.append(name)
    return found


def objective_class(drafter: str) -> type[Objective]:
    """Returns the objective of a drafter.

    Raises:
      SpecJAXError: the drafter is unknown or cannot be trained.
    """
    if drafter not in trainable_drafters():
        choices = ", ".join(trainable_drafters())
        raise SpecJAXError(f"drafter {drafter!r} cannot be trained; choose from {choices}")
    (module,) = registry.modules(drafter)
    return importlib.import_module(module.OBJECTIVE).OBJECTIVE
