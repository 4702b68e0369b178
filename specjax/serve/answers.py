"""From outputs of the engine to answers in OpenAI's shapes: the one place that builds them.

An answer object belongs to one HTTP request. Its choices are numbered prompt after prompt. For a
stream `chunks` makes what an output adds; else `full` makes everything from the final outputs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from specjax.engine.request import CompletionOutput, Logprob, RequestOutput
from specjax.serve import protocol
from specjax.serve.async_engine import AsyncEngine, Prompt
from specjax.serve.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Piece,
    PromptTokensDetails,
    Speculation,
    TokenLogprob,
    TopLogprob,
    Usage,
)

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
DONE = b"data: [DONE]\n\n"


def event(shape: Any) -> bytes:
    """Returns a shape as an event of a stream."""
    return f"data: {shape.model_dump_json()}\n\n".encode()


def error_json(error: protocol.Error) -> bytes:
    """Returns the body of an error. What it shows of the input need not be valid Unicode."""
    return json.dumps(protocol.ErrorAnswer(error=error).model_dump()).encode()


class _Answer:
    """What answers of both endpoints have in common."""

    def __init__(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        engine: AsyncEngine,
        model: str,
        *,
        shows_cached: bool = False,
    ):
        """Makes the answer to a request.

        Args:
          body: the request.
          prompts: as they were submitted.
          engine: for texts of tokens.
          model: its name for clients.
          shows_cached: whether usage tells what the prefix cache had.
        """
        self._body, self._prompts, self._engine = body, prompts, engine
        self._n = body.n or 1
        self._head = {"created": int(time.time()), "model": model}
        self._shows_cached = shows_cached
        self._num_tokens = 0  # of all choices
        self._num_cached: dict[int, int] = {}  # by prompt
        self._begun: set[int] = set()  # choices with a chunk
        self._ended: set[int] = set()  # choices with their last chunk
        self._decoders: dict[int, Any] = {}  # for pieces of choices

    def _choice_index(self, prompt: int, output: CompletionOutput) -> int:
        return prompt * self._n + output.index

    def _count(self, prompt: int, output: RequestOutput, is_hidden: bool = False) -> None:
        self._num_cached[prompt] = output.num_cached_tokens
        if not is_hidden:
            self._num_tokens += sum(len(part.token_ids) for part in output.outputs)

    def usage(self) -> Usage:
        """Returns the usage so far."""
        num_prompt = sum(len(prompt.ids) for prompt in self._prompts)
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt + self._num_tokens,
        )
        if self._shows_cached:
            num_cached = sum(self._num_cached.values())
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=num_cached)
        return usage

    def _extras(self, prompt: int, choice: int, output: CompletionOutput) -> dict[str, Any]:
        """Returns the fields of a choice that are there for who asks for them, and the last ones.

        Called once for each part of a choice.
        """
        fields: dict[str, Any] = {
            "index": choice,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if output.finish_reason:
            self._ended.add(choice)
        if self._body.return_token_ids:
            fields["token_ids"] = list(output.token_ids)
            if choice not in self._begun:
                fields["prompt_token_ids"] = list(self._prompts[prompt].ids)
        if self._body.return_speculation:
            fields["speculation"] = self._speculation(prompt, choice, output)
        return fields

    def _speculation(self, prompt: int, choice: int, output: CompletionOutput) -> Speculation:
        if choice not in self._decoders:
            self._decoders[choice] = self._engine.decoder(self._prompts[prompt])
        decoder, pieces = self._decoders[choice], []
        for token_id, is_draft in zip(output.token_ids, output.from_draft, strict=True):
            text = decoder.push([token_id]) if decoder else ""
            if pieces and pieces[-1].is_draft == is_draft:
                pieces[-1].text += text
            elif text:
                pieces.append(Piece(text=text, is_draft=is_draft))
        return Speculation(
            pieces=pieces,
            num_rounds=len(output.emitted),
            num_draft_tokens=sum(output.drafted),
            num_accepted_tokens=sum(output.accepted),
        )

    def _token(self, token_id: int, entry: Logprob | None) -> str:
        """Returns a token as log-probabilities name it."""
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        text = entry.decoded_token if entry else None
        return self._engine.token_text(token_id) if text is None else text

    def _is_empty(self, choice: int, output: CompletionOutput) -> bool:
        """Whether a stream needs no chunk: another choice has changed, or text is held back."""
        if choice in self._ended:
            return True
        shows_tokens = self._body.return_token_ids or self._body.return_speculation
        has_tokens = bool(output.token_ids) and (shows_tokens or output.logprobs is not None)
        return not (output.text or output.finish_reason or has_tokens)


class CompletionAnswer(_Answer):
    """The answer of /v1/completions."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._head["id"] = self._body.make_id("cmpl")
        self._offsets: dict[int, int] = {}  # characters of the tokens of a choice so far

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[Completion]:
        """Yields what an output adds to a stream."""
        self._count(prompt, output, self._body.only_echoes)
        for part in output.outputs:
            choice = self._choice_index(prompt, part)
            is_echo = self._body.echo and choice not in self._begun
            if self._is_empty(choice, part) and not is_echo:
                continue
            chunk = Completion(**self._head, choices=[self._choice(prompt, output, part)])
            if self._body.has_continuous_usage:
                chunk.usage = self.usage()
            yield chunk

    def full(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Returns the answer, from the final output of each prompt."""
        choices = []
        for prompt, output in enumerate(outputs):
            self._count(prompt, output, self._body.only_echoes)
            for part in output.outputs:
                choices.append(self._choice(prompt, output, part))
        return Completion(**self._head, choices=choices, usage=self.usage())

    def last_chunk(self) -> Completion:
        """Returns the chunk of a stream that has its usage."""
        return Completion(**self._head, choices=[], usage=self.usage())

    def _choice(
        self, prompt: int, output: RequestOutput, part: CompletionOutput
    ) -> CompletionChoice:
        body, choice = self._body, self._choice_index(prompt, part)
        is_first = choice not in self._begun
        if body.only_echoes:
            part = CompletionOutput(part.index, "", (), finish_reason="length")
        fields = self._extras(prompt, choice, part)
        text, ids, entries = part.text, list(part.token_ids), list(part.logprobs or ())
        if is_first and body.echo:
            text = self._echo(self._prompts[prompt]) + text
            if body.logprobs is not None:
                ids = [*self._prompts[prompt].ids, *ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
        if body.logprobs is not None:
            fields["logprobs"] = self._logprobs(choice, ids, entries)
        if body.prompt_logprobs is not None and not body.stream:
            fields["prompt_logprobs"] = _prompt_logprobs(output)
        self._begun.add(choice)
        return CompletionChoice(text=text, **fields)

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._engine.decode(prompt.ids)

    def _logprobs(
        self, choice: int, ids: list[int], entries: list[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        result = CompletionLogprobs()
        offset = self._offsets.get(choice, 0)
        for token_id, entry in zip(ids, entries, strict=True):
            own = entry[token_id] if entry else None
            token = self._token(token_id, own)
            top = None
            if entry:
                top = {self._token(key, each): _finite(each) for key, each in entry.items()}
            result.tokens.append(token)
            result.token_logprobs.append(_finite(own) if own else None)
            result.top_logprobs.append(top)
            result.text_offset.append(offset)
            offset += len(token)
        self._offsets[choice] = offset
        return result


class ChatAnswer(_Answer):
    """The answer of /v1/chat/completions."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._head["id"] = self._body.make_id("chatcmpl")

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[ChatChunk]:
        """Yields what an output adds to a stream: for each choice a role first."""
        for part in output.outputs:
            choice = self._choice_index(prompt, part)
            if choice in self._begun:
                continue
            delta = ChatDelta(role="assistant", content="")
            yield self._chunk(ChatChunkChoice(index=choice, delta=delta))
        self._count(prompt, output)
        for part in output.outputs:
            choice = self._choice_index(prompt, part)
            if self._is_empty(choice, part):
                self._begun.add(choice)
                continue
            fields = self._fields(prompt, part)
            yield self._chunk(ChatChunkChoice(delta=ChatDelta(content=part.text), **fields))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        chunk = ChatChunk(**self._head, choices=[choice])
        if self._body.has_continuous_usage:
            chunk.usage = self.usage()
        return chunk

    def full(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """Returns the answer, from the final output of the one prompt."""
        (output,) = outputs
        self._count(0, output)
        choices = []
        for part in output.outputs:
            message = ChatMessage(role="assistant", content=part.text)
            choices.append(ChatChoice(message=message, **self._fields(0, part)))
        answer = ChatCompletion(**self._head, choices=choices, usage=self.usage())
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = _prompt_logprobs(output)
        return answer

    def last_chunk(self) -> ChatChunk:
        """Returns the chunk of a stream that has its usage."""
        return ChatChunk(**self._head, choices=[], usage=self.usage())

    def _fields(self, prompt: int, part: CompletionOutput) -> dict[str, Any]:
        choice = self._choice_index(prompt, part)
        fields = self._extras(prompt, choice, part)
        if self._body.logprobs:
            pairs = zip(part.token_ids, part.logprobs or (), strict=True)
            content = [self._logprob(token_id, entry) for token_id, entry in pairs]
            fields["logprobs"] = ChatLogprobs(content=content)
        self._begun.add(choice)
        return fields

    def _logprob(self, token_id: int, entry: dict[int, Logprob]) -> TokenLogprob:
        num_top = self._body.top_logprobs or 0
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [self._top_logprob(*item) for item in ranked if item[1].rank <= num_top]
        own = self._top_logprob(token_id, entry[token_id])
        return TokenLogprob(**own.model_dump(), top_logprobs=top)

    def _top_logprob(self, token_id: int, entry: Logprob) -> TopLogprob:
        text = entry.decoded_token or ""
        return TopLogprob(
            token=self._token(token_id, entry), logprob=_finite(entry), bytes=list(text.encode())
        )


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST_LOGPROB)


def _prompt_logprobs(output: RequestOutput) -> protocol.PromptLogprobs:
    result: protocol.PromptLogprobs = []
    for entry in output.prompt_logprobs or ():
        if entry is None:
            result.append(None)
            continue
        tokens = {}
        for token_id, each in entry.items():
            tokens[str(token_id)] = protocol.PromptLogprob(
                logprob=_finite(each), rank=each.rank, decoded_token=each.decoded_token
            )
        result.append(tokens)
    return result
