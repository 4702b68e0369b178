"""Prompt lookup: what followed the last few tokens when they were seen before, in the prompt or in
the output.

Saxena 2023, "Prompt Lookup Decoding", and the n-gram speculation of serving engines, here entirely
on the device.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.config import LlamaConfig
from specjax.drafters.base import Draft, Drafter
from specjax.errors import SpecJAXError

DRAFT = None
MAX_N = 64  # each step of the comparison is compiled on its own


@functools.lru_cache
def make(
    num_speculative_tokens: int,
    target: LlamaConfig,
    draft: None = None,
    *,
    min_n: int = 2,
    max_n: int = 4,
) -> Drafter:
    """Looks for the longest suffix of the text, of `min_n` to `max_n` tokens, that occurs earlier
    in it.

    Of equally long matches the latest one counts. Where a match ends so near the end of the text
    that fewer than K tokens follow it, the text repeats itself with that period, and the guess goes
    on repeating it.

    Raises:
      SpecJAXError: unless 1 <= min_n <= max_n <= 64.
    """
    if not 1 <= min_n <= max_n <= MAX_N:
        raise SpecJAXError(
            f"the drafter 'ngram' needs 1 <= min_n <= max_n <= {MAX_N}, "
            f"got min_n={min_n} and max_n={max_n}"
        )

    def propose(params, state, context, draw):
        del params, draw
        tokens_BS, end_B1 = context.tokens_BS, context.length_B[:, None] - 1
        S = tokens_BS.shape[1]
        position_S = jnp.arange(S)
        running_BS = position_S < end_B1  # an occurrence ends before the end
        match_BS = jnp.zeros_like(tokens_BS)
        for back in range(max_n):
            suffix_B1 = jnp.take_along_axis(tokens_BS, jnp.maximum(end_B1 - back, 0), axis=1)
            shifted_BS = jnp.roll(tokens_BS, back, axis=1)
            running_BS &= (position_S >= back) & (end_B1 >= back) & (shifted_BS == suffix_B1)
            match_BS += running_BS
        # Longest first, then latest.
        best_B = jnp.argmax(match_BS * S + position_S, axis=1)
        found_B = match_BS.max(axis=1) >= min_n
        period_B1 = jnp.maximum(end_B1 - best_B[:, None], 1)
        source_BM = best_B[:, None] + 1 + jnp.arange(num_speculative_tokens) % period_B1
        drafts_BM = jnp.take_along_axis(tokens_BS, jnp.minimum(source_BM, S - 1), axis=1)
        return Draft(drafts_BM, count_B=jnp.where(found_B, num_speculative_tokens, 0)), state

    return Drafter(num_speculative_tokens, propose)
