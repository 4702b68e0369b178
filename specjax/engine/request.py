"""Inputs and outputs of `specjax.generate` for each prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
      finish_reason: "stop" (an end-of-sequence token) or "length" (`max_new_tokens`, or the context
        of the model is full).
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
