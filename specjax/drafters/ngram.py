"""Prompt lookup: proposes what followed the last few tokens when they occurred before.

Saxena 2023, "Prompt Lookup Decoding", and the n-gram speculation of serving engines, here entirely
on the device. It looks in the prompt and in the output.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.config import LlamaConfig
from specjax.drafters.base import Draft, Drafter
from specjax.errors import SpecJAXError

DRAFT_CONFIG = None
FORMAT = None
OBJECTIVE = None
VLLM_OPTIONS = {"prompt_lookup_min": "min_n", "prompt_lookup_max": "max_n"}
MAX_N = 64  # each step of the comparison is compiled on its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDrafter(Drafter):
    """Finds the longest suffix of `min_n` to `max_n` tokens that occurs earlier in the text.

    Of equally long matches the latest one counts. Where fewer than `num_tokens` tokens follow the
    match, the text repeats itself with that period, and the proposal continues the repetition.

    Raises:
      SpecJAXError: unless 1 <= min_n <= max_n <= 64.
    """

    min_n: int
    max_n: int

    def __post_init__(self):
        if not 1 <= self.min_n <= self.max_n <= MAX_N:
            raise SpecJAXError(
                f"the drafter 'ngram' requires 1 <= min_n <= max_n <= {MAX_N}, "
                f"got min_n={self.min_n} and max_n={self.max_n}"
            )

    def propose(self, params, state, context, sample):
        tokens_BS, last_B1 = context.tokens_BS, context.length_B[:, None] - 1
        S = tokens_BS.shape[1]
        position_S = jnp.arange(S)
        # A match of n tokens ends at a position before the last token.
        is_match_BS = position_S < last_B1
        match_length_BS = jnp.zeros_like(tokens_BS)
        for back in range(self.max_n):
            suffix_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(last_B1 - back, 0), axis=1)
            shifted_BS = jnp.roll(tokens_BS, back, axis=1)
            is_inside_BS = (position_S >= back) & (last_B1 >= back)
            is_match_BS &= is_inside_BS & (shifted_BS == suffix_B1)
            match_length_BS += is_match_BS
        # Longest first, then latest.
        best_B = jnp.argmax(match_length_BS * S + position_S, axis=1)
        is_found_B = match_length_BS.max(axis=1) >= self.min_n
        period_B1 = jnp.maximum(last_B1 - best_B[:, None], 1)
        source_BM = best_B[:, None] + 1 + jnp.arange(self.num_tokens) % period_B1
        tokens_BM = jnp.take_along_axis(tokens_BS, jnp.minimum(source_BM, S - 1), axis=1)
        return Draft(tokens_BM, count_B=jnp.where(is_found_B, self.num_tokens, 0)), state


def make(
    num_tokens: int,
    target_config: LlamaConfig,
    draft_config: None,
    *,
    min_n: int = 2,
    max_n: int = 4,
) -> NgramDrafter:
    """Returns the drafter; see `NgramDrafter`."""
    return NgramDrafter(num_tokens=num_tokens, min_n=min_n, max_n=max_n)
