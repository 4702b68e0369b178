"""From prompts to arrays: the only module that encodes, validates and pads them.

    prompt_ids = encode_prompts(target, prompts)
    batch = arrays(prompt_ids, max_length=max_lengths(target, prompt_ids, max_new_tokens))
    state = decode.init_jit(params, drafter_params, config, *parallel.put(batch, mesh), chunk)

Callers that have token ids, such as benchmarks, start with `arrays`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import sampling as sampling_lib
from specjax.decode import RequestArrays
from specjax.engine.load import Model
from specjax.engine.request import Prompt, SamplingParams
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.sampling import SamplingArrays
from specjax.tokenizer import Tokenizer

# The passes over a vocabulary represent logits of -inf by -1e30. Such a token is never sampled as
# long as exp(-1e30 / temperature) is 0.
MAX_TEMPERATURE = 1e27
MAX_PREFILL_CHUNK = 256
MIN_EOS_IDS = 8  # columns of the table of end-of-sequence ids, so that few sizes are compiled


class Batch(NamedTuple):
    """Prompts as arrays of the host. `parallel.put` puts them on the devices.

    Attributes:
      tokens_BS: int32 [B, S], the prompts, padded on the right.
      request: lengths, end-of-sequence ids and sampling of each row.
    """

    tokens_BS: np.ndarray
    request: RequestArrays


# --- From prompts to token ids --------------------------------------------------------------------


def encode_prompts(model: Model, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt.

    Raises:
      SpecJAXError: if there is no prompt, or for one that `encode` rejects.
    """
    if isinstance(prompts, str | bytes | dict) or not hasattr(prompts, "__len__"):
        raise SpecJAXError(f"prompts must be a list of prompts, got {prompts!r}")
    if not len(prompts):
        raise SpecJAXError("prompts is empty; at least one prompt is required")
    return [encode(model, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]


def encode(model: Model, prompt: Prompt, name: str) -> tuple[int, ...]:
    """Returns the token ids of a prompt.

    Args:
      model: the target.
      prompt: text, token ids, or the messages of a chat.
      name: name of the prompt, for errors and warnings.

    Raises:
      SpecJAXError: for an empty prompt, ids outside the vocabulary, text for a model without
        tokenizer, or anything that is not a prompt.
    """
    if isinstance(prompt, bytes | dict) or not hasattr(prompt, "__len__"):
        raise _not_a_prompt(prompt, name)
    if not len(prompt):
        raise SpecJAXError(f"{name} is empty")
    is_chat = isinstance(prompt[0], dict)
    if is_chat or isinstance(prompt, str):
        if model.tokenizer is None:
            raise SpecJAXError(
                f"{name} is text, but {model.path} has no tokenizer; use token ids instead"
            )
        ids = _encode_chat(model, prompt, name) if is_chat else _encode_text(model, prompt, name)
        if not ids:
            raise SpecJAXError(f"{name} has no tokens")
    else:
        ids = prompt
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _not_a_prompt(prompt, name)
    is_outside = (array < 0) | (array >= model.num_valid_tokens)
    if is_outside.any():
        raise SpecJAXError(
            f"{name} has token id {array[is_outside][0]}, but ids range from 0 to "
            f"{model.num_valid_tokens - 1}"
        )
    return tuple(array.tolist())


def _not_a_prompt(prompt: Any, name: str) -> SpecJAXError:
    return SpecJAXError(f"{name} must be text, token ids or the messages of a chat, got {prompt!r}")


def _encode_chat(model: Model, messages: Sequence[dict[str, Any]], name: str) -> list[int]:
    try:
        text = model.tokenizer.render_chat(messages)
    except SpecJAXError as error:
        raise SpecJAXError(f"{name}: {error}") from error
    _check_unicode(text, name)
    return model.tokenizer.encode(text, add_special_tokens=False)  # the template writes them


def _encode_text(model: Model, text: str, name: str) -> list[int]:
    _check_unicode(text, name)
    return encode_text(model.tokenizer, text, name)


def encode_text(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Returns the token ids of a text, with the special tokens that the model expects around it.

    A text that already begins with the BOS token, such as a rendered chat, gets no second one, and
    a `SpecJAXWarning` is issued.

    Args:
      tokenizer: tokenizer of the model.
      text: valid Unicode.
      name: name of the text, for the warning.
    """
    ids = tokenizer.encode(text)
    bos_id = tokenizer.bos_id
    if bos_id is None or ids[:2] != [bos_id, bos_id]:
        return ids
    bos = tokenizer.special_tokens["bos_token"]
    if not text.startswith(bos) or tokenizer.encode(text, add_special_tokens=False) == ids:
        return ids  # the tokenizer adds none, and the text has two
    warnings.warn(
        f"{name} begins with {bos!r}, which the tokenizer adds as well; only one is kept",
        SpecJAXWarning,
        stacklevel=2,
    )
    return ids[1:]


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecJAXError(f"{name} is not valid Unicode: {error}") from error


# --- From options to one value per prompt ---------------------------------------------------------


class _Range(NamedTuple):
    """The values that an option may have: from `low` to `high`, both included."""

    kind: type
    low: float
    high: float
    text: str


RANGES = {
    "max_new_tokens": _Range(int, 1, 2**31 - 1, "[1, 2**31)"),
    "seed": _Range(int, 0, 2**32 - 1, "[0, 2**32)"),
    "temperature": _Range(float, 0, MAX_TEMPERATURE, f"[0, {MAX_TEMPERATURE:g}]"),
    "top_k": _Range(int, 0, 2**31 - 1, "[0, 2**31)"),
    "top_p": _Range(float, np.finfo(np.float32).smallest_subnormal, 1, "(0, 1]"),
    "min_p": _Range(float, 0, 1, "[0, 1]"),
}


def per_prompt(name: str, value: Any, batch_size: int) -> np.ndarray:
    """Returns the values of an option as an array [B], int64 or float32.

    Args:
      name: key in `RANGES`.
      value: one value for all prompts, or one per prompt.
      batch_size: number of prompts.

    Raises:
      SpecJAXError: for a value out of range or of another type, or another number of values.
    """
    allowed = RANGES[name]
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise SpecJAXError(f"{name} must be one value or one per prompt, got {value!r}") from error
    if array.shape not in ((), (batch_size,)):
        raise SpecJAXError(f"{name} has {array.size} values for {batch_size} prompts")
    if allowed.kind is int:
        if array.dtype.kind not in "iu":
            raise SpecJAXError(f"{name} must be an integer, got {value!r}")
    else:
        if array.dtype.kind not in "iuf":
            raise SpecJAXError(f"{name} must be a number, got {value!r}")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)  # before the check: 1e-50 becomes 0, and 1e50 infinite
    is_allowed = (array >= allowed.low) & (array <= allowed.high)
    if not np.all(is_allowed):
        raise SpecJAXError(f"{name} must be in {allowed.text}, got {array[~is_allowed].flat[0]!s}")
    dtype = np.int64 if allowed.kind is int else np.float32
    return np.broadcast_to(array, (batch_size,)).astype(dtype)


def max_lengths(
    model: Model, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
) -> np.ndarray:
    """Returns the largest length of each row, prompt and output, int64 [B].

    Args:
      model: the target, whose context limits a row. Beyond its own context a draft model only
        drafts worse.
      prompt_ids: the prompts.
      max_new_tokens: at least 1, for all prompts or one per prompt.

    Raises:
      SpecJAXError: for a prompt that leaves no room in the context, or another `max_new_tokens`.
    """
    for i, ids in enumerate(prompt_ids):
        check_context(model, ids, f"prompt {i}")
    length_B = np.array([len(ids) for ids in prompt_ids])
    budget_B = per_prompt("max_new_tokens", max_new_tokens, len(prompt_ids))
    return np.minimum(length_B + budget_B, model.config.max_position_embeddings)


def check_context(model: Model, ids: Sequence[int], name: str) -> None:
    """Checks that a prompt leaves room for at least one token in the model's context.

    Raises:
      SpecJAXError: if it does not; the message begins with `name`.
    """
    limit = model.config.max_position_embeddings
    if len(ids) >= limit:
        raise SpecJAXError(
            f"{name} has {len(ids)} tokens, but at most {limit - 1} fit: prompt and output share a "
            f"context of {limit} tokens"
        )


def eos_sets(
    model: Model, eos_ids: Sequence[int] | Sequence[Sequence[int]] | None, batch_size: int
) -> list[tuple[int, ...]]:
    """Returns the end-of-sequence ids of each prompt.

    Args:
      model: the target, whose ids are the default.
      eos_ids: one set for all prompts or one per prompt.
      batch_size: number of prompts.

    Raises:
      SpecJAXError: for another number of sets, or an id that the model never emits.
    """
    sets = _split_sets(model.eos_ids if eos_ids is None else eos_ids, batch_size)
    for ids in sets:
        for token in ids:
            is_integer = isinstance(token, int | np.integer)
            if not is_integer or not 0 <= token < model.num_valid_tokens:
                raise SpecJAXError(
                    f"eos_ids has {token!r}, but ids range from 0 to {model.num_valid_tokens - 1}"
                )
    return sets


def _split_sets(eos_ids: Any, batch_size: int) -> list[tuple[int, ...]]:
    if np.isscalar(eos_ids):
        raise SpecJAXError(
            f"eos_ids must be a list of token ids, or one list per prompt, got {eos_ids!r}"
        )
    sets = list(eos_ids)
    if not sets or np.isscalar(sets[0]):
        sets = [sets] * batch_size
    if any(np.isscalar(ids) for ids in sets):
        raise SpecJAXError("eos_ids must be a list of token ids, or one list per prompt, not both")
    if len(sets) != batch_size:
        raise SpecJAXError(f"eos_ids has {len(sets)} sets for {batch_size} prompts")
    return [tuple(ids) for ids in sets]


# --- From token ids to arrays ---------------------------------------------------------------------


def arrays(
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_length: int | Sequence[int],
    eos_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    sampling: SamplingParams | None = None,
    max_seq_len: int | None = None,
    num_rows: int | None = None,
) -> Batch:
    """Returns the arrays of a batch.

    Args:
      prompt_ids: token ids of each prompt, not empty.
      max_length: largest length of a row, prompt and output; one for all prompts or one per prompt.
        A row whose prompt reaches it emits nothing.
      eos_ids: ids that end a row; one set for all prompts or one per prompt.
      sampling: greedy by default.
      max_seq_len: S; by default the `bucket` of the largest `max_length`.
      num_rows: B, by default one row per prompt. The rest of the rows repeat the last prompt and
        emit nothing.

    Raises:
      SpecJAXError: for a prompt longer than S, invalid sampling parameters, or a number of values
        that is not the number of prompts.
    """
    batch_size = len(prompt_ids)
    num_rows = batch_size if num_rows is None else num_rows
    length_B = np.array([len(ids) for ids in prompt_ids], np.int32)
    max_length_B = np.broadcast_to(np.asarray(max_length, np.int32), (batch_size,))
    S = bucket(int(max_length_B.max())) if max_seq_len is None else max_seq_len
    if length_B.max() > S:
        raise SpecJAXError(f"a prompt has {length_B.max()} tokens, but max_seq_len is {S}")
    tokens_BS = np.zeros((batch_size, S), np.int32)
    for row_S, ids in zip(tokens_BS, prompt_ids, strict=True):
        row_S[: len(ids)] = ids
    request = RequestArrays(
        prompt_length_B=length_B,
        max_length_B=max_length_B,
        eos_BE=_eos_table(_split_sets(eos_ids, batch_size)),
        sampling=sampling_arrays(sampling or SamplingParams(), batch_size),
    )
    batch = jax.tree.map(lambda x: _pad_rows(x, num_rows), Batch(tokens_BS, request))
    batch.request.max_length_B[batch_size:] = 0
    return batch


def sampling_arrays(params: SamplingParams, batch_size: int) -> SamplingArrays:
    """Returns the sampling parameters of each prompt as arrays of the host.

    Raises:
      SpecJAXError: for a value out of range or of another type, or another number of values.
    """

    def values(name: str, dtype) -> np.ndarray:
        return per_prompt(name, getattr(params, name), batch_size).astype(dtype)

    return sampling_lib.arrays(
        seed_B=values("seed", np.uint32),
        temperature_B=values("temperature", np.float32),
        top_k_B=values("top_k", np.int32),
        top_p_B=values("top_p", np.float32),
        min_p_B=values("min_p", np.float32),
    )


def _eos_table(sets: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns int32 [B, E]; -1 fills unused entries.

    E is the same for most models, so that it rarely causes a new compilation.
    """
    num_columns = max(MIN_EOS_IDS, *map(len, sets))
    table_BE = np.full((len(sets), num_columns), -1, np.int32)
    for row_E, ids in zip(table_BE, sets, strict=True):
        row_E[: len(ids)] = ids
    return table_BE


def _pad_rows(x_B: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns a copy padded with copies of the last row."""
    padding = [(0, num_rows - len(x_B))] + [(0, 0)] * (x_B.ndim - 1)
    return np.pad(x_B, padding, mode="edge")


def bucket(max_seq_len: int) -> int:
    """Returns S for sequences of up to `max_seq_len` tokens, one of a few sizes.

    It is at most a quarter larger, or 128 more, so that prompts of similar length share a compiled
    program.
    """
    step = max(128, 2 ** (max_seq_len.bit_length() - 3))
    return -(-max_seq_len // step) * step


def prefill_chunk(prompt_length: int) -> int:
    """Returns how many tokens of a prompt to read at a time.

    This is the smallest power of two that holds the longest prompt, from 16 to `MAX_PREFILL_CHUNK`.
    """
    power = 2 ** (prompt_length - 1).bit_length()
    return min(max(16, power), MAX_PREFILL_CHUNK)
