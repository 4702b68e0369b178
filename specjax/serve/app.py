"""The routes of the HTTP server. They check, ask the engine, and let `answers` build the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

import specjax
from specjax.engine.request import RequestOutput
from specjax.errors import SpecJAXError
from specjax.serve import answers, middleware, protocol, stream
from specjax.serve.answers import ChatAnswer, CompletionAnswer
from specjax.serve.async_engine import AsyncEngine, Prompt, QueueFull, State, Stream, Unavailable
from specjax.serve.metrics import ServerMetrics
from specjax.serve.middleware import error_response
from specjax.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Error,
    RequestError,
    TokenizeRequest,
)

logger = logging.getLogger("specjax.serve")

PAGE = pathlib.Path(__file__).parent / "static" / "index.html"
# The page loads nothing, and talks to this server alone.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
MAX_BODY_BYTES = 8 * 2**20
MAX_ERRORS = 10  # of a body, that an answer lists
RETRY_SECONDS = 1
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNUSABLE_LOGITS = "the model's logits are NaN or all -inf; its weights are damaged"
KINDS = {404: "NotFoundError", 405: "MethodNotAllowedError", 500: "InternalServerError"}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": protocol.ErrorAnswer, "description": text}
    for code, text in {
        400: "The request cannot be used.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        429: "Too many requests wait; see the header Retry-After.",
        503: "The model is loading, or the server is shutting down.",
    }.items()
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the server answers.

    Attributes:
      model_names: names of the model for clients; answers have the first one.
      api_keys: keys that clients may use; none for an open server.
      max_body_bytes: the largest body of a request.
      shows_cached_tokens: whether usage tells how much of the prompt the prefix cache had.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    shows_cached_tokens: bool = False


def make_app(engine: AsyncEngine, settings: Settings) -> Callable:
    """Returns the ASGI application of a server."""
    api = _Api(engine, settings)
    app = FastAPI(
        title="SpecJAX",
        version=specjax.__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    shapes: dict[str, Any] = {"response_model": None}
    app.get("/", include_in_schema=False)(api.page)
    app.get("/health", responses={200: {"description": "Requests are taken."}})(api.health)
    app.get("/metrics", response_class=Response)(api.metrics)
    app.get("/version", response_model=dict[str, str])(api.version)
    app.get("/v1/models", response_model=protocol.ModelList)(api.models)
    app.get("/v1/models/{name:path}", response_model=protocol.ModelCard)(api.model)
    app.post("/v1/completions", **shapes, responses=_ok(protocol.Completion))(api.completions)
    app.post("/v1/chat/completions", **shapes, responses=_ok(protocol.ChatCompletion))(api.chat)
    app.post("/tokenize", response_model=protocol.TokenizeAnswer)(api.tokenize)
    app.post("/detokenize", response_model=protocol.DetokenizeAnswer)(api.detokenize)
    for error, handler in {
        RequestValidationError: api.on_invalid_body,
        RequestError: api.on_request_error,
        SpecJAXError: api.on_engine_error,
        QueueFull: api.on_queue_full,
        Unavailable: api.on_unavailable,
        HTTPException: api.on_http_error,
        stream.ClientGone: api.on_client_gone,
        UnusableLogits: api.on_unusable_logits,
        Exception: api.on_unknown_error,
    }.items():
        app.add_exception_handler(error, handler)
    app.add_middleware(middleware.LimitBody, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(middleware.RequireKey, keys=settings.api_keys)
    return app


def _ok(shape: type) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": shape, "description": "The answer; with stream=true, its chunks."}}


class _Api:
    """Handlers of routes and of errors."""

    def __init__(self, engine: AsyncEngine, settings: Settings):
        self._engine, self._settings = engine, settings
        self._metrics = ServerMetrics(settings.model_names[0], lambda: engine.stats)
        engine.observe = self._metrics.observe
        self._created = int(time.time())

    # --- What the server says of itself -----------------------------------------------------------

    async def page(self) -> Response:
        """A page to chat with the model."""
        return FileResponse(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    async def health(self) -> Response:
        """Whether requests are taken. Never waits for the engine."""
        self._engine.check_available()
        return Response(status_code=200)

    async def metrics(self) -> Response:
        """Counts and times, for Prometheus."""
        return Response(self._metrics.render(), media_type=METRICS_TYPE)

    async def version(self) -> dict[str, str]:
        """The version of SpecJAX."""
        return {"version": specjax.__version__}

    async def models(self) -> protocol.ModelList:
        """The names of the model."""
        self._engine.check_available()
        return protocol.ModelList(data=[self._card(name) for name in self._settings.model_names])

    async def model(self, name: str) -> protocol.ModelCard:
        """One of these names."""
        self._engine.check_available()
        self._check_model(name)
        return self._card(name)

    def _card(self, name: str) -> protocol.ModelCard:
        return protocol.ModelCard(
            id=name,
            created=self._created,
            root=self._settings.model_names[0],
            max_model_len=self._engine.llm.engine.max_model_len,
        )

    def _check_model(self, name: str | None) -> None:
        if name and name not in self._settings.model_names:
            detail = f"the model {protocol.shown(name)} does not exist"
            raise HTTPException(404, detail)

    # --- Text -------------------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        adds_special = body.add_special_tokens is not False
        return await self._answer(
            CompletionAnswer,
            body,
            request,
            [lambda each=each: self._engine.encode(each, adds_special) for each in body.prompts],
        )

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers the messages of a chat."""
        return await self._answer(ChatAnswer, body, request, [lambda: self._encode_chat(body)])

    def _encode_chat(self, body: ChatRequest | TokenizeRequest) -> Prompt:
        # Who continues a message wants no new one; both are an error in the tokenizer.
        return self._engine.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )

    async def _answer(
        self,
        kind: type[CompletionAnswer | ChatAnswer],
        body: CompletionRequest | ChatRequest,
        request: Request,
        encoders: Sequence[Callable[[], Prompt]],
    ) -> Response:
        """Generates text for some prompts, which `encoders` return."""
        engine = self._engine
        engine.check_available()
        self._check_model(body.model)
        protocol.check_supported(body)
        params = body.sampling_params(engine.llm.generation_config, engine.llm.max_logprobs)
        salt = request.scope.get(middleware.SALT, b"") + (body.cache_salt or "").encode()
        outputs = engine.open(len(encoders) * params.n)
        try:
            prompts = await asyncio.to_thread(_encode_all, encoders, body.truncate_prompt_tokens)
            await outputs.submit(prompts, params, salt)
            answer = kind(
                body,
                prompts,
                engine,
                self._settings.model_names[0],
                shows_cached=self._settings.shows_cached_tokens,
            )
            if not body.stream:
                return await stream.until_client_leaves(request.receive, _full(outputs, answer))
        except BaseException:
            outputs.close()
            raise
        return stream.EventStream(self._events(outputs, answer, body), outputs.close)

    async def _events(
        self,
        outputs: Stream,
        answer: CompletionAnswer | ChatAnswer,
        body: CompletionRequest | ChatRequest,
    ) -> AsyncIterator[bytes]:
        """Yields the events of a stream. After the first one an error is an event too."""
        try:
            async for prompt, output in outputs:
                for chunk in answer.chunks(prompt, output):
                    yield answers.event(chunk)
                _check_logits(output)
            if body.includes_usage:
                yield answers.event(answer.last_chunk())
        except Exception as error:
            if not isinstance(error, Unavailable | UnusableLogits):
                logger.exception("a stream has failed")
                error = RuntimeError("the server has failed")
            code = 503 if isinstance(error, Unavailable) else 500
            shape = Error(message=str(error), type=KINDS[500], code=code)
            yield b"data: " + answers.error_json(shape) + b"\n\n"
        yield answers.DONE

    # --- Tokens -----------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest) -> protocol.TokenizeAnswer:
        """Returns the tokens of a text or of a chat."""
        self._engine.check_available()
        self._check_model(body.model)
        return await asyncio.to_thread(self._tokenize, body)

    def _tokenize(self, body: TokenizeRequest) -> protocol.TokenizeAnswer:
        if body.messages is not None:
            ids = self._encode_chat(body).ids
        elif body.prompt:
            ids = self._engine.encode(body.prompt, body.add_special_tokens is not False).ids
        else:
            ids = ()
        answer = protocol.TokenizeAnswer(
            count=len(ids),
            max_model_len=self._engine.llm.engine.max_model_len,
            tokens=list(ids),
        )
        if body.return_token_strs:
            answer.token_strs = [self._engine.token_text(token_id) for token_id in ids]
        return answer

    async def detokenize(self, body: DetokenizeRequest) -> protocol.DetokenizeAnswer:
        """Returns the text of tokens."""
        self._engine.check_available()
        self._check_model(body.model)
        text = await asyncio.to_thread(self._engine.decode, body.tokens)
        return protocol.DetokenizeAnswer(prompt=text)

    # --- Errors -----------------------------------------------------------------------------------

    async def on_invalid_body(self, request: Request, error: RequestValidationError) -> Response:
        """Answers a body that does not have the shape of a request."""
        found, param = [], None
        for each in error.errors()[:MAX_ERRORS]:
            if each["type"] == "json_invalid":
                found.append(f"the body is not valid JSON: {each['ctx']['error']}")
                continue
            field = ".".join(str(part) for part in each["loc"] if part != "body")
            field = field[: protocol.MAX_SHOWN]
            param = param or (field.partition(".")[0] or None)
            text = f"{field}: {each['msg']}" if field else each["msg"]
            if each.get("input") is not None and each["type"] != "missing":
                text += f", got {protocol.shown(each['input'])}"
            found.append(text)
        return error_response(400, "BadRequestError", "; ".join(found), param)

    async def on_request_error(self, request: Request, error: RequestError) -> Response:
        """Answers a request that says what cannot be done."""
        return error_response(400, "BadRequestError", error.message, error.param)

    async def on_engine_error(self, request: Request, error: SpecJAXError) -> Response:
        """Answers a request that the engine refuses."""
        found = protocol.error_of_parameter(error)
        message = self._engine.without_paths(found.message, self._settings.model_names[0])
        return error_response(400, "BadRequestError", message, found.param)

    async def on_queue_full(self, request: Request, error: QueueFull) -> Response:
        """Answers a request for which there is no room."""
        self._metrics.reject("queue_full")
        headers = {"Retry-After": str(RETRY_SECONDS)}
        return error_response(429, "RateLimitError", str(error), headers=headers)

    async def on_unavailable(self, request: Request, error: Unavailable) -> Response:
        """Answers a request while none is taken."""
        is_dead = self._engine.state is State.DEAD
        headers = {} if is_dead else {"Retry-After": str(RETRY_SECONDS)}
        return error_response(503, "ServiceUnavailableError", str(error), headers=headers)

    async def on_http_error(self, request: Request, error: HTTPException) -> Response:
        """Answers what routing refuses."""
        kind = KINDS.get(error.status_code, "BadRequestError")
        return error_response(error.status_code, kind, str(error.detail), headers=error.headers)

    async def on_client_gone(self, request: Request, error: stream.ClientGone) -> Response:
        """Answers nobody."""
        return Response(status_code=499)

    async def on_unknown_error(self, request: Request, error: Exception) -> Response:
        """Answers where the server is at fault; the log has the reason."""
        return error_response(500, KINDS[500], "the server has failed")

    async def on_unusable_logits(self, request: Request, error: UnusableLogits) -> Response:
        """Answers where the model is at fault."""
        return error_response(500, KINDS[500], str(error))


class UnusableLogits(Exception):
    """The model's logits are NaN."""


def _check_logits(output: RequestOutput) -> None:
    if any(part.finish_reason == "error" for part in output.outputs):
        raise UnusableLogits(UNUSABLE_LOGITS)


def _encode_all(encoders: Sequence[Callable[[], Prompt]], most: int | None) -> list[Prompt]:
    """Returns the prompts; of each the last `most` tokens."""
    if most is not None and most < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, got {protocol.shown(most)}",
            "truncate_prompt_tokens",
        )
    prompts = [encode() for encode in encoders]
    if most is None:
        return prompts
    return [prompt._replace(ids=prompt.ids[-most:]) for prompt in prompts]


async def _full(outputs: Stream, answer: CompletionAnswer | ChatAnswer) -> Response:
    """Returns the whole answer once everything is generated."""
    found: dict[int, RequestOutput] = {}
    async for prompt, output in outputs:
        _check_logits(output)
        found[prompt] = output

    def build() -> str:
        return answer.full([found[prompt] for prompt in range(len(found))]).model_dump_json()

    # Log-probabilities of a long text take time.
    return Response(await asyncio.to_thread(build), media_type="application/json")
