"""The cost of a round in plain steps, and the speedup that cost and acceptance predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, parallel
from specjax.bench import timing
from specjax.decode import DecodeConfig
from specjax.drafters.base import Draft, Drafter
from specjax.engine import batch
from specjax.engine.metrics import Acceptance, expected_tokens
from specjax.engine.request import SamplingOptions
from specjax.engine.setup import Setup

ROUNDS = 8  # in a call
PREFILL_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a round, in plain steps.

    Attributes:
      plain_seconds: a plain step.
      draft: c, what the drafter adds to a round, its own bookkeeping included, divided by K.
      verify: v, the target's pass over K + 1 tokens, verification and bookkeeping included.
      call_seconds: host overhead of a call of the loop, besides its rounds.
    """

    plain_seconds: float
    draft: float
    verify: float
    call_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroCost(Drafter):
    """A drafter that costs nothing and whose drafts are mostly wrong."""

    def propose(self, params, state, context, sample):
        batch_size = len(context.length_B)
        return Draft(jnp.zeros((batch_size, self.num_tokens), jnp.int32)), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlwaysDrafts(Drafter):
    """A drafter with all of its drafts counted as real.

    Attributes:
      drafter: the drafter.
    """

    drafter: Drafter

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The aux layers of the drafter."""
        return self.drafter.aux_layers

    def init(self, params, context):
        return self.drafter.init(params, context)

    def prefill(self, params, state, context, chunk):
        return self.drafter.prefill(params, state, context, chunk)

    def propose(self, params, state, context, sample):
        draft, state = self.drafter.propose(params, state, context, sample)
        return draft._replace(count_B=None), state

    def update(self, params, state, context, verified, aux_hidden_BTD):
        return self.drafter.update(params, state, context, verified, aux_hidden_BTD)


def measure(
    setup: Setup,
    K: int,
    drafters: Sequence[tuple[Drafter, Any]],
    *,
    batch_size: int,
    length: int,
    temperature: float,
    repeats: int,
) -> Costs:
    """Times plain steps, rounds of a drafter that costs nothing and rounds of real ones, in turn.

    A call runs `ROUNDS` rounds, so that the cost of calling counts as little as in decoding.

    Args:
      setup: the target and how it is run.
      K: drafts per round.
      drafters: drafters and their parameters. Each is timed alone, running in every round, and
        their costs are added.
      batch_size: rows.
      length: tokens of each row at the start.
      temperature: temperature of all rows; 0 is greedy.
      repeats: number of runs; the median counts.
    """
    target = setup.target
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, target.num_valid_tokens, (batch_size, length))
    rows = batch.arrays(
        prompts,
        max_length=batch.bucket(length + ROUNDS * (K + 1)),
        sampling=SamplingOptions(temperature=temperature),
    )
    arrays = parallel.put(rows, target.mesh)
    runtime = target.runtime(setup.page_size, setup.implementation)

    def rounds(drafter, params=None, count=ROUNDS):
        config = DecodeConfig(target.config, drafter, setup.verify, runtime)
        limit = parallel.put(np.int32(count), target.mesh)
        start = decode.init_jit(target.params, params, config, *arrays, PREFILL_CHUNK)

        def prepare():
            copy = jax.tree.map(jnp.copy, start)  # the loop takes over its buffers
            state = jax.block_until_ready(copy)
            return lambda: decode.generate_jit(target.params, params, config, state, limit)

        return prepare

    timed = {
        "plain": rounds(None),
        "one": rounds(None, count=1),
        "verify": rounds(ZeroCost(num_tokens=K)),
    }
    for i, (drafter, params) in enumerate(drafters):
        timed[f"drafter {i}"] = rounds(AlwaysDrafts(num_tokens=K, drafter=drafter), params)
    plain, one, verify, *drafting = timing.interleaved(timed, repeats).values()
    return Costs(
        plain_seconds=plain / ROUNDS,
        draft=sum(seconds - verify for seconds in drafting) / K / plain,
        verify=verify / plain,
        call_seconds=one - plain / ROUNDS,
    )


def predicted_speedup(stats: Acceptance, costs: Costs, K: int) -> float:
    """Speedup by (1 - α^(K+1)) / ((1 - α)(K c + v)) (Leviathan et al. 2023, theorem 3.8).

    Rounds in which the drafter had no proposal count as plain steps.
    """
    share = stats.rounds_with_drafts / stats.num_rounds
    if not share:
        return 1.0
    tokens = share * expected_tokens(stats.rate, K) + (1 - share)
    return tokens / (share * (K * costs.draft + costs.verify) + (1 - share))
