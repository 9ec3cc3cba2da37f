"""``/v1/files``: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from fineinfer.server.errors import ApiError
from fineinfer.server.upload import Upload, receive_upload
from fineinfer.store import FileRecord, Store, UnknownCursorError, new_id, now

if TYPE_CHECKING:
    from fineinfer.server.api_process import ApiSettings

router = APIRouter()
PURPOSES = ("fine-tune", "assistants", "batch", "vision", "user_data", "evals")
EXPIRY_RANGE_S = (3600, 2_592_000)
_CHUNK_BYTES = 256 << 10


def json_response(body: Any, status: int = 200) -> Response:
    """Builtins or structs as a JSON answer."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def page_response(data: list[dict[str, Any]], has_more: bool) -> Response:
    """One page as OpenAI's cursor lists have it."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    body = {"object": "list", "data": data, "has_more": has_more, "first_id": first, "last_id": last}
    return json_response(body)


def page_cursor(request: Request, default_limit: int, max_limit: int = 100) -> tuple[str | None, int]:
    """The query's (after, limit).

    Raises:
        ApiError: ``limit`` is not a number within 1 to ``max_limit``.
    """
    text = request.query_params.get("limit", str(default_limit))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= max_limit:
        raise ApiError(400, f"limit must be a number from 1 to {max_limit}.", param="limit")
    return request.query_params.get("after") or None, limit


def unknown_cursor(error: UnknownCursorError) -> ApiError:
    """400 for an ``after`` that is no id of the list."""
    return ApiError(400, f"after: no object has the id '{str(error)[:64]}'.", param="after")


@router.post("/v1/files")
async def create_file(request: Request) -> Response:
    """Store an uploaded file; its name is only remembered, never used as a path."""
    store: Store = request.app.state.store
    file_id = new_id("file")
    target = store.file_path(file_id)
    settings: ApiSettings = request.app.state.settings
    max_bytes, quota = settings.max_file_bytes, settings.files_quota_bytes
    over_quota = ApiError(413, f"All files together may have {quota} bytes.", param="file", code="file_quota_exceeded")
    too_large = ApiError(413, f"The file is larger than {max_bytes} bytes.", param="file", code="file_too_large")
    left = quota - store.files.total_bytes()
    try:
        upload = await receive_upload(
            request, target, min(max_bytes, left), over_quota if left < max_bytes else too_large
        )
        record = _checked_record(upload, file_id)
        await asyncio.to_thread(_sync, target)
        if not await asyncio.to_thread(store.files.add, record, quota):  # other uploads have ended meanwhile
            raise over_quota
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(507, "The disk is full.", param="file", code="disk_full", should_retry=False) from error
        raise
    return json_response(file_object(record))


def _checked_record(upload: Upload, file_id: str) -> FileRecord:
    if upload.filename is None:
        raise ApiError(400, "The form field 'file' is missing.", param="file")
    purpose = upload.fields.get("purpose")
    if purpose not in PURPOSES:
        raise ApiError(400, f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
    if upload.num_bytes == 0:
        raise ApiError(400, "The file is empty.", param="file")
    return FileRecord(
        id=file_id,
        filename=upload.filename[:255] or "file",
        bytes=upload.num_bytes,
        purpose=purpose,
        sha256=upload.sha256,
        created_at=now(),
        expires_at=_expiry(upload.fields),
    )


def _expiry(fields: dict[str, str]) -> int | None:
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    low, high = EXPIRY_RANGE_S
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not low <= seconds <= high:
        raise ApiError(400, f"expires_after[seconds] must be from {low} to {high}.", param="expires_after")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise ApiError(400, "expires_after[anchor] must be created_at.", param="expires_after")
    return now() + seconds


def _sync(path: Path) -> None:
    """The bytes are on disk before the id is given out."""
    for name, flags in ((path, os.O_RDONLY), (path.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(name, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@router.get("/v1/files")
def list_files(request: Request) -> Response:
    """One page of files, newest first unless ``order=asc``."""
    store: Store = request.app.state.store
    after, limit = page_cursor(request, 10000, 10000)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc.", param="order")
    purpose = request.query_params.get("purpose")
    try:
        files, more = store.files.page(purpose=purpose, after=after, limit=limit, newest_first=order == "desc")
    except UnknownCursorError as error:
        raise unknown_cursor(error) from error
    return page_response([file_object(record) for record in files], more)


@router.get("/v1/files/{file_id}")
def retrieve_file(file_id: str, request: Request) -> Response:
    """The file object."""
    return json_response(file_object(_require(request, file_id)))


@router.get("/v1/files/{file_id}/content")
def file_content(file_id: str, request: Request) -> Response:
    """The file's bytes."""
    record = _require(request, file_id)
    store: Store = request.app.state.store
    try:
        source = store.file_path(record.id).open("rb")
    except FileNotFoundError:
        raise _not_found(file_id) from None

    def chunks() -> Iterator[bytes]:
        with source:
            while chunk := source.read(_CHUNK_BYTES):
                yield chunk

    return StreamingResponse(
        chunks(), media_type="application/octet-stream", headers={"content-length": str(record.bytes)}
    )


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> Response:
    """Forget the file; a job made from it has its own link to the bytes."""
    store: Store = request.app.state.store
    if not await asyncio.to_thread(store.files.delete, file_id):
        raise _not_found(file_id)
    store.file_path(file_id).unlink(missing_ok=True)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def file_object(record: FileRecord) -> dict[str, Any]:
    """OpenAI's FileObject."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
        "sha256": record.sha256,
    }


def _require(request: Request, file_id: str) -> FileRecord:
    record = request.app.state.store.files.get(file_id)
    if not isinstance(record, FileRecord):
        raise _not_found(file_id)
    return record


def _not_found(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id[:64]}", param="id", code="file_not_found")
