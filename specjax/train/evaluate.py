"""Acceptance on held-out rows, by temperature, domain and draft position."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import llama, parallel
from specjax.errors import SpecJAXError
from specjax.linear import linear
from specjax.train.data import Batch, Dataset
from specjax.train.losses import Objective

ALL = "all"  # the mean over domains, and all text
LOOP = 8  # a position is in a loop if its last LOOP tokens occurred earlier in the row


@dataclasses.dataclass(frozen=True)
class Score:
    """Acceptance over some positions.

    Attributes:
      temperature: 0, the share of positions where the greedy tokens agree; or 1, the mean of
        sum(min(p, q)).
      domain: kind of text; "all" is the mean over the domains, with equal weights.
      text: "all", "loops" (see `LOOP`) or "no loops".
      by_position: for draft positions 1, 2, ..., given that the drafts before it equal the text.
      num_positions: number of positions of draft position 1.
    """

    temperature: int
    domain: str
    text: str
    by_position: tuple[float, ...]
    num_positions: int


def read_scores(records: list[dict]) -> list[Score]:
    """Returns scores from JSON, also of runs before 0.1.0."""
    scores = []
    for record in records:
        fields = dict(record)
        if "places" in fields:
            fields["num_positions"] = fields.pop("places")
        fields["by_position"] = tuple(fields["by_position"])
        scores.append(Score(**fields))
    return scores


class Evaluation:
    """Held-out rows, and the target's outputs for them, computed once, for the first scores.

    Greedy acceptance is measured on rows that were generated at temperature 0, acceptance at
    temperature 1 on rows that were generated at 1. Text from other sources counts for both.

    Args:
      objective: objective of the drafter.
      target_params: parameters of the target.
      rows: held-out rows.
      num_positions: number of draft positions.
      batch_size: rows at a time on each data-parallel replica.

    Raises:
      SpecJAXError: no row has a token to predict, or a domain is called "all".
    """

    def __init__(
        self,
        objective: Objective,
        target_params,
        rows: Dataset,
        *,
        num_positions: int = 5,
        batch_size: int = 4,
    ):
        self.objective = objective.with_steps(num_positions)
        self.target_params, self.rows = target_params, rows
        self.batch_size = batch_size * parallel.dp_size(objective.mesh)
        # The token that the first position predicts in the first step.
        self._first = objective.FIRST_POSITION + 1
        self._mask_BS = rows.fields("loss_mask_BS")
        self._loop_BS = np.stack([_in_loop(row_S) for row_S in rows.fields("tokens_BS")])
        self._temperature_B, self._domain_B = rows.fields("temperature_B"), rows.fields("domains")
        is_scored_B = self._is_scored(0) | self._is_scored(1)
        last = self._mask_BS.shape[1] - self.objective.ttt_steps + 1
        if not self._mask_BS[is_scored_B, self._first : last].any():
            raise SpecJAXError(
                "no held-out row has a token to predict that was generated at temperature 0 or 1"
            )
        if ALL in self._domain_B:
            raise SpecJAXError(
                f"held-out rows have a domain called {ALL!r}, which is reserved for the mean"
            )

    def _is_scored(self, temperature: int) -> np.ndarray:
        is_equal_B = self._temperature_B == temperature
        return is_equal_B | np.isnan(self._temperature_B)

    @functools.cached_property
    def _outputs(self):
        # On the host: with many rows, they need more memory than a device has beside a large
        # target.
        found = []
        for start in self._starts():
            outputs = _teacher_outputs(self.objective, self.target_params, self._batch(start))
            found.append(parallel.get(outputs))
        return found

    def _starts(self):
        return range(0, len(self.rows), self.batch_size)

    def _batch(self, start: int) -> Batch:
        # The last batch is padded with row 0, so that all have one shape.
        indices = np.arange(start, start + self.batch_size)
        indices[indices >= len(self.rows)] = 0
        return self.rows.batch(indices, self.objective.aux_layers, prompt_weight=1.0)

    def __call__(self, params, draft_ids_U) -> list[Score]:
        """Returns the scores of a drafter with these parameters."""
        greedy, sampled = [], []
        for start, outputs in zip(self._starts(), self._outputs, strict=True):
            aux_hidden, *others = outputs
            batch = self._batch(start)
            if aux_hidden:
                batch = batch._replace(aux_hidden=aux_hidden)
            found = _acceptance(
                self.objective, params, self.target_params, draft_ids_U, batch, *others
            )
            greedy.append(np.asarray(found[0]))
            sampled.append(np.asarray(found[1]))
        scores = []
        for temperature, batches in ((0, greedy), (1, sampled)):
            accepted = np.concatenate(batches, axis=1)[:, : len(self.rows)]
            scores += self._scores(temperature, accepted)
        return scores

    def _scores(self, temperature: int, accepted) -> list[Score]:
        """Returns the scores at a temperature, of acceptance [steps, B, T]."""
        T = accepted.shape[2]
        mask_BT = self._mask_BS[:, self._first : self._first + T]
        loop_BT = self._loop_BS[:, self._first : self._first + T]
        subsets = {ALL: mask_BT, "loops": mask_BT & loop_BT, "no loops": mask_BT & ~loop_BT}
        scores = []
        for text, subset_BT in subsets.items():
            of_domains = []
            for domain in sorted(set(self._domain_B)):
                is_chosen_B = self._is_scored(temperature) & (self._domain_B == domain)
                chosen_BT = subset_BT & is_chosen_B[:, None]
                if chosen_BT.any():
                    rates = self._rates(accepted, chosen_BT)
                    count = int(chosen_BT.sum())
                    of_domains.append(Score(temperature, domain, text, rates, count))
            if of_domains:
                means = np.mean([score.by_position for score in of_domains], axis=0)
                count = sum(score.num_positions for score in of_domains)
                mean = Score(temperature, ALL, text, tuple(map(float, means)), count)
                scores += [*of_domains, mean]
        return scores

    def _rates(self, accepted, chosen_BT) -> tuple[float, ...]:
        """Returns the mean acceptance by step over chosen positions; NaN where no token is left."""
        T = accepted.shape[2]
        rates = []
        for i, accepted_BT in enumerate(accepted):
            # All tokens of a chain must be in the text.
            first = self._first + i
            counts_BT = chosen_BT & self._mask_BS[:, first : first + T]
            rate = float(accepted_BT[counts_BT].mean()) if counts_BT.any() else np.nan
            rates.append(rate)
        return tuple(rates)


def summary(scores: list[Score]) -> tuple[float, ...]:
    """Returns acceptance by draft position in all text, the mean over temperatures 0 and 1."""
    of_all = [score for score in scores if score.domain == ALL and score.text == ALL]
    means = np.mean([score.by_position for score in of_all], axis=0)
    return tuple(map(float, means))


def chain_length(scores: list[Score]) -> float:
    """Returns the expected number of consecutive accepted drafts, by `summary`.

    Drafters are compared by it: one that is better at the first position may be worse at all
    others.
    """
    return float(np.cumprod(np.nan_to_num(summary(scores))).sum())


@functools.partial(jax.jit, static_argnums=0)
def _teacher_outputs(objective: Objective, target_params, batch: Batch):
    """Returns the target's hidden states (() if stored), greedy tokens and logsumexp of logits."""
    aux_hidden = objective.aux_hidden(target_params, batch)

    def row(hidden_SD):
        logits_SV = llama.logits(target_params, hidden_SD[None])[0]
        return logits_SV.argmax(-1), jax.nn.logsumexp(logits_SV, axis=-1)

    hidden_BSD = objective.final_hidden(target_params, aux_hidden)
    greedy_BS, logsumexp_BS = jax.lax.map(row, hidden_BSD)
    return () if batch.aux_hidden else aux_hidden, greedy_BS, logsumexp_BS


@functools.partial(jax.jit, static_argnums=0)
def _acceptance(
    objective: Objective,
    params: Any,
    target_params,
    draft_ids_U,
    batch: Batch,
    greedy_BS,
    logsumexp_BS,
):
    """Returns, each [steps, B, T], whether greedy tokens agree, and sum(min(p, q)) over the whole
    vocabulary."""
    params = jax.tree.map(lambda x: x.astype(objective.dtype), params)
    aux_hidden = objective.aux_hidden(target_params, batch)
    hidden_BSD = objective.final_hidden(target_params, aux_hidden)
    target_UD = llama.output_rows(target_params, draft_ids_U)
    agreements, overlaps = [], []
    steps = objective.student(
        params, target_params, draft_ids_U, batch, aux_hidden, objective.ttt_steps
    )
    for i, student in enumerate(steps):
        first, T = objective.FIRST_POSITION + i, student.hidden_BTD.shape[1]

        def row(arrays, draft_UD=student.output_UD):
            draft_TD, target_TD, greedy_T, logsumexp_T = arrays
            q_TU = _logits(draft_TD, draft_UD)
            p_TU = jnp.exp(_logits(target_TD, target_UD) - logsumexp_T[:, None])
            draft_T = q_TU.argmax(-1)
            if draft_ids_U is not None:
                draft_T = draft_ids_U[draft_T]
            overlap_T = jnp.minimum(p_TU, jax.nn.softmax(q_TU)).sum(-1)
            return draft_T == greedy_T, overlap_T

        teacher = [x[:, first : first + T] for x in (hidden_BSD, greedy_BS, logsumexp_BS)]
        agreement_BT, overlap_BT = jax.lax.map(row, (student.hidden_BTD, *teacher))
        agreements.append(agreement_BT)
        overlaps.append(overlap_BT)
    return jnp.stack(agreements), jnp.stack(overlaps)


def _logits(hidden_TD, output_UD):
    # In float32, as `_teacher_outputs` and decoding compute logits.
    return linear(hidden_TD[None], output_UD, dtype=jnp.float32)[0]


def _in_loop(row_S: np.ndarray) -> np.ndarray:
    """Returns whether the LOOP tokens before each token occurred earlier in the row."""
    seen, result = set(), np.zeros(len(row_S), bool)
    ids = row_S.tolist()
    for i in range(LOOP, len(ids)):
        gram = tuple(ids[i - LOOP : i])
        result[i] = gram in seen
        seen.add(gram)
    return result
