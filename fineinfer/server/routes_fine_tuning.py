"""``/v1/fine_tuning/jobs``: create, list, retrieve, cancel, pause, resume, checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from fineinfer.server.boundary import owner_of
from fineinfer.server.errors import ApiError
from fineinfer.server.job_creation import check_references, create_job
from fineinfer.server.job_object import job_not_found, job_object, require_job
from fineinfer.server.job_params import Limits, parse_job_request
from fineinfer.server.json_body import read_json
from fineinfer.server.routes_files import json_response, page_cursor, page_response, unknown_cursor
from fineinfer.store import (
    CheckpointRecord,
    IdempotencyConflictError,
    JobRecord,
    JobStateConflictError,
    NameTakenError,
    Store,
    UnknownCursorError,
)

router = APIRouter()
_METADATA_FILTER = re.compile(r"metadata\[(.{1,64})\]")
MAX_KEY_CHARS = 255


@router.post("/v1/fine_tuning/jobs")
async def create(request: Request) -> Response:
    """Create a job; the file is validated after the answer."""
    body = await read_json(request, dict[str, Any])
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise ApiError(400, f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters.")
    job = await asyncio.to_thread(_create, request.app.state, body, key, owner_of(request.scope))
    await request.app.state.engine.notify_store_changed()
    return json_response(job)


def _create(state: Any, body: dict[str, Any], key: str | None, owner: str) -> dict[str, Any]:
    store: Store = state.store
    digest = hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()
    try:
        known = None if key is None else store.jobs.by_idempotency_key(key, digest, owner)
    except IdempotencyConflictError as error:
        raise _reused_key(error) from error
    if known is not None:  # not checked again: its file may be deleted by now, or the server's limits be others
        return job_object(store, known)
    limits = _limits(state)
    checked = check_references(store, parse_job_request(body, limits), limits)
    try:
        job = create_job(store, checked, idempotency_key=key, body_sha256=digest, owner=owner)
    except IdempotencyConflictError as error:
        raise _reused_key(error) from error
    except NameTakenError as error:
        raise ApiError(400, str(error), param="suffix", code="model_name_taken") from error
    except FileNotFoundError as error:
        message = "training_file or validation_file: deleted meanwhile."
        raise ApiError(400, message, param="training_file", code="file_not_found") from error
    return job_object(store, job)


def _reused_key(error: IdempotencyConflictError) -> ApiError:
    return ApiError(400, str(error), code="idempotency_key_reused", should_retry=False)


def _limits(state: Any) -> Limits:
    """The limits the supervisor published."""
    published = state.store.get_meta("limits")
    if published is None:
        return Limits(base_model=state.settings.served_model_name)
    return msgspec.convert(published, Limits)


@router.get("/v1/fine_tuning/jobs")
def list_jobs(request: Request) -> Response:
    """One page of jobs, newest first; ``metadata[k]=v`` filters."""
    store: Store = request.app.state.store
    after, limit = page_cursor(request, 20)
    wanted = {
        match[1]: value for key, value in request.query_params.items() if (match := _METADATA_FILTER.fullmatch(key))
    }
    try:
        jobs, more = store.jobs.page(after=after, limit=limit, metadata=wanted)
    except UnknownCursorError as error:
        raise unknown_cursor(error) from error
    return page_response([job_object(store, job) for job in jobs], more)


@router.get("/v1/fine_tuning/jobs/{job_id}")
def retrieve(job_id: str, request: Request) -> Response:
    """The job object."""
    return json_response(job_object(request.app.state.store, require_job(request.app.state.store, job_id)))


@router.post("/v1/fine_tuning/jobs/{job_id}/cancel")
async def cancel(job_id: str, request: Request) -> Response:
    """Cancel a job that has not ended; final at once, whatever it was doing."""
    return await _act(request, job_id, request.app.state.store.jobs.cancel)


@router.post("/v1/fine_tuning/jobs/{job_id}/pause")
async def pause(job_id: str, request: Request) -> Response:
    """Pause a queued job at once; a running one is ``pausing`` until the engine has let go of it."""
    return await _act(request, job_id, request.app.state.store.jobs.pause)


@router.post("/v1/fine_tuning/jobs/{job_id}/resume")
async def resume(job_id: str, request: Request) -> Response:
    """Queue a paused job again; it goes on from its newest checkpoint when its turn comes."""
    return await _act(request, job_id, request.app.state.store.jobs.resume)


async def _act(request: Request, job_id: str, action: Callable[[str], JobRecord]) -> Response:
    try:
        job = await asyncio.to_thread(action, job_id)
    except LookupError as error:
        raise job_not_found(job_id) from error
    except JobStateConflictError as error:
        raise ApiError(400, str(error), code="job_state_conflict", should_retry=False) from error
    await request.app.state.engine.notify_store_changed()
    return json_response(job_object(request.app.state.store, job))


@router.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
def checkpoints(job_id: str, request: Request) -> Response:
    """One page of the job's checkpoints, newest first."""
    store: Store = request.app.state.store
    job = require_job(request.app.state.store, job_id)
    after, limit = page_cursor(request, 10)
    try:
        found, more = store.jobs.checkpoints(job.id, after=after, limit=limit)
    except UnknownCursorError as error:
        raise unknown_cursor(error) from error
    return page_response([_checkpoint_object(checkpoint) for checkpoint in found], more)


def _checkpoint_object(checkpoint: CheckpointRecord) -> dict[str, Any]:
    return {
        "id": checkpoint.id,
        "object": "fine_tuning.job.checkpoint",
        "created_at": checkpoint.created_at,
        "fine_tuned_model_checkpoint": checkpoint.name,
        "fine_tuning_job_id": checkpoint.job_id,
        "step_number": checkpoint.step,
        "metrics": checkpoint.metrics,
        "adapter_version": checkpoint.version,
    }
