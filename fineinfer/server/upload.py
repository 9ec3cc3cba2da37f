"""Receives a multipart form with one file, straight to disk, with a size cap; nothing is ever held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import IO, Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from fineinfer.server.errors import ApiError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
_FORM_OVERHEAD_BYTES = 64 << 10  # what headers and fields may add to the file


@dataclass
class Upload:
    """What a form held.

    Attributes:
        fields: Text fields by name, ``expires_after[seconds]`` written as it came.
        filename: As the client named it; never used as a path. None if there was no file.
        num_bytes: Size of the file.
        sha256: Hash of the file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    num_bytes: int = 0
    sha256: str = ""


async def receive_upload(request: Request, target: Path, max_bytes: int, too_large: ApiError) -> Upload:
    """Write the ``file`` part to ``target`` (which must not exist); the caller removes it on an error.

    Raises:
        ApiError: ``too_large`` if the file has more than ``max_bytes``; 400 if the body is no such form.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes + _FORM_OVERHEAD_BYTES:
        raise too_large
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise ApiError(400, "The body must be multipart/form-data with the fields 'file' and 'purpose'.", param="file")
    with target.open("xb") as out:
        form = _Form(out, max_bytes, too_large)
        parser = MultipartParser(boundary.encode("latin-1", "replace"), form.callbacks())
        try:
            async for chunk in request.stream():
                parser.write(chunk)
            parser.finalize()
        except FormParserError as error:
            raise ApiError(400, f"The multipart body is malformed: {error}.") from error
        out.flush()
    if not form.complete:
        raise ApiError(400, "The multipart body ends too early.")
    form.upload.sha256 = form.digest.hexdigest()
    return form.upload


class _Form:
    """The state of the parser: which part is open and where its bytes go."""

    def __init__(self, out: IO[bytes], max_bytes: int, too_large: ApiError) -> None:
        self.upload = Upload()
        self.digest = hashlib.sha256()
        self.complete = False
        self._out = out
        self._max_bytes, self._too_large = max_bytes, too_large
        self._header: list[bytearray] = [bytearray(), bytearray()]  # name and value of the header being read
        self._disposition = ""
        self._name: str | None = None  # of the open text field
        self._value = bytearray()
        self._in_file = False

    def callbacks(self) -> Any:
        """The functions the parser calls."""
        handlers: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }
        return handlers

    def _begin(self) -> None:
        self._disposition, self._name, self._in_file, self._value = "", None, False, bytearray()

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value.decode("utf-8", "replace")
        self._header = [bytearray(), bytearray()]

    def _open(self) -> None:
        header = Message()
        header["content-disposition"] = self._disposition.replace("\n", " ").replace("\r", " ")
        name, filename = header.get_param("name", header="content-disposition"), header.get_filename()
        if not isinstance(name, str) or len(self.upload.fields) >= MAX_FIELDS:
            raise ApiError(400, "The multipart body has a part without a name, or too many parts.")
        if name == "file":
            if filename is None or self.upload.filename is not None:
                raise ApiError(400, "'file' must be one file part with a filename.", param="file")
            self.upload.filename, self._in_file = filename, True
        else:
            self._name = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        chunk = data[start:end]
        if not self._in_file:
            self._value += chunk
            if len(self._value) > MAX_FIELD_BYTES:
                raise ApiError(400, f"The form field '{(self._name or '')[:64]}' is too long.", param=self._name)
            return
        self.upload.num_bytes += len(chunk)
        if self.upload.num_bytes > self._max_bytes:
            raise self._too_large
        self.digest.update(chunk)
        self._out.write(chunk)

    def _end(self) -> None:
        if self._name is not None:
            self.upload.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.complete = True
