"""Server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fineinfer.server.errors import ApiError, to_api_error

T = TypeVar("T")
logger = logging.getLogger(__name__)
STALLED_READER_S = 30.0
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each item as ``data: {json}``, an error in the middle as ``data: {"error": ...}``, then ``data: [DONE]``.

    Args:
        items: What to send; closed when the client leaves or reads nothing for 30 s. Bytes go out as they are.
        on_close: Called exactly once at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, items: AsyncGenerator[Any, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._items, self._on_close = items, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client leaves."""
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await _cancel(sending, leaving)
                await self._items.aclose()
            finally:
                self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for item in self._items:
                raw = isinstance(item, bytes)
                await self._send_event(send, item if raw else b"data: " + msgspec.json.encode(item) + b"\n\n")
        except (TimeoutError, OSError):
            return  # the reader is gone or stalled
        except Exception as error:  # the status line is out: the error can only travel in the stream
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
            await self._send_event(send, b"data: " + msgspec.json.encode(to_api_error(error).body()) + b"\n\n")
        await self._send_event(send, _DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(STALLED_READER_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled when the client leaves; the request's body must have been read.

    Raises:
        ClientDisconnect: The client left first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _cancel(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
