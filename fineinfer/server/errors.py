"""The one error shape of the HTTP interface: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from fineinfer.messages import RequestOutput
from fineinfer.request import InvalidRequestError

RETRY_AFTER_S = 2
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    507: "server_error",
}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_STATUS_OF_CODE = {
    "model_not_found": 404,
    "adapter_not_found": 404,
    "rate_limit_exceeded": 429,
    "engine_overloaded": 503,
    "server_error": 500,
}


class ApiError(Exception):
    """An answer that is an error; raise it anywhere inside a route.

    Args:
        status: HTTP status.
        message: One sentence for the user; never a path of the server, a prompt or a traceback.
        param: Request field that is wrong, as a path (``messages[0].content``), or None.
        code: String code, for example ``model_not_found``.
        retry_after_s: Adds ``Retry-After``.
        should_retry: False adds ``x-should-retry: false``, which stops the SDK's retries (of 409 above all).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_request_error",
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)
        if should_retry is False or (should_retry is None and status == 409):
            self.headers["x-should-retry"] = "false"

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


def model_not_found(model: str) -> ApiError:
    """404 for a model name that is neither the base model nor an adapter."""
    return ApiError(404, f"The model '{model[:200]}' does not exist.", param="model", code="model_not_found")


def unsupported_parameter(param: str, reason: str = "is not supported by this server") -> ApiError:
    """400 for a known field that is not implemented: silence would be misbehaviour."""
    return ApiError(400, f"'{param}' {reason}.", param=param, code="unsupported_parameter")


def engine_unavailable(message: str = "The engine is not available; it is being restarted.") -> ApiError:
    """503 that clients may retry."""
    return ApiError(503, message, code="engine_overloaded", retry_after_s=RETRY_AFTER_S)


def from_output(output: RequestOutput) -> ApiError:
    """The error that a terminal engine output stands for (finish reason ``error`` or an abort nobody asked for)."""
    if output.finish_reason == "abort":
        return engine_unavailable("The request was aborted by the server.")
    code = output.error_code or "server_error"
    status = _STATUS_OF_CODE.get(code, 400)
    retry = RETRY_AFTER_S if status in (429, 503) else None
    message = output.error_message or "The engine could not finish this request."
    return ApiError(status, message, param=output.error_param, code=code, retry_after_s=retry)


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure the error shape: FastAPI's and Starlette's own, ours, and bugs."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    for kind in (ApiError, InvalidRequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_api_error)


def to_api_error(error: Exception) -> ApiError:
    """Any exception -> the error the client sees; what a bug says is for the log, which the caller writes."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(_STATUS_OF_CODE.get(error.code, 400), error.message, param=error.param, code=error.code)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0] if error.errors() else {"loc": (), "msg": "Invalid request"}
        return ApiError(400, f"{first['msg']}.", param=_param_path(first))
    if isinstance(error, HTTPException):
        converted = ApiError(error.status_code, _http_message(error), code=_http_code(error.status_code))
        converted.headers.update(error.headers or {})
        return converted
    return ApiError(500, "The server had an internal error.", code="server_error")


def _param_path(problem: Mapping[str, Any]) -> str | None:
    # the first part of a pydantic location is where it was found: body, query, path
    parts = problem["loc"][1:]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.lstrip(".") or None


def _http_code(status: int) -> str:
    return _HTTP_CODES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _http_message(error: HTTPException) -> str:
    detail = error.detail
    return detail if isinstance(detail, str) else HTTPStatus(error.status_code).phrase
