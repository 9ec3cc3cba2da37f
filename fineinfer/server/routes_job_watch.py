"""What a user watches of a job: its events as pages or as a stream, and its metrics in columns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from fineinfer.server.errors import ApiError, engine_unavailable
from fineinfer.server.job_object import require_job
from fineinfer.server.routes_files import json_response, page_cursor, page_response, unknown_cursor
from fineinfer.server.sse import EventStream
from fineinfer.store import TERMINAL, EventRecord, Store, UnknownCursorError

router = APIRouter()
POLL_S = 0.2
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_BATCH = 200  # events read at once
POINTS_RANGE = (2, 100_000)
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
COLUMNS = ("step", "epoch", "train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy",
           "learning_rate", "grad_norm", "trained_tokens", "processed_tokens", "tokens_per_second",
           "device_seconds")  # fmt: skip


@router.get("/v1/fine_tuning/jobs/{job_id}/events")
def events(job_id: str, request: Request) -> Response:
    """One page of the job's events, newest first; with ``stream=true`` all of them, oldest first, until the job ends.

    A stream begins after the event ``after`` or ``Last-Event-ID`` (the header counts: a browser that connects again
    repeats the query). ``data: [DONE]`` follows the last event of a job that has ended.
    """
    store: Store = request.app.state.store
    job = require_job(store, job_id)
    stream = _SWITCH.get(request.query_params.get("stream", "false").lower())
    if stream is None:
        raise ApiError(400, "stream must be true or false.", param="stream")
    after, limit = page_cursor(request, 20)
    after = (stream and request.headers.get("last-event-id")) or after
    try:
        found, more = store.jobs.events(job.id, after=after, limit=limit, newest_first=not stream)
    except UnknownCursorError as error:
        raise unknown_cursor(error) from error
    if stream:
        return EventStream(_follow(request.app.state, job.id, after), lambda: None)
    return page_response([_event_object(event) for event in found], more)


async def _follow(state: Any, job_id: str, after: str | None) -> AsyncGenerator[bytes, None]:
    """The job's events as they come, and comments that keep the connection open.

    Raises:
        ApiError: The server shuts down; the reader may come again with the last id.
    """
    store: Store = state.store
    changes, sent_s = _changes(state), time.monotonic()
    while True:
        seen = await changes.mark()
        # before the events: those of the end are not missed
        ended = (await asyncio.to_thread(store.jobs.require, job_id)).status in TERMINAL
        more = True
        while more:
            found, more = await asyncio.to_thread(
                store.jobs.events, job_id, after=after, limit=_BATCH, newest_first=False
            )
            for event in found:
                after, sent_s = event.id, time.monotonic()
                yield b"id: %b\ndata: %b\n\n" % (event.id.encode(), msgspec.json.encode(_event_object(event)))
        if ended:
            return
        while await changes.mark() == seen:
            await asyncio.sleep(POLL_S)
            if state.engine.shutting_down:
                raise engine_unavailable("The server is shutting down.")
            if time.monotonic() - sent_s > KEEP_ALIVE_S:
                sent_s = time.monotonic()
                yield _KEEP_ALIVE


class Changes:
    """Whether the store changed: one look each POLL_S, however many ask.

    Args:
        store: The registry.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._looking: asyncio.Task[tuple[int, int]] | None = None
        self._since_s = 0.0

    async def mark(self) -> tuple[int, int]:
        """Differs after a commit of any process, at most POLL_S old."""
        if self._looking is None or time.monotonic() - self._since_s >= POLL_S:
            self._since_s = time.monotonic()
            # a thread: a writer of this process may hold the connection while the disk syncs
            self._looking = asyncio.create_task(asyncio.to_thread(self._store.db.change_mark))
        return await asyncio.shield(self._looking)


def _changes(state: Any) -> Changes:
    if not hasattr(state, "store_changes"):
        state.store_changes = Changes(state.store)
    changes: Changes = state.store_changes
    return changes


def _event_object(event: EventRecord) -> dict[str, Any]:
    return {
        "id": event.id,
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": event.level,
        "message": event.message,
        "type": event.type,
        "data": event.data,
    }


# ---------------------------------------------------------------- metrics


@router.get("/v1/fine_tuning/jobs/{job_id}/metrics")
def metrics(job_id: str, request: Request) -> Response:
    """The job's metrics, a list for each column; of more than ``max_points`` steps, those that a chart needs."""
    store: Store = request.app.state.store
    job = require_job(store, job_id)
    text, (low, high) = request.query_params.get("max_points", "1000"), POINTS_RANGE
    max_points = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not low <= max_points <= high:
        raise ApiError(400, f"max_points must be a number from {low} to {high}.", param="max_points")
    rows = [event.data for event in store.jobs.metrics(job.id)]
    kept = [rows[index] for index in pick_points(rows, max_points)]
    return json_response(
        {
            "object": "fine_tuning.job.metrics",
            "fine_tuning_job_id": job.id,
            "status": job.status.value,
            "num_steps": len(rows),
            "columns": {name: [row.get(name) for row in kept] for name in COLUMNS},
        }
    )


def pick_points(rows: Sequence[dict[str, Any]], max_points: int) -> list[int]:
    """Indices of the rows that a chart of ``max_points`` points needs, ascending.

    Evaluations get up to half of the points, training losses the rest: of each stretch the first, the last, the lowest
    and the highest, so that no spike and no end is lost. Fewer than 8 points are training losses alone.
    """
    if len(rows) <= max_points:
        return list(range(len(rows)))
    evaluated = [index for index, row in enumerate(rows) if row.get("valid_loss") is not None]
    kept = set(_thin(evaluated, rows, "valid_loss", max_points // 2)) if max_points >= 8 else set[int]()
    kept.update(_thin(range(len(rows)), rows, "train_loss", max_points - len(kept)))
    return sorted(kept)


def _thin(indices: Sequence[int], rows: Sequence[dict[str, Any]], key: str, num_points: int) -> list[int]:
    """At most ``num_points`` of the indices."""
    if len(indices) <= num_points:
        return list(indices)
    if num_points < 4:
        return [indices[0], indices[-1]][:num_points]
    buckets = num_points // 4
    kept = set[int]()
    for bucket in range(buckets):
        part = indices[bucket * len(indices) // buckets : (bucket + 1) * len(indices) // buckets]
        known = [index for index in part if rows[index].get(key) is not None] or part
        by_value = [(rows[index].get(key) or 0.0, index) for index in known]
        kept.update((part[0], part[-1], min(by_value)[1], max(by_value)[1]))
    return sorted(kept)
