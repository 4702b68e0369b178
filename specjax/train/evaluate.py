"""How often a drafter would be right: acceptance on held-out rows, by temperature, kind of text and
draft position."""

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
from specjax.train.data import Dataset
from specjax.train.objective import Batch, Objective

ALL = "all"  # domains together
LOOP = 8  # a place is in a loop where the last so many tokens have stood in the same row before


@dataclasses.dataclass(frozen=True)
class Score:
    """Acceptance over some places.

    Attributes:
      temperature: 0, the share of places where the most likely tokens agree; or 1, the mean of
        sum(min(p, q)).
      domain: kind of text; "all" is the mean over the domains, each counting alike.
      text: "all", "loops" (see `LOOP`) or "no loops".
      by_position: for draft positions 1, 2, ..., given that the drafts before were the text itself.
      places: how many there were for position 1.
    """

    temperature: int
    domain: str
    text: str
    by_position: tuple[float, ...]
    places: int


class Evaluation:
    """Held-out rows, and what the target says about them, which is worked out once, for the first
    scores.

    Greedy acceptance is measured on rows that were drawn at temperature 0, that at temperature 1 on
    rows that were drawn at 1; on text that the target has not written, both.

    Args:
      objective: which drafter it is, of which target.
      target_params: of the target.
      rows: held-out rows.
      num_positions: draft positions to look at.
      batch_size: rows at a time on each part of the mesh.

    Raises:
      SpecJAXError: rows with nothing to guess, or a domain called "all".
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
        self.objective = dataclasses.replace(
            objective, num_steps=num_positions if objective.is_head else 1
        )
        self.target_params, self.rows = target_params, rows
        self.batch_size = batch_size * parallel.dp_size(objective.mesh)
        self._said_RS = rows.fields("said_RS")
        self._loop_RS = np.stack([_in_loop(row) for row in rows.fields("tokens_RS")])
        self._temperature_R, self._domain_R = rows.fields("temperature_R"), rows.fields("domains")
        drawn_R = np.isin(self._temperature_R, (0, 1)) | np.isnan(self._temperature_R)
        first, behind = (2, num_positions - 1) if objective.is_head else (1, 0)
        if not self._said_RS[drawn_R, first : self._said_RS.shape[1] - behind].any():
            raise SpecJAXError(
                "no held-out row has a token to guess that was drawn at temperature 0 or 1"
            )
        if ALL in self._domain_R:
            raise SpecJAXError(
                f"held-out rows have a domain called {ALL!r}, which is what the mean is called"
            )

    @functools.cached_property
    def _said(self):
        # Kept on the host: of many rows this is more than a device has room for beside a large
        # target.
        return [
            parallel.get(_ask(self.objective, self.target_params, self._batch(i)))
            for i in self._starts()
        ]

    def _starts(self):
        return range(0, len(self.rows), self.batch_size)

    def _batch(self, start: int) -> Batch:
        # The last batch is filled up with row 0, so that all have one shape.
        indices = [i if i < len(self.rows) else 0 for i in range(start, start + self.batch_size)]
        return self.rows.batch(indices, self.objective.aux_layers, prompt_weight=1.0)

    def __call__(self, params, draft_ids_U) -> list[Score]:
        """Scores of a drafter with these parameters."""
        parts = []
        for start, (aux_layers, *others) in zip(self._starts(), self._said, strict=True):
            batch = self._batch(start)
            parts.append(
                _agreement(
                    self.objective,
                    params,
                    self.target_params,
                    draft_ids_U,
                    batch._replace(aux_layers=aux_layers or batch.aux_layers),
                    *others,
                )
            )
        agree_IRN = [
            np.concatenate([np.asarray(part[kind]) for part in parts], axis=1)[:, : len(self.rows)]
            for kind in range(2)
        ]
        return [
            score
            for temperature in (0, 1)
            for score in self._scores(temperature, agree_IRN[temperature])
        ]

    def _scores(self, temperature: int, agree_IRN) -> list[Score]:
        I, _, N = agree_IRN.shape
        first = 2 if self.objective.is_head else 1  # the token that place 0 guesses
        said, loop = self._said_RS[:, first : first + N], self._loop_RS[:, first : first + N]
        drawn_R = (self._temperature_R == temperature) | np.isnan(self._temperature_R)
        scores = []
        for text, among in (("all", said), ("loops", said & loop), ("no loops", said & ~loop)):
            domains = []
            for domain in sorted(set(self._domain_R)):
                chosen = among & (drawn_R & (self._domain_R == domain))[:, None]
                # Of a chain all guesses must be of tokens that there are.
                masks = [chosen & self._said_RS[:, first + i : first + i + N] for i in range(I)]
                if masks[0].any():
                    rates = tuple(
                        float(agree_IRN[i][masks[i]].mean()) if masks[i].any() else np.nan
                        for i in range(I)
                    )
                    domains.append(Score(temperature, domain, text, rates, int(masks[0].sum())))
            if domains:
                mean = tuple(
                    float(x) for x in np.mean([score.by_position for score in domains], axis=0)
                )
                scores += [
                    *domains,
                    Score(temperature, ALL, text, mean, sum(score.places for score in domains)),
                ]
        return scores


def summary(scores: list[Score]) -> tuple[float, ...]:
    """By draft position, the mean over temperatures 0 and 1 of what is accepted in all text."""
    means = [score.by_position for score in scores if score.domain == ALL and score.text == "all"]
    return tuple(float(x) for x in np.mean(means, axis=0))


def chain_length(scores: list[Score]) -> float:
    """How many drafts in a row would be accepted, by `summary`: the number to compare drafters by,
      since a head that is
    better at the first draft alone may be worse at all that follow."""
    return float(np.cumprod(np.nan_to_num(summary(scores))).sum())


@functools.partial(jax.jit, static_argnums=0)
def _ask(objective: Objective, target_params, batch: Batch):
    """Of the target at every place: its residual streams where they were not kept, the most likely
      token and the
    log-sum-exp of its logits."""
    aux_hidden_BSD = objective.features(target_params, batch)

    def row(h_SD):
        logits_SV = llama.logits(target_params, h_SD[None])[0]
        return logits_SV.argmax(-1), jax.nn.logsumexp(logits_SV, axis=-1)

    return () if batch.aux_layers else aux_hidden_BSD, *jax.lax.map(
        row, objective.hidden(target_params, aux_hidden_BSD)
    )


@functools.partial(jax.jit, static_argnums=0)
def _agreement(
    objective: Objective,
    params: Any,
    target_params,
    draft_ids_U,
    batch: Batch,
    argmax_BS,
    logsumexp_BS,
):
    """For each draft position whether the most likely tokens agree, and sum(min(p, q)) over the
    whole vocabulary."""
    params = jax.tree.map(lambda x: x.astype(objective.dtype), params)
    aux_layers = objective.features(target_params, batch)
    hidden_BSD = objective.hidden(target_params, aux_layers)
    rows_UD = llama.output_rows(target_params, draft_ids_U)
    results = []
    steps = objective.student(
        params, target_params, draft_ids_U, batch, aux_layers, objective.num_steps
    )
    for i, (h_BND, head_UD) in enumerate(steps):
        first, N = (1 + i if objective.is_head else 0), h_BND.shape[1]

        def row(x, head_UD=head_UD):
            h_ND, teacher_ND, argmax_N, logsumexp_N = x
            # In float32, as `_ask` and decoding work logits out.
            q_NU, p_NU = (
                linear(x_ND[None], w_UD, dtype=jnp.float32)[0]
                for x_ND, w_UD in ((h_ND, head_UD), (teacher_ND, rows_UD))
            )
            p_NU = jnp.exp(p_NU - logsumexp_N[:, None])
            guess_N = q_NU.argmax(-1)
            guess_N = guess_N if draft_ids_U is None else draft_ids_U[guess_N]
            return guess_N == argmax_N, jnp.minimum(p_NU, jax.nn.softmax(q_NU)).sum(-1)

        window = [x[:, first : first + N] for x in (hidden_BSD, argmax_BS, logsumexp_BS)]
        results.append(jax.lax.map(row, (h_BND, *window)))
    return tuple(jnp.stack([result[kind] for result in results]) for kind in range(2))


def _in_loop(row_S: np.ndarray) -> np.ndarray:
    """Whether the LOOP tokens before each token have stood in the row before."""
    seen, result = set(), np.zeros(len(row_S), bool)
    ids = row_S.tolist()
    for i in range(LOOP, len(ids)):
        gram = tuple(ids[i - LOOP : i])
        result[i] = gram in seen
        seen.add(gram)
    return result
