"""The text of a completion while it grows, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.engine.request import SamplingParams
from specjax.tokenizer import Tokenizer


class TextBuilder:
    """Turns token ids into text as they arrive, and ends the text at a stop string.

    The text and its end are the same however the ids are split into calls of `push`: stop strings
    are looked for after every token. Text that might begin a stop string is held back, and so is an
    incomplete character; text that was returned is never taken back.

    Of several stop strings the one that is complete first ends the text, and of those that are
    complete at the same character the longest one. As in vLLM, no token up to number `min_tokens`
    completes a stop string.

    Attributes:
      text: the text so far, without what is held back. It ends before the stop string, or with it
        if the request says `include_stop_str_in_output`. Always "" without a tokenizer or with
        `detokenize=False`.
      num_tokens: ids that belong to the completion: all up to the one that completed a stop string.
      stop_reason: the stop string that ended the text; None while there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        stop_ids: Sequence[int] = (),
        prompt_ids: Sequence[int] = (),
    ):
        """Makes the text of a new completion.

        Args:
          tokenizer: the model's; None for none.
          params: of the request.
          stop_ids: ids that end a completion. As in vLLM they have no text, unless the request says
            `include_stop_str_in_output`.
          prompt_ids: ids before the completion. With some tokenizers the first token begins with a
            space only behind other ones.
        """
        self.text = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None
        self._includes_stop = params.include_stop_str_in_output
        self._silent_ids = frozenset(() if self._includes_stop else stop_ids)
        self._min_tokens = params.min_tokens
        self._stop = params.stop
        self._most_held = max(map(len, self._stop), default=1) - 1
        self._held = ""  # may begin a stop string
        self._decoder = None
        if tokenizer is not None and params.detokenize:
            self._decoder = tokenizer.stream(params.skip_special_tokens, prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds ids, and returns what they add to `text`. Ids behind a stop string are ignored."""
        start = len(self.text)
        blocks = [[token_id] for token_id in token_ids] if self._stop else [token_ids]
        for block in blocks:
            if self.stop_reason is not None:
                break
            self.num_tokens += len(block)
            if self._decoder is not None:
                spoken_ids = [token_id for token_id in block if token_id not in self._silent_ids]
                self._append(self._decoder.push(spoken_ids))
        return self.text[start:]

    def finish(self) -> str:
        """Ends the completion, and returns the text that might have begun a stop string.

        An incomplete character at the end is left out.
        """
        held, self._held = self._held, ""
        self.text += held
        return held

    def _append(self, piece: str) -> None:
        """Adds decoded text."""
        num_known = len(self.text) + len(self._held)
        text = self.text + self._held + piece
        match = None
        if self.num_tokens > self._min_tokens:
            match = self._first_match(text, num_known)
        if match is None:
            num_safe = len(text) - self._num_held(text)
        else:
            self.stop_reason = match.stop
            text = text[: match.end if self._includes_stop else match.start]
            num_safe = len(text)
        self.text, self._held = text[:num_safe], text[num_safe:]

    def _first_match(self, text: str, num_known: int) -> _Match | None:
        """Returns the first stop string that is complete behind `num_known` characters."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_known - len(stop) + 1))
            if start >= 0:
                matches.append(_Match(start + len(stop), start, stop))
        return min(matches, default=None)

    def _num_held(self, text: str) -> int:
        """Returns how many of the last characters might begin a stop string."""
        if self._includes_stop:  # a stop string is text like any other
            return 0
        for length in range(min(self._most_held, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class _Match(NamedTuple):
    """Where a stop string is in a text. The smallest one ends first, and is the longest."""

    end: int
    start: int
    stop: str
