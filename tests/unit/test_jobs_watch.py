"""What users watch: the stream of events, cut and resumed anywhere, and metrics thinned without losing what matters."""

from __future__ import annotations

import asyncio
import json
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from fineinfer.server import routes_job_watch
from fineinfer.server.errors import ApiError, install_error_handlers
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_params import JobRequest
from fineinfer.server.routes_job_watch import COLUMNS, Changes, pick_points
from fineinfer.store import JobRecord, JobStatus, Store

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    app = FastAPI()
    app.state.store = Store(tmp_path / "state")
    app.state.engine = types.SimpleNamespace(shutting_down=False)
    install_error_handlers(app)
    app.include_router(routes_job_watch.router)
    return app


@pytest.fixture
def http(app: FastAPI) -> Iterator[Any]:
    with TestClient(app) as client:
        yield client


@pytest.fixture
def store(app: FastAPI) -> Store:
    store: Store = app.state.store
    return store


def new_job(store: Store, name: str = "lora") -> JobRecord:
    path = store.state_dir / "rows"
    path.write_text("{}\n")
    file = add_file(store, path, "x", "fine-tune")
    return create_job(store, JobRequest(model="base", training_file=file.id, suffix=name))


def running(store: Store, job: JobRecord) -> JobRecord:
    for status in (JobStatus.QUEUED, JobStatus.RUNNING):
        job = store.jobs.transition(job, status, settings={}, dataset={})
    return job


def record(store: Store, job: JobRecord, step: int, loss: float = 1.0) -> None:
    data = {"step": step, "total_steps": 9, "train_loss": loss, "learning_rate": 1e-4, "epoch": step / 9}
    assert store.jobs.record_progress(job.id, step, data, 10 * step)


def parsed(text: str) -> list[tuple[str, Any]]:
    """(id, data) of each event of a stream, comments left out; the last one is [DONE]."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            data = fields["data"]
            found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


# ---------------------------------------------------------------- events


def test_a_stream_of_an_ended_job_is_whole_and_resumes_anywhere(http: Any, store: Store) -> None:
    job = running(store, new_job(store))
    with store.db.transaction():
        for i in range(450):  # more than one read takes
            store.jobs.add_event(job.id, "info", f"event {i}")
    record(store, job, 1)
    store.jobs.cancel(job.id)
    response = http.get(f"{JOBS}/{job.id}/events?stream=true")
    assert response.headers["content-type"].startswith("text/event-stream")
    whole = parsed(response.text)
    messages = [data["message"] for _, data in whole[:-1]]
    assert messages[0].startswith("Created") and messages[1:451] == [f"event {i}" for i in range(450)]
    assert whole[-1] == ("", "[DONE]") and messages[-1] == "The job has been cancelled"
    assert all(data["id"] == event_id and data["object"] == "fine_tuning.job.event" for event_id, data in whole[:-1])
    assert whole[-3][1]["type"] == "metrics" and whole[-3][1]["data"]["train_loss"] == 1.0
    pages = http.get(f"{JOBS}/{job.id}/events?limit=100").json()
    assert [item["id"] for item in pages["data"]] == [event_id for event_id, _ in whole[-2:-102:-1]]
    for cut in (0, 199, 200, 300, len(whole) - 2):
        last = whole[cut][0]
        for params, headers in (
            ({"stream": "1", "after": last}, {}),
            ({"stream": "True"}, {"Last-Event-ID": last}),
            ({"stream": "true", "after": whole[0][0]}, {"last-event-id": last}),
        ):
            ask = {"params": params, "headers": headers}
            assert parsed(http.get(f"{JOBS}/{job.id}/events", **ask).text) == whole[cut + 1 :]


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("stream=true&after=ftevent-no", {}, "after"),
        ("stream=true", {"last-event-id": "ftevent-no"}, "after"),
        ("stream=maybe", {}, "stream"),
        ("stream=true&limit=0", {}, "limit"),
        ("after=ftevent-no", {}, "after"),
    ],
)
def test_what_is_wrong_is_said_before_the_stream_begins(
    http: Any, store: Store, query: str, headers: dict[str, str], param: str
) -> None:
    job = new_job(store)
    response = http.get(f"{JOBS}/{job.id}/events?{query}", headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert http.get(f"{JOBS}/ftjob-no/events?stream=true").json()["error"]["code"] == "job_not_found"


def test_events_come_as_they_happen_with_comments_between(
    app: FastAPI, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_job_watch, "POLL_S", 0.01)
    monkeypatch.setattr(routes_job_watch, "KEEP_ALIVE_S", 0.03)
    job = running(store, new_job(store))
    other = Store(store.state_dir)  # the supervisor's connection

    async def scenario() -> list[bytes]:
        stream = routes_job_watch._follow(app.state, job.id, None)
        got = [await anext(stream)]
        assert await anext(stream) == b": keep-alive\n\n"
        other.jobs.add_event(job.id, "info", "from another process")
        store.jobs.add_event(job.id, "info", "from this one")
        while len(got) < 3:
            if not (item := await anext(stream)).startswith(b":"):
                got.append(item)
        store.jobs.cancel(job.id)  # this connection's own commits count too
        got += [item async for item in stream if not item.startswith(b":")]
        return got

    texts = [data["message"] for _, data in parsed(b"".join(asyncio.run(scenario())).decode())]
    assert texts[1:] == ["from another process", "from this one", "The job has been cancelled"]


def test_a_stream_ends_with_an_error_when_the_server_stops(app: FastAPI, store: Store) -> None:
    job = new_job(store)

    async def scenario() -> None:
        stream = routes_job_watch._follow(app.state, job.id, None)
        await anext(stream)
        app.state.engine.shutting_down = True
        with pytest.raises(ApiError, match="shutting down"):
            await anext(stream)

    asyncio.run(scenario())


def test_many_watchers_share_one_look_at_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = store.db.change_mark

    def look() -> tuple[int, int]:
        nonlocal looks
        looks += 1
        time.sleep(0.01)
        return real()

    monkeypatch.setattr(store.db, "change_mark", look)

    async def scenario() -> None:
        changes = Changes(store)
        marks = await asyncio.gather(*(changes.mark() for _ in range(500)))
        assert len(set(marks)) == 1 and looks == 1
        changes._since_s -= 1.0
        await asyncio.gather(*(changes.mark() for _ in range(500)))
        assert looks == 2

    asyncio.run(scenario())


# ---------------------------------------------------------------- metrics


def test_metrics_come_in_columns(http: Any, store: Store) -> None:
    job = running(store, new_job(store))
    for step in (1, 2, 3):
        record(store, job, step, loss=4.0 / step)
    assert store.jobs.record_eval(job.id, 2, 1.5, 0.5, True)
    shown = http.get(f"{JOBS}/{job.id}/metrics").json()
    assert (shown["status"], shown["num_steps"], tuple(shown["columns"])) == ("running", 3, COLUMNS)
    columns = shown["columns"]
    assert columns["step"] == [1, 2, 3] and columns["train_loss"] == [4.0, 2.0, pytest.approx(4 / 3)]
    assert columns["valid_loss"] == [None, 1.5, None] and columns["valid_mean_token_accuracy"] == [None, 0.5, None]
    assert columns["grad_norm"] == [None] * 3
    assert http.get(f"{JOBS}/{job.id}/metrics?max_points=2").json()["columns"]["step"] == [1, 3]
    for bad in ("1", "x", "-5", "100001", ""):
        response = http.get(f"{JOBS}/{job.id}/metrics?max_points={bad}")
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_points"
    assert http.get(f"{JOBS}/ftjob-no/metrics").status_code == 404
    assert http.get(f"{JOBS}/{new_job(store, 'b').id}/metrics").json()["columns"]["step"] == []


LOSS = st.none() | st.floats(-10, 10)


@given(losses=st.lists(LOSS, max_size=200), every=st.integers(1, 40), max_points=st.integers(2, 120))
def test_thinning_keeps_ends_and_extremes(losses: list[float | None], every: int, max_points: int) -> None:
    rows = [{"train_loss": loss, "valid_loss": float(i) if i % every == 0 else None} for i, loss in enumerate(losses)]
    kept = pick_points(rows, max_points)
    assert kept == sorted(set(kept)) and len(kept) <= max_points
    if len(rows) <= max_points:
        assert kept == list(range(len(rows)))
        return
    evaluated = [i for i, row in enumerate(rows) if row["valid_loss"] is not None]
    if max_points >= 8:  # fewer points are the ends of the training losses
        assert len(evaluated) > max_points // 2 or set(evaluated) <= set(kept)
        known = [loss for loss in losses if loss is not None]
        shown = [losses[i] for i in kept if losses[i] is not None]
        assert {0, len(rows) - 1} <= set(kept)
        assert not known or (min(known) in shown and max(known) in shown)
