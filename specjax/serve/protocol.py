"""The shapes of requests and answers: OpenAI's, with the further fields that vLLM has.

Fields that are known and not supported are refused by name (`UNSUPPORTED`). Unknown ones are
ignored, and logged.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specjax.engine.request import RequestOutputKind, SamplingParams
from specjax.errors import SpecJAXError

logger = logging.getLogger("specjax.serve")

MAX_N = 128  # completions of a prompt
MAX_PROMPTS = 1024  # of a request
MAX_STOP_STRINGS = 4
MAX_SHOWN = 200  # characters of an input in an error
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it

# Fields that are not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None,),
    "tool_choice": (None,),
    "functions": (None,),
    "function_call": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
    "documents": (None,),
    "chat_template": (None,),
    "mm_processor_kwargs": (None,),
    "prompt_embeds": (None,),
    "logits_processors": (None, []),
    "priority": (None, 0),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None,),
}

Ids = Annotated[list[int], Field(fail_fast=True)]
# Request fields that are parameters of `SamplingParams` with the same name and meaning.
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
)


class RequestError(Exception):
    """A request that cannot be answered.

    Attributes:
      message: why.
      param: the field at fault; None for none.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.message, self.param = message, param


# --- Requests -------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    """What a stream has besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Request(BaseModel):
    """Fields that both ways of generating text have."""

    model_config = ConfigDict(extra="allow")
    logprobs_field: ClassVar[str] = "logprobs"  # how many of the most likely tokens

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    return_speculation: bool | None = Field(
        False, description="Report which parts of the text were accepted drafts."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can be set only with stream=true")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return bool(self.includes_usage and options.continuous_usage_stats)

    def make_id(self, prefix: str) -> str:
        """Returns the id of the answer."""
        return f"{prefix}-{self.request_id or uuid.uuid4().hex}"

    def _sampling_params(
        self, defaults: Mapping[str, Any], max_logprobs: int, values: dict[str, Any]
    ) -> SamplingParams:
        """Returns the parameters: those of the request, before those of the model.

        Args:
          defaults: of the model.
          max_logprobs: the most of `logprobs`.
          values: parameters that the endpoints have in ways of their own.

        Raises:
          RequestError: for a value that is not allowed.
        """
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            count = len(self.stop)
            raise RequestError(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {count}", "stop"
            )
        if self.n is not None and self.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, got {shown(self.n)}", "n")
        params = dict(defaults)
        for name in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                params[name] = value
        params |= values
        for name in ("logprobs", "prompt_logprobs"):
            value = params.get(name)
            if value is not None and value > max_logprobs:
                field = self.logprobs_field if name == "logprobs" else name
                raise RequestError(
                    f"{field} must be at most {max_logprobs}, got {shown(value)}", field
                )
        # What is not streamed comes in one piece.
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**params, output_kind=kind)


class CompletionRequest(_Request):
    """The body of /v1/completions."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, also where there is only one."""
        is_single = isinstance(self.prompt, str) or (
            len(self.prompt) > 0 and isinstance(self.prompt[0], int)
        )
        prompts = [self.prompt] if is_single else list(self.prompt)
        if not prompts:
            raise RequestError("prompt must have at least one prompt, got none", "prompt")
        return prompts

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, defaults: Mapping[str, Any], max_logprobs: int) -> SamplingParams:
        """Returns how the completions are generated; see `_sampling_params`."""
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
        # The engine generates one token at least, which the answer leaves out.
        values = {"max_tokens": 1 if self.only_echoes else max_tokens, "logprobs": self.logprobs}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            values["prompt_logprobs"] = self.logprobs
        return self._sampling_params(defaults, max_logprobs, values)


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    logprobs_field: ClassVar[str] = "top_logprobs"

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_special_tokens: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = False

    def sampling_params(self, defaults: Mapping[str, Any], max_logprobs: int) -> SamplingParams:
        """Returns how the answers are generated; see `_sampling_params`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", "top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(
                f"top_logprobs must be at least 0, got {shown(self.top_logprobs)}", "top_logprobs"
            )
        wishes = (self.max_completion_tokens, self.max_tokens, defaults.get("max_tokens"))
        values = {
            "max_tokens": next((wish for wish in wishes if wish is not None), None),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        return self._sampling_params(defaults, max_logprobs, values)


class TokenizeRequest(BaseModel):
    """The body of /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one(self):
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be given")
        return self


class DetokenizeRequest(BaseModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids


def check_supported(body: _Request) -> None:
    """Checks the fields that a request has beyond those of its shape.

    Raises:
      RequestError: for a known one that is not supported.
    """
    unknown = []
    extra = body.model_extra or {}
    tools_are_off = extra.get("tool_choice") == "none" and extra.get("tools")
    for name, value in extra.items():
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif name in ("tools", "tool_choice") and tools_are_off:
            continue
        elif value not in UNSUPPORTED[name]:
            raise RequestError(f"{name} is not supported, got {shown(value)}", name)
    if unknown:
        names = shown(", ".join(unknown))
        logger.info("ignored unknown fields of a request: %s", names)


def shown(value: Any) -> str:
    """Returns an input as an error shows it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


# --- Answers --------------------------------------------------------------------------------------

# A field that is left out of the JSON where it is None; others are null there.
Absent: Any = Field(None, exclude_if=lambda value: value is None)


class PromptTokensDetails(BaseModel):
    """How a prompt was read."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = Absent


class Piece(BaseModel):
    """A part of a text. Those of an output, joined, are its text without stop strings."""

    text: str
    is_draft: bool = Field(description="Whether its tokens were accepted drafts.")


class Speculation(BaseModel):
    """What drafts did for a completion: the pieces of this chunk, and counts so far."""

    pieces: list[Piece]
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int


class PromptLogprob(BaseModel):
    """The log-probability of a token of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class _Choice(BaseModel):
    """Fields that every choice may have."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = Absent
    prompt_token_ids: list[int] | None = Absent
    speculation: Speculation | None = Absent


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion: an element for each token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(_Choice):
    """One completion of a prompt, or what a chunk of a stream adds to it."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = Absent


class Completion(BaseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = Absent


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The log-probability of a token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer: an element for each token."""

    content: list[TokenLogprob] | None


class ChatMessage(BaseModel):
    """A message of the model."""

    role: str
    content: str


class ChatChoice(_Choice):
    """One answer to a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = Absent
    prompt_logprobs: PromptLogprobs | None = Absent
    prompt_token_ids: list[int] | None = Absent


class ChatDelta(BaseModel):
    """What a chunk adds to a message."""

    role: str | None = Absent
    content: str | None = Absent


class ChatChunkChoice(_Choice):
    """What a chunk adds to an answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatChunk(BaseModel):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Absent


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specjax"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Absent


class DetokenizeAnswer(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class Error(BaseModel):
    """Why a request failed."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: Error


def error_of_parameter(error: SpecJAXError) -> RequestError:
    """Returns the error of a request for one of the engine, which begins with the field's name."""
    message = str(error)
    word = message.partition(" ")[0]
    if len(message) > 3 * MAX_SHOWN:
        message = message[: 3 * MAX_SHOWN] + "..."
    param = {"messages": "messages", "messages:": "messages", "the": "prompt"}.get(word)
    is_field = word in SamplingParams.__dataclass_fields__
    return RequestError(message, word if is_field else param)
