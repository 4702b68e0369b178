"""What every request passes before its route: the API key, and the size of the body.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide that a client has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.responses import Response

from specjax.serve import answers
from specjax.serve.protocol import Error

OPEN_PATHS = ("/", "/health")  # need no key
SALT = "specjax.salt"  # key of a scope: prompts with other salts share no cache
BODY_SECONDS = 60.0  # in which the body must have come
MAX_DISCARDED = 64 * 2**20  # bytes of a body that is too large


def error_response(
    status: int, kind: str, message: str, param: str | None = None, headers=None
) -> Response:
    """Returns an answer in the shape of all errors.

    Args:
      status: of HTTP, and the code of the error.
      kind: its type.
      message: why.
      param: the field at fault.
      headers: of the answer.
    """
    error = Error(message=message, type=kind, param=param, code=status)
    body = answers.error_json(error)
    return Response(body, status, headers=headers, media_type="application/json")


class RequireKey:
    """Answers 401 unless the request has one of the keys.

    Digests are compared, in constant time. With several keys, each has a prefix cache of its own.
    """

    def __init__(self, app: Callable, keys: Sequence[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope, receive, send) -> None:
        """Handles a connection."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        digest = hashlib.sha256(_bearer(scope["headers"])).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        if not any(matches):
            response = error_response(
                401,
                "AuthenticationError",
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)
            return
        salt = digest if len(self._digests) > 1 else b""
        await self._app({**scope, SALT: salt}, receive, send)


def _bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return b""


class LimitBody:
    """Reads the body before the route runs; answers 400 where it is too large or too slow."""

    def __init__(self, app: Callable, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope, receive, send) -> None:
        """Handles a connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(receive)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:g} seconds"
            await error_response(400, "BadRequestError", message)(scope, receive, send)
            return
        if body is None:
            message = f"the body must have at most {self._max_bytes} bytes"
            await error_response(400, "BadRequestError", message)(scope, receive, send)
            return
        await self._app(scope, _Replay(body, receive), send)

    async def _read(self, receive) -> bytes | None:
        """Returns the body; None if it is too large.

        Such a body is read to its end, within reason: clients that are still sending it would not
        see the answer.
        """
        parts, size = [], 0
        while size <= MAX_DISCARDED:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_bytes:
                parts.append(part)
            if not message.get("more_body", False):
                break
        return b"".join(parts) if size <= self._max_bytes else None


class _Replay:
    """`receive` of a connection whose body has been read."""

    def __init__(self, body: bytes, receive):
        self._body, self._receive = body, receive

    async def __call__(self) -> dict:
        """Returns the body, then what comes behind it: that the client leaves."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
