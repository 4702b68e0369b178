"""What a round costs in plain steps, and the speedup that this and the acceptance predict."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, parallel, sampling
from specjax.bench import timing
from specjax.decode import DecodeConfig
from specjax.drafters.base import Draft, Drafter
from specjax.engine import batch
from specjax.engine.load import Model
from specjax.engine.metrics import Acceptance, expected_tokens

ROUNDS = 8  # in a call


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of a round, in plain steps.

    Attributes:
      plain_seconds: a plain step.
      draft: c, what the drafter adds to a round, its own bookkeeping included, divided by K.
      verify: v, the target's pass over K + 1 tokens, verification and bookkeeping included.
      call_seconds: what a call of the loop costs besides its rounds: the host's part.
    """

    plain_seconds: float
    draft: float
    verify: float
    call_seconds: float


@functools.lru_cache
def free(K: int) -> Drafter:
    """A drafter that costs nothing, and whose guesses are mostly wrong."""

    def propose(params, state, context, draw):
        return Draft(jnp.zeros((len(context.length_B), K), jnp.int32)), state

    return Drafter(K, propose)


def eager(drafter: Drafter) -> Drafter:
    """The drafter, all of whose guesses are taken for real."""

    def propose(params, state, context, draw):
        draft, state = drafter.propose(params, state, context, draw)
        return draft._replace(count_B=None), state

    return drafter._replace(propose=propose)


def measure(
    target: Model,
    K: int,
    parts: Sequence[tuple[Drafter, Any]],
    *,
    batch_size: int,
    length: int,
    temperature: float,
    verify: str,
    page_size: int,
    implementation: str | None,
    repeats: int,
) -> Costs:
    """Times plain steps, rounds of a drafter that costs nothing, and rounds of real ones, in turn;
    `ROUNDS` of each in a call, so that what calling costs counts as little as in decoding.

    Args:
      target: the model.
      K: drafts per round.
      parts: drafters and their parameters. Each is timed alone, running in every round, and what
        they cost is added.
      batch_size: rows.
      length: tokens of each row at the start.
      temperature: of all rows; 0 is greedy.
      verify, page_size, implementation: see `DecodeConfig`.
      repeats: of which the median counts.
    """
    positions = batch.bucket(length + ROUNDS * (K + 1))
    rows = np.full(batch_size, 1)
    tokens_BS = (
        np.random.default_rng(0)
        .integers(0, target.num_valid_tokens, (batch_size, positions))
        .astype(np.int32)
    )
    noise = sampling.SamplingArrays(
        (0 * rows).astype(np.uint32),
        np.full(batch_size, temperature, np.float32) if temperature else None,
    )
    request = decode.RequestArrays(
        prompt_length_B=(length * rows).astype(np.int32),
        max_length_B=(positions * rows).astype(np.int32),
        eos_BE=np.full((batch_size, 1), -1, np.int32),
        sampling=noise,
    )
    arrays = parallel.put((tokens_BS, request), target.mesh)

    def rounds(drafter, params=None, count=ROUNDS):
        runtime = target.runtime(page_size, implementation)
        cfg = DecodeConfig(target.config, drafter, verify, runtime)
        limit = parallel.put(np.int32(count), target.mesh)
        start = decode.init_jit(target.params, params, cfg, *arrays, 64)

        def prepare():
            state = jax.block_until_ready(
                jax.tree.map(jnp.copy, start)
            )  # the loop takes over its buffers
            return lambda: decode.generate_jit(target.params, params, cfg, state, limit)

        return prepare

    times = timing.interleaved(
        {
            "plain": rounds(None),
            "one": rounds(None, count=1),
            "verify": rounds(free(K)),
            **{i: rounds(eager(drafter), params) for i, (drafter, params) in enumerate(parts)},
        },
        repeats,
    )
    plain, one, verify, *drafting = times.values()
    return Costs(
        plain / ROUNDS,
        sum(seconds - verify for seconds in drafting) / K / plain,
        verify / plain,
        one - plain / ROUNDS,
    )


def predicted_speedup(stats: Acceptance, costs: Costs, K: int) -> float:
    """(1 - α^(K+1)) / ((1 - α)(K c + v)), the standard formula (Leviathan et al. 2023, theorem
    3.8), where rounds in which the drafter had nothing to say count as plain steps."""
    share = stats.rounds_with_drafts / stats.num_rounds
    tokens = share * expected_tokens(stats.rate, K) + (1 - share) if share else 1.0
    return tokens / (share * (K * costs.draft + costs.verify) + (1 - share))
