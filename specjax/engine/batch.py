"""From prompts to arrays: the only module that encodes, validates and pads them.

    prompt_ids = encode_prompts(target, prompts)
    batch = arrays(prompt_ids, max_length=max_lengths(target, prompt_ids, max_new_tokens))
    state = decode.init_jit(params, drafter_params, config, *parallel.put(batch, mesh), chunk)

Callers that have token ids, such as benchmarks, start with `arrays`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import processors
from specjax import sampling as sampling_lib
from specjax.decode import RequestArrays
from specjax.engine.load import Model
from specjax.engine.request import Prompt, SamplingOptions, SamplingParams, bad_word_ids
from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.processors import ProcessorArrays
from specjax.sampling import SamplingArrays
from specjax.tokenizer import Tokenizer

# The passes over a vocabulary represent logits of -inf by -1e30. Such a token is never sampled as
# long as exp(-1e30 / temperature) is 0.
MAX_TEMPERATURE = 1e27
MAX_PREFILL_CHUNK = 256
FLOAT32 = np.finfo(np.float32)
MIN_EOS_IDS = 8  # columns of the table of end-of-sequence ids, so that few sizes are compiled
MAX_NEW_TOKENS = 2**31 - 1
MAX_STOP_IDS = 64  # of a request of an engine
# Of one prompt; the limits of vLLM. Powers of two from the least ones on, so that few sizes are
# compiled.
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024
MIN_BAD_WORDS, MIN_BAD_WORD_TOKENS = 8, 4
ENGINE_BAD_WORDS = MAX_BAD_WORDS, 16  # words of a request of an engine, and tokens of a word


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
        if is_chat:
            _, ids = encode_chat(model, prompt, name)
        else:
            ids = _encode_text(model, prompt, name)
        if not ids:
            raise SpecJAXError(f"{name} has no tokens")
    else:
        ids = prompt
    try:
        array = np.asarray(ids)
    except ValueError as error:  # lists of different lengths
        raise _not_a_prompt(prompt, name) from error
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


def encode_chat(
    model: Model, messages: Sequence[dict[str, Any]], name: str, **options: Any
) -> tuple[str, list[int]]:
    """Returns the text of a chat, as the model's template renders it, and its token ids.

    Args:
      model: a model with a tokenizer.
      messages: of the chat.
      name: name of the prompt, for errors.
      **options: see `Tokenizer.render_chat`.

    Raises:
      SpecJAXError: for messages that cannot be rendered.
    """
    try:
        text = model.tokenizer.render_chat(messages, **options)
    except SpecJAXError as error:
        raise SpecJAXError(f"{name}: {error}") from error
    check_unicode(text, name)
    # The template writes the special tokens.
    return text, model.tokenizer.encode(text, add_special_tokens=False)


def _encode_text(model: Model, text: str, name: str) -> list[int]:
    check_unicode(text, name)
    return encode_text(model.tokenizer, text, name)


def encode_text(tokenizer: Tokenizer, text: str, name: str | None) -> list[int]:
    """Returns the token ids of a text, with the special tokens that the model expects around it.

    A text that already begins with the BOS token, such as a rendered chat, gets no second one, and
    a `SpecJAXWarning` is issued.

    Args:
      tokenizer: tokenizer of the model.
      text: valid Unicode.
      name: name of the text, for the warning; None for no warning.
    """
    ids = tokenizer.encode(text)
    bos_id = tokenizer.bos_id
    if bos_id is None or ids[:2] != [bos_id, bos_id]:
        return ids
    bos = tokenizer.special_tokens["bos_token"]
    if not text.startswith(bos) or tokenizer.encode(text, add_special_tokens=False) == ids:
        return ids  # the tokenizer adds none, and the text has two
    if name is not None:
        warnings.warn(
            f"{name} begins with {bos!r}, which the tokenizer adds as well; only one is kept",
            SpecJAXWarning,
            stacklevel=2,
        )
    return ids[1:]


def check_unicode(text: str, name: str) -> None:
    """Raises SpecJAXError for a text with surrogates, which no UTF-8 has."""
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
    "top_p": _Range(float, FLOAT32.smallest_subnormal, 1, "(0, 1]"),
    "min_p": _Range(float, 0, 1, "[0, 1]"),
    "presence_penalty": _Range(float, -2, 2, "[-2, 2]"),
    "frequency_penalty": _Range(float, -2, 2, "[-2, 2]"),
    # A subnormal number may be 0 on a device.
    "repetition_penalty": _Range(float, FLOAT32.tiny, FLOAT32.max, "[1.2e-38, 3.4e38]"),
    "min_tokens": _Range(int, 0, 2**31 - 1, "[0, 2**31)"),
}
MAX_LOGIT_BIAS = 100


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


def sampling_params(
    eos_sets: Sequence[Sequence[int]],
    *,
    max_tokens: Sequence[int],
    stop: str | Sequence[str] = (),
    **options: Any,
) -> list[SamplingParams]:
    """Returns the parameters of each prompt, from options with one value for all or one per prompt.

    Args:
      eos_sets: ids that end each completion.
      max_tokens: of each prompt.
      stop: texts that end a completion, the same for all prompts.
      **options: others of `RANGES`.

    Raises:
      SpecJAXError: see `per_prompt`; also for stop strings that are none.
    """
    columns = {name: per_prompt(name, x, len(eos_sets)).tolist() for name, x in options.items()}
    params, stop = [], SamplingParams(stop=stop).stop  # checks them
    for b, eos_ids in enumerate(eos_sets):
        values = {name: column[b] for name, column in columns.items()}
        params.append(
            SamplingParams.unchecked(
                max_tokens=int(max_tokens[b]),
                ignore_eos=True,
                stop_token_ids=tuple(eos_ids),
                stop=stop,
                detokenize=bool(stop),
                **values,
            )
        )
    return params


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
    sets = _split_sets("eos_ids", model.eos_ids if eos_ids is None else eos_ids, batch_size)
    for ids in sets:
        _check_ids("eos_ids", ids, model.num_valid_tokens)
    return sets


def _split_sets(name: str, value: Any, batch_size: int) -> list[tuple[int, ...] | None]:
    """Returns the token ids of each prompt, from one list for all prompts or one per prompt."""
    if np.isscalar(value) or isinstance(value, Mapping):
        raise SpecJAXError(
            f"{name} must be a list of token ids, or one list per prompt, got {value!r}"
        )
    sets = list(value)
    if not sets or np.isscalar(sets[0]):
        sets = [sets] * batch_size
    if any(np.isscalar(ids) for ids in sets):
        raise SpecJAXError(f"{name} must be a list of token ids, or one list per prompt, not both")
    if len(sets) != batch_size:
        raise SpecJAXError(f"{name} has {len(sets)} sets for {batch_size} prompts")
    return [None if ids is None else tuple(ids) for ids in sets]


def _check_ids(name: str, ids: Sequence[Any], num_valid_tokens: int) -> None:
    for token in ids:
        is_integer = isinstance(token, int | np.integer)
        if not is_integer or not 0 <= token < num_valid_tokens:
            raise SpecJAXError(
                f"{name} has {token!r}, but ids range from 0 to {num_valid_tokens - 1}"
            )


# --- From token ids to arrays ---------------------------------------------------------------------


def arrays(
    prompt_ids: Sequence[Sequence[int]],
    *,
    max_length: int | Sequence[int],
    eos_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    sampling: SamplingOptions | None = None,
    max_seq_len: int | None = None,
    num_rows: int | None = None,
    vocab_size: int | None = None,
    num_valid_tokens: int | None = None,
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
      vocab_size: V, the columns of the target's logits; required for sampling parameters that name
        token ids.
      num_valid_tokens: those ids are below it; by default `vocab_size`.

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
    sampling = SamplingOptions() if sampling is None else sampling
    vocabulary = Vocabulary(vocab_size, num_valid_tokens or vocab_size)
    request = RequestArrays(
        prompt_length_B=length_B,
        max_length_B=max_length_B,
        eos_BE=_eos_table(_split_sets("eos_ids", eos_ids, batch_size)),
        sampling=sampling_arrays(sampling, batch_size),
        processors=processor_arrays(sampling, max_length_B - length_B, vocabulary),
    )
    batch = jax.tree.map(lambda x: _pad_rows(x, num_rows), Batch(tokens_BS, request))
    batch.request.max_length_B[batch_size:] = 0
    return batch


def sampling_arrays(params: SamplingOptions, batch_size: int) -> SamplingArrays:
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


class Vocabulary(NamedTuple):
    """The vocabulary that sampling parameters refer to.

    Attributes:
      size: V, the columns of the target's logits; None where it is not known.
      num_valid_tokens: ids are below it.
    """

    size: int | None
    num_valid_tokens: int | None

    def check_ids(self, name: str, ids: Sequence[Any]) -> None:
        """Checks the token ids of an option.

        Raises:
          SpecJAXError: for one that is not in the vocabulary, or if that is not known.
        """
        if self.size is None:
            raise SpecJAXError(f"{name} requires vocab_size")
        _check_ids(name, ids, self.num_valid_tokens)


def processor_arrays(
    params: SamplingOptions, max_new_tokens_B: np.ndarray, vocabulary: Vocabulary
) -> ProcessorArrays | None:
    """Returns what changes the logits of each prompt, as arrays of the host; None for nothing.

    Args:
      params: one value for all prompts, or one per prompt.
      max_new_tokens_B: the number of tokens that each prompt may generate.
      vocabulary: see `Vocabulary`.

    Raises:
      SpecJAXError: for a value out of range or of another type, or another number of values.
    """
    batch_size = len(max_new_tokens_B)

    def values(name: str) -> np.ndarray:
        return per_prompt(name, getattr(params, name), batch_size)

    min_tokens_B = values("min_tokens")
    for b in np.flatnonzero(min_tokens_B > np.maximum(max_new_tokens_B, 0)):
        raise SpecJAXError(
            f"prompt {b}: min_tokens must be at most the {max(max_new_tokens_B[b], 0)} tokens that "
            f"can be generated, got {min_tokens_B[b]}"
        )
    return processors.arrays(
        bias_BV=_bias_table(params, batch_size, vocabulary),
        bad_words_BWC=_bad_word_table(_split_bad_words(params.bad_words, batch_size), vocabulary),
        min_tokens_B=min_tokens_B.astype(np.int32),
        presence_penalty_B=values("presence_penalty"),
        frequency_penalty_B=values("frequency_penalty"),
        repetition_penalty_B=values("repetition_penalty"),
    )


def _bias_table(
    params: SamplingOptions, batch_size: int, vocabulary: Vocabulary
) -> np.ndarray | None:
    """Returns float32 [B, V]: -inf for ids that are not allowed, else the bias; None without."""
    biases = _split_biases(params.logit_bias, batch_size)
    for bias in filter(None, biases):
        vocabulary.check_ids("logit_bias", list(bias))
    allowed = _split_allowed(params.allowed_token_ids, batch_size, vocabulary)
    if not any(biases) and not any(allowed):
        return None
    table_BV = np.zeros((batch_size, vocabulary.size), np.float32)
    for row_V, bias, ids in zip(table_BV, biases, allowed, strict=True):
        if ids is not None:
            row_V[:] = -np.inf
            row_V[list(ids)] = 0
        for token, number in bias.items():
            row_V[token] += number
    return table_BV


def _split_allowed(
    value: Any, batch_size: int, vocabulary: Vocabulary
) -> list[tuple[int, ...] | None]:
    """Returns the allowed ids of each prompt, at least one; None for all."""
    name = "allowed_token_ids"
    if value is None:
        return [None] * batch_size
    allowed = _split_sets(name, value, batch_size)
    for ids in allowed:
        if ids is not None and not ids:
            raise SpecJAXError(f"{name} is empty; at least one id is required")
        vocabulary.check_ids(name, ids or ())
    return allowed


def _split_biases(value: Any, batch_size: int) -> list[Mapping[int, float]]:
    """Returns the biases of each prompt, from those for all prompts or one mapping per prompt."""
    is_shared = value is None or isinstance(value, Mapping)
    biases = [value] * batch_size if is_shared else value
    if np.isscalar(biases) or not all(x is None or isinstance(x, Mapping) for x in biases):
        raise SpecJAXError(
            f"logit_bias must map token ids to numbers, or be one map per prompt, got {value!r}"
        )
    if len(biases) != batch_size:
        raise SpecJAXError(f"logit_bias has {len(biases)} maps for {batch_size} prompts")
    for bias in biases:
        for token, number in (bias or {}).items():
            is_number = isinstance(number, int | float | np.number)
            if not is_number or not abs(number) <= MAX_LOGIT_BIAS:
                raise SpecJAXError(
                    f"logit_bias must be in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}], got {number!r} "
                    f"for token {token!r}"
                )
    return [bias or {} for bias in biases]


def _split_bad_words(value: Any, batch_size: int) -> list[Sequence[Sequence[int]]]:
    """Returns the bad words of each prompt, from those for all prompts or one list per prompt."""
    error = SpecJAXError(
        f"bad_words must be a list of sequences of token ids, or one list per prompt, got {value!r}"
    )
    if value is None:
        return [()] * batch_size
    if np.isscalar(value) or isinstance(value, Mapping):
        raise error
    entries = [() if entry is None else entry for entry in value]
    if any(np.isscalar(entry) for entry in entries):
        raise error
    is_word = [len(entry) > 0 and np.isscalar(entry[0]) for entry in entries]
    if any(is_word) or not entries:
        entries = [entries] * batch_size
    if len(entries) != batch_size:
        raise SpecJAXError(f"bad_words has {len(entries)} lists for {batch_size} prompts")
    if any(np.isscalar(word) for words in entries for word in words):
        raise error
    return entries


def _bad_word_table(
    words_of_prompts: Sequence[Sequence[Sequence[int]]], vocabulary: Vocabulary
) -> np.ndarray | None:
    """Returns int32 [B, W, C], each word at the right end of its row; None without words."""
    if not any(map(len, words_of_prompts)):
        return None
    for words in words_of_prompts:
        num_tokens = sum(map(len, words))
        if len(words) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
            raise SpecJAXError(
                f"bad_words may have {MAX_BAD_WORDS} sequences and {MAX_BAD_WORD_TOKENS} tokens "
                f"per prompt, got {len(words)} sequences and {num_tokens} tokens"
            )
        for word in words:
            if not len(word):
                raise SpecJAXError("bad_words has an empty sequence")
            vocabulary.check_ids("bad_words", word)
    W = max(MIN_BAD_WORDS, *map(len, words_of_prompts))
    C = max(MIN_BAD_WORD_TOKENS, *(len(word) for words in words_of_prompts for word in words))
    shape = len(words_of_prompts), _power_of_two(W), _power_of_two(C)
    table_BWC = np.full(shape, -1, np.int32)
    for row_WC, words in zip(table_BWC, words_of_prompts, strict=True):
        for row_C, word in zip(row_WC, words, strict=False):
            row_C[-len(word) :] = word
    return table_BWC


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
    return min(max(16, _power_of_two(prompt_length)), MAX_PREFILL_CHUNK)


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least a number."""
    return 2 ** (number - 1).bit_length()


# --- One request of an engine ---------------------------------------------------------------------


def request_row(
    params: SamplingParams, prompt_length: int, max_length: int, stop_ids: Sequence[int]
) -> RequestArrays:
    """Returns the constants of one row of an engine, without processors and with seed 0.

    Args:
      params: how it is sampled.
      prompt_length: tokens of the prompt.
      max_length: largest length, prompt and output.
      stop_ids: ids that end the row.

    Raises:
      SpecJAXError: for more than `MAX_STOP_IDS` ids.
    """
    if len(stop_ids) > MAX_STOP_IDS:
        raise SpecJAXError(
            f"stop_token_ids and end-of-sequence ids may be {MAX_STOP_IDS} in all, got "
            f"{len(stop_ids)}"
        )
    eos_1E = np.full((1, MAX_STOP_IDS), -1, np.int32)
    eos_1E[0, : len(stop_ids)] = stop_ids
    return RequestArrays(
        prompt_length_B=np.array([prompt_length], np.int32),
        max_length_B=np.array([max_length], np.int32),
        eos_BE=eos_1E,
        sampling=SamplingArrays(
            seed_B=np.zeros(1, np.uint32),
            temperature_B=np.array([params.temperature], np.float32),
            top_k_B=np.array([params.top_k], np.int32),
            top_p_B=np.array([params.top_p], np.float32),
            min_p_B=np.array([params.min_p], np.float32),
        ),
    )


def max_model_len(model: Model, wanted: int | None) -> int:
    """Returns the largest length of a request of an engine, by default the model's context.

    Raises:
      SpecJAXError: for a length that is below 2 or beyond the context.
    """
    context = model.config.max_position_embeddings
    if wanted is None:
        return context
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 2 <= wanted <= context:
        raise SpecJAXError(
            f"max_model_len must be an integer from 2 to the model's context of {context} tokens, "
            f"got {wanted!r}"
        )
    return wanted


def check_prompt_ids(model: Model, ids: Sequence[int], max_model_len: int) -> None:
    """Checks the prompt of a request.

    Raises:
      SpecJAXError: for an empty prompt, one that leaves no room for an output, or ids outside the
        vocabulary.
    """
    if not ids:
        raise SpecJAXError("the prompt is empty; at least one token is required")
    if len(ids) >= max_model_len:
        raise SpecJAXError(
            f"the prompt has {len(ids)} tokens, but at most {max_model_len - 1} fit: prompt and "
            f"output share {max_model_len} tokens"
        )
    _check_ids("the prompt", ids, model.num_valid_tokens)


def max_new_tokens(params: SamplingParams, model: Model, room: int) -> int:
    """Returns how many tokens a request may generate.

    Args:
      params: of a request.
      model: the target.
      room: tokens that are left in the context.

    Raises:
      SpecJAXError: for parameters that need a tokenizer where there is none, ids outside the
        vocabulary, or a `min_tokens` for which there is no room.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, model.num_valid_tokens)
    if model.tokenizer is None and (params.stop or params.bad_words):
        name = "stop" if params.stop else "bad_words"
        raise SpecJAXError(f"{name} needs a tokenizer, but {model.path} has none; use token ids")
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise SpecJAXError(
            f"min_tokens must be at most the {max_tokens} tokens that can be generated, got "
            f"{params.min_tokens}"
        )
    return max_tokens


def processor_row(params: SamplingParams, model: Model) -> ProcessorArrays | None:
    """Returns what changes the logits of one row of an engine; None for nothing.

    Fields that change nothing are None, see `filled`.

    Args:
      params: of a request.
      model: the target.

    Raises:
      SpecJAXError: for ids outside the vocabulary, or too many or too long bad words.
    """
    bad_words = bad_word_ids(model.tokenizer, params.bad_words) if params.bad_words else ()
    vocabulary = Vocabulary(model.config.vocab_size, model.num_valid_tokens)
    options = SamplingOptions(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=bad_words or None,
    )
    used = processor_arrays(options, np.array([MAX_NEW_TOKENS]), vocabulary)
    if used is None:
        return None
    if used.bad_words_BWC is not None:
        W, C = used.bad_words_BWC.shape[1:]
        if ENGINE_BAD_WORDS[1] < C:
            raise SpecJAXError(
                f"a bad word has more than {ENGINE_BAD_WORDS[1]} tokens: {params.bad_words!r}"
            )
        words_BWC = np.full((1, *ENGINE_BAD_WORDS), processors.OFF.bad_words_BWC, np.int32)
        words_BWC[:, :W, -C:] = used.bad_words_BWC
        used = used.replace(bad_words_BWC=words_BWC)
    return used


def filled(used: ProcessorArrays | None, neutral: ProcessorArrays) -> ProcessorArrays:
    """Returns `neutral` with the fields of `used` that are not None."""
    if used is None:
        return neutral
    return jax.tree.map(
        lambda x, off: off if x is None else x, used, neutral, is_leaf=lambda x: x is None
    )


def neutral_processors(num_rows: int, vocab_size: int) -> ProcessorArrays:
    """Returns all fields of `ProcessorArrays` for rows of an engine, with values that are off."""
    shapes = dict(bias_BV=(num_rows, vocab_size), bad_words_BWC=(num_rows, *ENGINE_BAD_WORDS))
    fields = {}
    for field in dataclasses.fields(ProcessorArrays):
        is_integer = field.name in ("bad_words_BWC", "min_tokens_B")
        off = getattr(processors.OFF, field.name)
        shape = shapes.get(field.name, (num_rows,))
        fields[field.name] = np.full(shape, off, np.int32 if is_integer else np.float32)
    return ProcessorArrays(**fields)
