"""``/v1/fine_tuning/jobs/{id}/adapter``: the PEFT files of the versions that a job has published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from fineinfer.hashing import ADAPTER_FILES
from fineinfer.server.errors import ApiError
from fineinfer.server.routes_files import json_response
from fineinfer.store import AdapterRecord, JobRecord, Store

router = APIRouter()
# All that is ever handed out. A name from a client is compared with these and never becomes a path.
_CHUNK_BYTES = 256 << 10


@router.get("/v1/fine_tuning/jobs/{job_id}/adapter")
def adapter_files(job_id: str, request: Request) -> Response:
    """Which files the adapter has; of the version ``step``, or of the one that its name means now.

    ``adapter_version`` is the SHA-256 over name, NUL, size, NUL and content of these files in their order, by which a
    client can verify what it got.
    """
    record = _version(job_id, request)
    sizes = {}
    for name in ADAPTER_FILES:
        try:
            sizes[name] = os.stat(Path(record.directory) / name).st_size
        except OSError:  # the template is only there for models that have one
            continue
    return json_response(
        {
            "object": "fine_tuning.job.adapter",
            "fine_tuning_job_id": job_id,
            "model": f"{record.name}@{record.step}",
            "step_number": record.step,
            "adapter_version": record.version,
            "files": [{"name": name, "bytes": size} for name, size in sizes.items()],
        }
    )


@router.get("/v1/fine_tuning/jobs/{job_id}/adapter/{name}")
def adapter_file(job_id: str, name: str, request: Request) -> Response:
    """One of these files."""
    record = _version(job_id, request)
    known = next((file for file in ADAPTER_FILES if file == name), None)
    try:
        source = None if known is None else (Path(record.directory) / known).open("rb")
    except OSError:
        source = None
    if source is None:
        raise ApiError(404, f"The adapter has no such file: {name[:64]}", param="name", code="file_not_found")
    size = os.fstat(source.fileno()).st_size
    # open from here on: a version that is removed meanwhile still goes out whole
    return StreamingResponse(
        _chunks(source), media_type="application/octet-stream", headers={"content-length": str(size)}
    )


def _chunks(source: BinaryIO) -> Iterator[bytes]:
    with source:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk


def _version(job_id: str, request: Request) -> AdapterRecord:
    store: Store = request.app.state.store
    if not isinstance(store.jobs.get(job_id), JobRecord):
        message = f"Could not find fine-tuning job: {job_id[:64]}"
        raise ApiError(404, message, param="fine_tuning_job_id", code="job_not_found")
    versions = {record.step: record for record in store.adapters.all() if record.job_id == job_id}
    text = request.query_params.get("step")
    if text is None:
        # oldest first: without one that is served, the newest
        chosen = [*versions.values(), *(record for record in versions.values() if record.current)][-1:]
    elif text.isascii() and text.isdigit() and len(text) < 18:
        chosen = [record for step, record in versions.items() if step == int(text)]
    else:
        raise ApiError(400, "step must be the number of a checkpoint.", param="step")
    if not chosen:
        have = ", ".join(map(str, versions)) or "none yet"
        raise ApiError(
            404, f"The job has no adapter{f' of step {text}' if text else ''}; steps with one: {have}.", param="step",
            code="adapter_not_found",
        )  # fmt: skip
    return chosen[0]
