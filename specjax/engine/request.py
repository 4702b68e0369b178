"""Inputs and outputs of requests, with the names of vLLM; and of `specjax.generate`."""

from __future__ import annotations

import copy
import dataclasses
import enum
import hashlib
import numbers
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.errors import SpecJAXError, SpecJAXWarning
from specjax.tokenizer import Tokenizer

MAX_N = 16384  # completions of a request
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 100.0
# Temperatures below the first are greedy; those between the two become the second, as in vLLM.
GREEDY_BELOW, LOWEST_TEMPERATURE = 1e-5, 0.01
INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1
DIGITS = re.compile("[0-9]{1,10}")  # a token id in decimal
FLOAT32 = np.finfo(np.float32)

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]  # text, token ids, or messages of a chat

# on_tokens(index of the prompt, new ids, whether each id was an accepted draft, whether these ids
# are the last ones)
OnTokens = Callable[[int, list[int], list[bool], bool], None]

# on_completion(index of the prompt, its completion)
OnCompletion = Callable[[int, "Completion"], None]


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled. Each field is one value for all prompts, or one per prompt.

    Attributes:
      temperature: 0 to `batch.MAX_TEMPERATURE`; 0 takes the most likely token.
      top_k: sample from this many most likely tokens only; 0 is off.
      top_p: in (0, 1]; sample from the fewest most likely tokens with at least this mass; 1 is off.
      min_p: in [0, 1]; sample from tokens with at least this share of the largest probability; 0 is
        off.
      seed: in [0, 2**32).
      presence_penalty: in [-2, 2]; subtracted from the logits of tokens in the output; 0 is off.
      frequency_penalty: in [-2, 2]; subtracted once for each time that a token is in the output; 0
        is off.
      repetition_penalty: above 0; divides the positive logits of tokens in the prompt or the output
        and multiplies the other ones; 1 is off.
      min_tokens: no end-of-sequence id is generated before so many tokens; at most the number of
        tokens that can be generated.
      logit_bias: numbers in [-100, 100] by token id, which are added to the logits.
      allowed_token_ids: the only ids that are generated; None for all.
      bad_words: up to 128 sequences of token ids that the output does not contain.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    seed: int | Sequence[int] = 0
    presence_penalty: float | Sequence[float] = 0.0
    frequency_penalty: float | Sequence[float] = 0.0
    repetition_penalty: float | Sequence[float] = 1.0
    min_tokens: int | Sequence[int] = 0
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None
    allowed_token_ids: Sequence[int] | Sequence[Sequence[int] | None] | None = None
    bad_words: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]] | None] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result for one prompt.

    Attributes:
      prompt_tokens: ids of the prompt.
      tokens: generated ids, including the end-of-sequence token that ended them.
      text: text of the generated ids without special tokens and without an incomplete character at
        the end; None if the model has no tokenizer.
      finish_reason: "stop" (an end-of-sequence token or a stop string) or "length"
        (`max_new_tokens`, or the context of the model is full).
      drafted: number of drafts that the target verified, per round.
      accepted: number of accepted drafts that were emitted, per round.
      emitted: number of emitted tokens, per round; their sum is `len(tokens)`.
      unusable_drafts: drafts sampled from logits that were NaN, or all -inf. They cost time and do
        not change the output's distribution.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    unusable_drafts: int = 0

    @property
    def from_draft(self) -> list[bool]:
        """Whether each token was an accepted draft, as opposed to a token of the target."""
        return from_draft(self.accepted, self.emitted)


@dataclasses.dataclass(frozen=True)
class Generation:
    """The results for all prompts of a call.

    Attributes:
      completions: one per prompt, in their order.
      prefill_seconds: wall time to read the prompts, including compilation if there was any.
      decode_seconds: wall time of the decode loop, without compilation and without `on_tokens`.
      rounds: number of rounds of the loop.
    """

    completions: tuple[Completion, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: int


def from_draft(accepted: Iterable[int], emitted: Iterable[int]) -> list[bool]:
    """Returns whether each token of some rounds was an accepted draft.

    Args:
      accepted: number of accepted drafts per round; they are emitted first.
      emitted: number of emitted tokens per round.
    """
    flags = []
    for num_accepted, num_emitted in zip(accepted, emitted, strict=True):
        flags += [True] * num_accepted + [False] * (num_emitted - num_accepted)
    return flags


# --- Requests of an engine ------------------------------------------------------------------------


class RequestOutputKind(enum.Enum):
    """What the outputs of a request hold.

    Attributes:
      CUMULATIVE: each output has everything so far.
      DELTA: each has the text and the tokens that are new since the last one.
      FINAL_ONLY: there is one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """How the completions of one request are generated: the names and meanings of vLLM.

    A parameter that is assigned later is checked like those that are given at first. Requests that
    were submitted keep what they had.

    Attributes:
      n: completions of the prompt. Completion i has the seed `seed` + i.
      temperature: 0 to 2. Below 1e-5 the most likely token is taken: stored as 0, with all filters
        off. Other values below 0.01 become 0.01.
      top_p: in (0, 1]; sample from the fewest most likely tokens with at least this mass; 1 is off.
      top_k: sample from this many most likely tokens only; 0 and -1 are off (stored as 0).
      min_p: in [0, 1]; sample from tokens with at least this share of the largest probability; 0 is
        off.
      presence_penalty: in [-2, 2]; subtracted from the logits of tokens in the output; 0 is off.
      frequency_penalty: in [-2, 2]; subtracted once for each time that a token is in the output; 0
        is off.
      repetition_penalty: above 0; divides the positive logits of tokens in the prompt or the output
        and multiplies the other ones; 1 is off.
      seed: any 64-bit integer. None or -1 (stored as None) for one that the engine chooses:
        `CompletionOutput.seed` says which.
      max_tokens: the most tokens to generate; None for as many as the context holds.
      min_tokens: no end-of-sequence id, stop id or stop string ends the output before so many
        tokens.
      stop: texts that end the output; one string or several, stored as a tuple.
      stop_token_ids: ids that end the output, besides those of the model.
      ignore_eos: continue after end-of-sequence tokens.
      include_stop_str_in_output: whether the text ends with the stop string, or the text of the
        stop token.
      logprobs: 0 to 20: report the log-probability of each token, and of so many most likely
        tokens. They are those of the model, before penalties, temperature and filters.
      prompt_logprobs: 0 to 20: the same for the tokens of the prompt.
      logit_bias: numbers by token id, which are added to the logits; stored within [-100, 100].
        Ids can be strings of digits, as they are in JSON.
      allowed_token_ids: the only ids that are generated; None for all.
      bad_words: up to 128 texts that the output does not contain.
      detokenize: whether outputs have a text.
      skip_special_tokens: whether it leaves out special tokens.
      spaces_between_special_tokens: True is the only value: text is what the tokenizer makes of the
        ids.
      output_kind: what outputs hold; `LLM` always returns final ones.
      structured_outputs: not supported; None is the only value.

    Raises:
      SpecJAXError: for a value that is not allowed, naming the field and what is.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: None = None
    _is_checked = False  # no field

    def __post_init__(self):
        self._check_unsupported()
        self._check_numbers()
        self._check_texts_and_ids()
        self._check_together()
        self._settle_temperature()
        self._set(_is_checked=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_checked:
            object.__setattr__(self, name, value)
            return
        if name not in {field.name for field in dataclasses.fields(self)}:
            raise SpecJAXError(f"SamplingParams has no parameter {name!r}")
        self._set(**vars(dataclasses.replace(self, **{name: value})))

    def clone(self) -> SamplingParams:
        """Returns a copy."""
        return copy.copy(self)

    @classmethod
    def unchecked(cls, **values: Any) -> SamplingParams:
        """Returns parameters whose values were checked against wider ranges: see `batch.RANGES`."""
        params = object.__new__(cls)
        for field in dataclasses.fields(cls):
            params._set(**{field.name: values.pop(field.name, field.default)})
        assert not values, f"unknown fields: {values}"
        return params

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_unsupported(self) -> None:
        if self.structured_outputs is not None:
            raise SpecJAXError(
                f"structured_outputs is not supported and must be None, got "
                f"{self.structured_outputs!r}"
            )
        if self.spaces_between_special_tokens is not True:
            raise SpecJAXError(
                "spaces_between_special_tokens must be True: the text is what the tokenizer makes "
                f"of the ids; got {self.spaces_between_special_tokens!r}"
            )

    def _check_numbers(self) -> None:
        for name in FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise SpecJAXError(f"{name} must be True or False, got {value!r}")
            self._set(**{name: bool(value)})
        for name, (low, high, text) in INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not is_integer or not low <= value <= high:
                raise SpecJAXError(f"{name} must be {text}, got {value!r}")
            self._set(**{name: int(value)})
        for name, (low, high, text) in NUMBERS.items():
            value = getattr(self, name)
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            # In float32, as on the device: 1e-50 would become 0 there.
            if not is_number or not low <= _float32(value) <= high:
                raise SpecJAXError(f"{name} must be a number in {text}, got {value!r}")
            self._set(**{name: float(value)})
        if self.top_k == -1:
            self._set(top_k=0)
        if self.seed == -1:
            self._set(seed=None)

    def _check_texts_and_ids(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set(
            stop=_texts("stop", stop) or (),
            stop_token_ids=_ids("stop_token_ids", self.stop_token_ids) or (),
            bad_words=_texts("bad_words", self.bad_words) or None,
            allowed_token_ids=_ids("allowed_token_ids", self.allowed_token_ids),
            logit_bias=_biases(self.logit_bias) or None,
        )
        if self.allowed_token_ids == ():
            raise SpecJAXError("allowed_token_ids must have at least one id, or be None; got none")
        if self.bad_words is not None and len(self.bad_words) > MAX_BAD_WORDS:
            raise SpecJAXError(
                f"bad_words must be at most {MAX_BAD_WORDS} texts, got {len(self.bad_words)}"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            choices = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise SpecJAXError(f"output_kind must be one of {choices}, got {self.output_kind!r}")

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SpecJAXError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise SpecJAXError(
                f"stop needs the text of the output, so detokenize must be True, got "
                f"detokenize=False and stop={self.stop!r}"
            )
        if self.is_greedy and self.n > 1:
            raise SpecJAXError(
                f"n must be 1 at temperature 0, where all completions are the same, got {self.n}"
            )

    def _settle_temperature(self) -> None:
        if self.is_greedy:
            self._set(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif self.temperature < LOWEST_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is too low for float32 and becomes "
                f"{LOWEST_TEMPERATURE}; 0 takes the most likely token",
                SpecJAXWarning,
                stacklevel=4,
            )
            self._set(temperature=LOWEST_TEMPERATURE)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW


FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
)
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")  # None is allowed
_LOGPROBS = (
    0,
    MAX_LOGPROBS,
    f"None or an integer in [0, {MAX_LOGPROBS}] (-1, all of them, is not supported)",
)
# Lowest and highest value, and the words for both in errors.
INTEGERS = {
    "n": (1, MAX_N, f"an integer in [1, {MAX_N}]"),
    "top_k": (-1, INT32_MAX, "an integer of at least -1 (0 and -1 are off)"),
    "seed": (INT64_MIN, INT64_MAX, "None or an integer in [-2**63, 2**63)"),
    "max_tokens": (1, INT32_MAX, "None or an integer of at least 1"),
    "min_tokens": (0, INT32_MAX, "an integer of at least 0"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
NUMBERS = {
    "temperature": (0, 2, "[0, 2]"),
    "top_p": (float(FLOAT32.smallest_subnormal), 1, "(0, 1]"),
    "min_p": (0, 1, "[0, 1]"),
    "presence_penalty": (-2, 2, "[-2, 2]"),
    "frequency_penalty": (-2, 2, "[-2, 2]"),
    # A subnormal number may be 0 on a device.
    "repetition_penalty": (float(FLOAT32.tiny), float(FLOAT32.max), "[1.2e-38, 3.4e38]"),
}


def _float32(value: numbers.Real) -> float:
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    except OverflowError:  # an integer beyond float64
        return float("inf")


def _texts(name: str, value: Any) -> tuple[str, ...] | None:
    """Returns texts that are not empty as a tuple; None for None."""
    if value is None:
        return None
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    texts = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise SpecJAXError(f"{name} must be a list of strings, got {value!r}")
    for text in texts:
        if not text:
            raise SpecJAXError(f"{name} must not contain an empty string, got {value!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SpecJAXError(f"{name} must be valid Unicode, got {text!r}: {error}") from error
    return texts


def _ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Returns token ids as a tuple; None for None."""
    if value is None:
        return None
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    ids = tuple(value) if is_list else ()
    if not is_list or not all(map(_is_id, ids)):
        raise SpecJAXError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(map(int, ids))


def _is_id(value: Any) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and 0 <= value <= INT32_MAX


def _biases(value: Any) -> dict[int, float] | None:
    """Returns the biases within the limits; None for None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise SpecJAXError(f"logit_bias must map token ids to numbers, got {value!r}")
    biases = {}
    for key, bias in value.items():
        token = _id_of_key(key)
        if not _is_id(token):
            raise SpecJAXError(f"logit_bias must map token ids to numbers, got the id {key!r}")
        if token in biases:
            raise SpecJAXError(f"logit_bias must have each token id once, got {token} twice")
        is_number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if not is_number or bias != bias:
            raise SpecJAXError(
                f"logit_bias must map token ids to numbers, got {bias!r} for token {token}"
            )
        biases[token] = float(min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS))
    return biases


def _id_of_key(key: Any) -> Any:
    """Returns the integer that a key is, or has the digits of; anything else as it is."""
    has_digits = isinstance(key, str) and DIGITS.fullmatch(key)
    return int(key) if has_digits or _is_id(key) else key


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of bad words, each at the beginning of a text and behind a space.

    Both are forbidden where they differ. The second form is left out where it is the first one
    behind another token, and therefore forbidden with it.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stripped = word.lstrip() or word
        ids = tuple(tokenizer.encode(stripped, add_special_tokens=False))
        spaced_ids = tuple(tokenizer.encode(f" {stripped}", add_special_tokens=False))
        found[ids] = None
        if spaced_ids[-len(ids) :] != ids:
            found[spaced_ids] = None
    found.pop((), None)
    return tuple(found)


def sampler_seed(seed: int) -> int:
    """Returns the seed of the sampler, below 2**32, for any integer.

    Seeds that are in this range stay as they are; others are hashed.
    """
    if 0 <= seed < 2**32:
        return seed
    digest = hashlib.sha256(seed.to_bytes(16, "little", signed=True)).digest()
    return int.from_bytes(digest[:4], "little")


def fresh_seed() -> int:
    """Returns a seed that nobody can predict, below 2**32."""
    return secrets.randbits(32)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at a position.

    Attributes:
      logprob: natural logarithm of the model's probability, before penalties, temperature and
        filters.
      rank: 1 for the most likely token.
      decoded_token: its text; None without tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion of a request, finished or not.

    Attributes:
      index: its number among the `n` completions.
      text: text of the output; the new part with `RequestOutputKind.DELTA`.
      token_ids: ids of the output, including the stop token; the new ones with `DELTA`.
      cumulative_logprob: sum of the log-probabilities of the tokens; None if not asked for.
      logprobs: for each token the log-probabilities by id; None if not asked for.
      finish_reason: "stop", "length", "abort" or "error" (the model's logits were NaN); None while
        it is not finished.
      stop_reason: the stop string or the id of `stop_token_ids` that ended it; None otherwise,
        also for an end-of-sequence token of the model.
      seed: the seed that reproduces it.
      drafted: number of drafts that the target verified, per round.
      accepted: number of accepted drafts that were emitted, per round.
      emitted: number of emitted tokens, per round.
      unusable_drafts: drafts sampled from logits that were NaN, or all -inf. They cost time and do
        not change the output's distribution.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    seed: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    unusable_drafts: int = 0

    @property
    def from_draft(self) -> list[bool]:
        """Whether each of `token_ids` was an accepted draft, not a token of the target."""
        flags = from_draft(self.accepted, self.emitted)
        return flags[len(flags) - len(self.token_ids) :]  # with DELTA, rounds are those so far

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times and counts of a request.

    Times are seconds of `time.monotonic`; None for what has not happened yet.

    Attributes:
      arrival_time: when it was submitted.
      first_scheduled_time: when its first completion was given a row.
      first_token_time: when the host knew the first token.
      finished_time: when its last completion ended.
      num_preemptions: how often its completions lost their pages to others and were recomputed.
      num_completions: of the request.
      num_generation_tokens: tokens of all of its completions.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_completions: int = 1
    num_generation_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's completions, finished or not.

    Attributes:
      request_id: its id.
      prompt: text of the prompt; None if it was given as token ids.
      prompt_token_ids: ids of the prompt.
      prompt_logprobs: for each token of the prompt the log-probabilities by id, None for the first
        token; None if not asked for.
      outputs: its `n` completions.
      finished: whether all of them are finished.
      metrics: times.
      num_cached_tokens: tokens of the prompt that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text
