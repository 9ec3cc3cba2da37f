"""The outermost ASGI layer: request ids, keys, header limits, and the last word on exceptions."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fineinfer.request import InvalidRequestError
from fineinfer.server.engine_client import EngineUnavailableError
from fineinfer.server.errors import ApiError, engine_unavailable, to_api_error
from fineinfer.server.metrics import ServerMetrics

logger = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/health", "/ping"})
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 << 10
OWNER_CHARS = 16  # 64 bits: keys are few, and the key itself is nowhere stored
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """Wraps every request, known route or not.

    Args:
        app: The application.
        api_keys: Accepted keys; without any, no key is asked for.
        metrics: Counts answers.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], metrics: ServerMetrics) -> None:
        self._app = app
        self._key_hashes = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = _Answer(send, _request_id(headers))
        start_s = time.perf_counter()
        try:
            self._check(scope, headers)
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            answer.status = 499  # nobody reads it; for the statistics
        except EngineUnavailableError as error:
            await answer.send_error(engine_unavailable(str(error)), scope, receive)
        except (ApiError, InvalidRequestError) as error:
            await answer.send_error(to_api_error(error), scope, receive)
        except Exception as error:
            logger.exception("request %s failed", answer.request_id)
            if answer.status is not None:
                raise  # too late for an answer; the connection is closed
            await answer.send_error(to_api_error(error), scope, receive)
        finally:
            route: Any = scope.get("route")
            handler = getattr(route, "path", "none")
            self._metrics.on_http(handler, scope["method"], answer.status or 499, time.perf_counter() - start_s)

    def _check(self, scope: Scope, headers: Headers) -> None:
        raw = headers.raw
        if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
            raise ApiError(431, "The request has too many or too large headers.")
        if self._key_hashes and scope["path"] not in OPEN_PATHS:
            owner = self._owner(headers)
            if owner is None:
                error = ApiError(401, "A valid API key is needed: Authorization: Bearer KEY.", code="invalid_api_key")
                error.headers["www-authenticate"] = "Bearer"
                raise error
            scope.setdefault("state", {})["owner"] = owner

    def _owner(self, headers: Headers) -> str | None:
        """Short hash of the key that was given, or None if it is not one of ours."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # all are compared whatever matches, so that the time tells nothing
        matches = [hmac.compare_digest(given, known) for known in self._key_hashes]
        return given.hex()[:OWNER_CHARS] if scheme.lower() == "bearer" and any(matches) else None


def owner_of(scope: Scope) -> str:
    """Who asks: a short SHA-256 of the API key of this request, empty on a server without keys."""
    return str(scope.get("state", {}).get("owner", ""))


class _Answer:
    """The way out: puts the request id on whatever leaves and remembers whether anything has."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)

    async def send_error(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if self.status is None:
            await error.response()(scope, receive, self.send)


def _request_id(headers: Headers) -> str:
    """The client's id if it is harmless, else a new one; inside the server it is never used as a key."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
