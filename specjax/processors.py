"""Per-request changes of the target's logits: bias, banned tokens, and penalties.

A processor changes the logits of a position as a function of the tokens before it, before
temperature and filters. In a block [pending, d1 ... dM], the logits after d_i are those of plain
decoding after the committed tokens and d1 ... d_i: each node counts the drafts on its own path, and
no others. Verification then sees the distributions of plain decoding, and both methods stay
lossless.

The order is that of vLLM: forbidden and biased tokens first, then the penalties for repetition,
frequency and presence. Definitions are vLLM's too (`vllm/v1/sample`), and OpenAI's for frequency
and presence.

A drafter's logits are not processed. The output follows the target's distribution whatever the
drafter proposes, and a drafter's logits may be split over other devices than the target's. Drafts
that a processor forbids are rejected, so strong processors cost acceptance.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.lax_utils import with_standard_promotion


@struct.dataclass
class ProcessorArrays:
    """How the target's logits of each sequence are changed.

    A field that is None is off in all rows, and nothing is compiled for it. Every field has a value
    that changes nothing, for the rows that do not use it.

    Attributes:
      bias_BV: float32, added to the logits; -inf forbids a token; 0 is off. Both `logit_bias` and
        `allowed_token_ids` are in it. On a mesh it is split like the logits.
      bad_words_BWC: int32, W token sequences that the output never contains, each in its last
        entries, after a filling of -1. The last token of a sequence is forbidden where the output
        ends in the tokens before it. -1 everywhere is off.
      min_tokens_B: int32; end-of-sequence ids are forbidden until a row has so many output tokens;
        0 is off.
      presence_penalty_B: float32, subtracted from the logits of tokens in the output; 0 is off.
      frequency_penalty_B: float32, subtracted once for each time that a token is in the output; 0
        is off.
      repetition_penalty_B: float32, above 0; divides the positive logits of tokens in the prompt or
        the output and multiplies the other ones; 1 is off.
    """

    bias_BV: jax.Array | None = None
    bad_words_BWC: jax.Array | None = None
    min_tokens_B: jax.Array | None = None
    presence_penalty_B: jax.Array | None = None
    frequency_penalty_B: jax.Array | None = None
    repetition_penalty_B: jax.Array | None = None


OFF = ProcessorArrays(
    bias_BV=0,
    bad_words_BWC=-1,
    min_tokens_B=0,
    presence_penalty_B=0,
    frequency_penalty_B=0,
    repetition_penalty_B=1,
)


def arrays(**host_arrays: np.ndarray | None) -> ProcessorArrays | None:
    """Returns `ProcessorArrays` of host arrays, with None for those that are off in all rows.

    Args:
      **host_arrays: fields of `ProcessorArrays`.

    Returns:
      The arrays; None where no row uses any.
    """
    used = {}
    for name, x in host_arrays.items():
        if x is not None and (x != getattr(OFF, name)).any():
            used[name] = x
    return ProcessorArrays(**used) if used else None


@with_standard_promotion
def process(
    arrays: ProcessorArrays | None,
    logits_BTV: jax.Array,
    tokens_BS: jax.Array,
    prompt_length_B: jax.Array,
    length_B: jax.Array,
    drafts_BM: jax.Array,
    eos_BE: jax.Array,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """Returns the logits of a block after all processors.

    A row whose tokens are all forbidden has only logits of -inf. Such a row fails, as one does
    whose model returns them.

    Args:
      arrays: what to do; None for nothing.
      logits_BTV: float32, the target's after the pending token and after each of M drafts, T = M +
        1; those of a shard where the vocabulary is split.
      tokens_BS: int32, prompt and output; undefined from the length on.
      prompt_length_B: int32.
      length_B: int32, number of committed tokens.
      drafts_BM: int32, a chain. M may be 0. Logits after a draft that is not real are undefined.
      eos_BE: int32, end-of-sequence ids; -1 fills unused entries.
      axes: mesh axes over which the vocabulary is split, inside `jax.shard_map` (static).

    Returns:
      Logits, float32 `[B, T, V]`; the same array where no processor is on.
    """
    if arrays is None or not jax.tree.leaves(arrays):
        return logits_BTV
    if arrays.bias_BV is not None:
        bias_BTV = arrays.bias_BV[:, None]
        # A select, since an infinite logit minus infinity is NaN.
        logits_BTV = jnp.where(bias_BTV == -jnp.inf, -jnp.inf, logits_BTV + bias_BTV)
    if arrays.bad_words_BWC is not None:
        num_before = arrays.bad_words_BWC.shape[2] - 1
        recent = _recent_output(tokens_BS, prompt_length_B, length_B, num_before)
        window = jnp.concatenate([recent, drafts_BM], axis=1)
        logits_BTV = _without_bad_words(logits_BTV, arrays.bad_words_BWC, window, axes)
    if arrays.min_tokens_B is not None:
        output_length_B1 = (length_B - prompt_length_B)[:, None]
        output_length_BT = output_length_B1 + jnp.arange(logits_BTV.shape[1])
        is_early_BT = output_length_BT < arrays.min_tokens_B[:, None]
        logits_BTV = _forbid(logits_BTV, eos_BE[:, None], is_early_BT[..., None], axes)
    logits_BTV = _penalize(
        arrays, logits_BTV, tokens_BS, prompt_length_B, length_B, drafts_BM, axes
    )
    # Computed once: a threshold that is found among these logits must be one of them, to the bit,
    # wherever they are read again.
    return jax.lax.optimization_barrier(logits_BTV)


# --- Forbidden tokens -----------------------------------------------------------------------------


def _columns(tokens, V: int, axes: tuple[str, ...]):
    """Returns the column of each token in this shard of V columns; V where it has none."""
    first_token = jax.lax.axis_index(axes) * V if axes else 0
    column = tokens - first_token
    return jnp.where((column >= 0) & (column < V), column, V)


def _forbid(logits_BTV, tokens, is_forbidden, axes: tuple[str, ...]):
    """Returns the logits with -inf for some tokens of each node.

    Args:
      logits_BTV: as for `process`.
      tokens: int32, some per node, on a last axis: `[B, T, ...]`. -1 is no token.
      is_forbidden: bool, of the same shape, or one that is broadcast to it.
      axes: as for `process`.
    """
    B, T, V = logits_BTV.shape
    row_B11, node_T1 = jnp.arange(B)[:, None, None], jnp.arange(T)[:, None]
    columns = _columns(jnp.where(is_forbidden, tokens, -1), V, axes)
    return logits_BTV.at[row_B11, node_T1, columns].set(-jnp.inf, mode="drop")


def _recent_output(tokens_BS, prompt_length_B, length_B, count: int):
    """Returns the last `count` tokens of each output, `[B, count]`; -2 where it has fewer."""
    position = length_B[:, None] - count + jnp.arange(count)
    tokens = jnp.take_along_axis(tokens_BS, jnp.maximum(position, 0), axis=1)
    return jnp.where(position >= prompt_length_B[:, None], tokens, -2)


def _without_bad_words(logits_BTV, bad_words_BWC, window, axes: tuple[str, ...]):
    """Forbids the last token of each sequence whose other tokens come just before.

    Args:
      logits_BTV: as for `process`.
      bad_words_BWC: see `ProcessorArrays`.
      window: int32 `[B, C - 1 + M]`, the last C - 1 tokens of the output, then the drafts.
      axes: as for `process`.
    """
    T, num_before = logits_BTV.shape[1], bad_words_BWC.shape[2] - 1
    # The tokens before node t are the C - 1 entries from t on.
    index_TC = jnp.arange(T)[:, None] + jnp.arange(num_before)
    before_BT1C = window[:, index_TC][:, :, None]
    expected_B1WC = bad_words_BWC[:, None, :, :-1]
    matches_BTW = ((expected_B1WC == before_BT1C) | (expected_B1WC == -1)).all(axis=-1)
    return _forbid(logits_BTV, bad_words_BWC[:, None, :, -1], matches_BTW, axes)


# --- Penalties ------------------------------------------------------------------------------------


def _penalize(
    arrays: ProcessorArrays,
    logits_BTV,
    tokens_BS,
    prompt_length_B,
    length_B,
    drafts_BM,
    axes: tuple[str, ...],
):
    presence_B, frequency_B = arrays.presence_penalty_B, arrays.frequency_penalty_B
    repetition_B = arrays.repetition_penalty_B
    if presence_B is None and frequency_B is None and repetition_B is None:
        return logits_BTV
    V = logits_BTV.shape[2]
    position_S = jnp.arange(tokens_BS.shape[1])
    is_prompt_BS = position_S < prompt_length_B[:, None]
    is_output_BS = (position_S < length_B[:, None]) & ~is_prompt_BS
    output_BV = _counts(tokens_BS, is_output_BS, V, axes)
    counts_BTV = _counts_along_block(output_BV, drafts_BM, axes)
    if repetition_B is not None:
        prompt_BV = _counts(tokens_BS, is_prompt_BS, V, axes)
        is_seen_BTV = (counts_BTV > 0) | (prompt_BV > 0)[:, None]
        penalty_BTV = jnp.where(is_seen_BTV, repetition_B[:, None, None], 1)
        logits_BTV = jnp.where(logits_BTV > 0, logits_BTV / penalty_BTV, logits_BTV * penalty_BTV)
    if frequency_B is not None:
        logits_BTV -= frequency_B[:, None, None] * counts_BTV.astype(jnp.float32)
    if presence_B is not None:
        logits_BTV -= jnp.where(counts_BTV > 0, presence_B[:, None, None], 0)
    return logits_BTV


def _counts(tokens_BS, is_counted_BS, V: int, axes: tuple[str, ...]):
    """Returns how often each token of this shard is among those counted, int32 `[B, V]`."""
    B = tokens_BS.shape[0]
    column_BS = _columns(jnp.where(is_counted_BS, tokens_BS, -1), V, axes)
    zeros_BV = jnp.zeros((B, V), jnp.int32)
    return zeros_BV.at[jnp.arange(B)[:, None], column_BS].add(1, mode="drop")


def _counts_along_block(counts_BV, drafts_BM, axes: tuple[str, ...]):
    """Returns the counts at each node, int32 `[B, T, V]`: those given, and of the drafts before."""
    (B, V), M = counts_BV.shape, drafts_BM.shape[1]
    T = M + 1
    counts_BTV = jnp.broadcast_to(counts_BV[:, None], (B, T, V))
    if M == 0:
        return counts_BTV
    row_B11, node_T1 = jnp.arange(B)[:, None, None], jnp.arange(T)[:, None]
    is_before_TM = jnp.arange(M) < node_T1
    column_BTM = _columns(jnp.where(is_before_TM, drafts_BM[:, None], -1), V, axes)
    return counts_BTV.at[row_B11, node_T1, column_BTM].add(1, mode="drop")
