"""Reads and decodes JSON bodies: bounded in size and depth, every mistake a 400 that names the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import numpy as np
from fastapi import Request

from fineinfer.server.errors import ApiError

T = TypeVar("T")
MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 32
_AT_PATH = re.compile(r" - at `\$?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"`(?P<name>[^`]+)`")
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


async def read_json(request: Request, model: type[T], max_bytes: int = MAX_BODY_BYTES) -> T:
    """The body as a ``model`` struct; unknown fields are dropped.

    Raises:
        ApiError: 413 too large; 400 malformed, too deep, or of a wrong type (``param`` is the path of the field).
    """
    return decode_json(await _read_body(request, max_bytes), model)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def decode_json(body: bytes, model: type[T]) -> T:
    """JSON bytes -> ``model``; raises as ``read_json``."""
    _check_depth(body)
    try:
        body.decode()  # msgspec does not look into the strings of unknown fields
        return msgspec.json.decode(body, type=model)
    except msgspec.ValidationError as error:
        message = str(error)
        raise ApiError(400, f"{_AT_PATH.sub('', message)}.", param=_param(message)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.") from error


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    # whole-array work: a loop or a regular expression over 8 MiB would hold up everybody for seconds
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    in_string = np.cumsum(text == ord('"'), dtype=np.uint8) & 1
    depth = np.cumsum(np.where(in_string, 0, _STEP[text]), dtype=np.int32)
    if depth.max(initial=0) > MAX_DEPTH:
        raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.")


def _param(message: str) -> str | None:
    """Field path of a msgspec message: ``... - at `$.messages[0].role``` -> ``messages[0].role``."""
    at = _AT_PATH.search(message)
    path = at["path"].lstrip(".") if at else ""
    if message.startswith("Object missing required field") and (field := _FIELD.search(message)):
        path = f"{path}.{field['name']}".lstrip(".")
    return path or None
