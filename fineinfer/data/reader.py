"""Reads JSONL line by line with true line numbers, in constant memory whatever the file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.data.problems import Problem

MAX_LINE_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"


def read_rows(
    path: Path, *, max_line_bytes: int = MAX_LINE_BYTES, on_line: Callable[[bytes], None] | None = None
) -> Iterator[tuple[int, Any | Problem]]:
    """Every non-blank line as (line number from 1, its JSON value or what is wrong with it).

    A UTF-8 byte order mark at the start and CRLF line ends are accepted. A line longer than ``max_line_bytes`` is
    skipped without being held in memory. ``on_line`` sees the bytes of the others, stripped.
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_line_bytes + 1):
            number += 1
            if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(max_line_bytes)
                yield number, Problem(line=number, code="line_too_long", message=f"longer than {max_line_bytes} bytes")
                continue
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if line := raw.strip():
                if on_line is not None:
                    on_line(line)
                yield number, _parse(raw, number)


def _parse(raw: bytes, number: int) -> Any | Problem:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        return Problem(line=number, code="not_utf8", message=message)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        reason = str(error).removeprefix("JSON is malformed: ") or "nested too deeply"
        message = f"not a JSON value on one line: {reason}{_hint(raw.strip())}"
        return Problem(line=number, code="invalid_json", message=message)


def _hint(line: bytes) -> str:
    """What to do, where a whole file is of a kind that people bring instead of JSONL."""
    if line[:1].isalpha():
        return '; plain text goes in as {"text": "..."} rows'
    if line in (b"[", b"{") or line.startswith(b"[{"):
        return "; write one row a line, without a list around them"
    return ""
