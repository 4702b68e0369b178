"""What a round costs in plain steps, and the speedup that this and the acceptance predict."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sampling, sharding
from specjax.bench import timing
from specjax.checkpoint import Model
from specjax.decode import DecodeConfig
from specjax.drafters.base import Draft, Drafter
from specjax.metrics import Acceptance, expected_tokens


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of a round, in plain steps.

    Attributes:
      plain_seconds: a plain step.
      draft: c, what the drafter adds to a round, its own bookkeeping included, divided by K.
      verify: v, the target's pass over K + 1 tokens, verification and bookkeeping included.
    """

    plain_seconds: float
    draft: float
    verify: float


@functools.lru_cache
def free(K: int) -> Drafter:
    """A drafter that costs nothing, and whose guesses are mostly wrong."""

    def propose(params, state, context, draw):
        return Draft(jnp.zeros((len(context.length_B), K), jnp.int32)), state

    return Drafter(K, (), lambda params, prefill: (), propose, lambda params, state, *_: state)


def eager(drafter: Drafter) -> Drafter:
    """The drafter, all of whose guesses are taken for real."""

    def propose(params, state, context, draw):
        draft, state = drafter.propose(params, state, context, draw)
        return draft._replace(count_B=None), state

    return drafter._replace(propose=propose)


def measure(target: Model, drafter: Drafter, drafter_params: Any, *, batch_size: int, length: int, temperature: float,
            verify: str, page_size: int, implementation: str | None, repeats: int) -> Costs:
    """Times a plain step, a round of a drafter that costs nothing, and a round of this one, in turn.

    Args:
      target: the model.
      drafter, drafter_params: the drafter.
      batch_size: rows.
      length: tokens of each row at the start.
      temperature: of all rows; 0 is greedy.
      verify, page_size, implementation: see `DecodeConfig`.
      repeats: of which the median counts.
    """
    K = drafter.num_tokens
    slots = length + (repeats + 2) * (K + 1)
    rows = np.full(batch_size, 1)
    tokens_BS = np.random.default_rng(0).integers(0, target.num_valid_tokens, (batch_size, slots)).astype(np.int32)
    noise = sampling.params((0 * rows).astype(np.uint32), np.full(batch_size, temperature, np.float32), 0 * rows,
                            rows.astype(np.float32), (0 * rows).astype(np.float32))
    arrays = sharding.put((tokens_BS, (length * rows).astype(np.int32), (slots * rows).astype(np.int32),
                           np.full((batch_size, 1), -1, np.int32), noise), target.mesh)

    def rounds(drafter, params=None):
        cfg = DecodeConfig(target.config, drafter, verify, target.num_valid_tokens, page_size, implementation,
                           target.mesh)
        step = jax.jit(decode.step, static_argnums=2, donate_argnums=3)
        carry = [decode.init_jit(target.params, params, cfg, *arrays, 64)]

        def again():
            carry[0] = step(target.params, params, cfg, carry[0])
            return carry[0].length_B

        return again

    times = timing.interleaved({"plain": rounds(None), "verify": rounds(free(K)),
                                "round": rounds(eager(drafter), drafter_params)}, repeats)
    return Costs(times["plain"], (times["round"] - times["verify"]) / K / times["plain"],
                 times["verify"] / times["plain"])


def predicted_speedup(stats: Acceptance, costs: Costs, K: int) -> float:
    """(1 - α^(K+1)) / ((1 - α)(K c + v)), the standard formula (Leviathan et al. 2023, theorem 3.8), where rounds in
    which the drafter had nothing to say count as plain steps."""
    share = stats.rounds_with_drafts / stats.num_rounds
    tokens = share * expected_tokens(stats.rate, K) + (1 - share) if share else 1.0
    return tokens / (share * (K * costs.draft + costs.verify) + (1 - share))
