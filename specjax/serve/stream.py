"""Answers of the HTTP server that go on: streams of events, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response

Receive = Callable[[], Awaitable[dict[str, Any]]]


class ClientGone(Exception):
    """The client has closed the connection."""


async def until_client_leaves(receive: Receive, work: Coroutine) -> Any:
    """Returns the result of `work`, which is cancelled when the client leaves.

    Args:
      receive: of the ASGI connection, whose request has been read.
      work: a coroutine.

    Raises:
      ClientGone: the client has left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; `on_end` is called whatever ends the stream.

    Each event is sent when the client's connection takes it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope, receive, send) -> None:
        """Answers a request."""
        try:
            await until_client_leaves(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._on_end()

    async def _send(self, send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
