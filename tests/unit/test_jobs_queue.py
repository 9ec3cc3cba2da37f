"""Whose job is next, whose key made which job, and what users ask for over HTTP with keys of their own."""

from __future__ import annotations

import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from fineinfer.server import routes_files, routes_fine_tuning, routes_models
from fineinfer.server.boundary import Boundary
from fineinfer.server.errors import install_error_handlers
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_params import JobRequest
from fineinfer.server.metrics import ServerMetrics
from fineinfer.store import JobRecord, JobStatus, Store
from fineinfer.store.job_queue import fair_order, next_turn

JOBS = "/v1/fine_tuning/jobs"
KEYS = ("key-of-anna", "key-of-bert")


def queued(store: Store, name: str, owner: str = "", priority: int = 0) -> JobRecord:
    path = store.state_dir / "upload"
    path.write_text("{}\n")
    request = JobRequest(
        model="base", training_file=add_file(store, path, "f", "fine-tune").id, suffix=name, priority=priority
    )
    return store.jobs.transition(create_job(store, request, owner=owner), JobStatus.QUEUED)


# ---------------------------------------------------------------- the order

QUEUE = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1)), max_size=12)


@given(QUEUE, st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9)))
def test_the_order_is_fair_and_is_what_happens(jobs: list[tuple[str, int]], turns: dict[str, int]) -> None:
    queue = [(str(index), owner, priority) for index, (owner, priority) in enumerate(jobs)]
    order = fair_order(queue, turns)
    assert sorted(order) == sorted(job[0] for job in queue)
    by_id = {job[0]: job for job in queue}
    for place, job_id in enumerate(order):
        _, owner, priority = by_id[job_id]
        waiting = [by_id[other] for other in order[place:]]
        level = [job for job in waiting if job[2] == min(job[2] for job in waiting)]
        assert priority == level[0][2], "priorities first"
        assert job_id == min((job[0] for job in level if job[1] == owner), key=int), "an owner's jobs by age"
        assert turns.get(owner, 0) == min(turns.get(job[1], 0) for job in level), "who waited longest"
        turns = {**turns, owner: next_turn(turns)}
        assert fair_order([job for job in queue if job[0] in order[place + 1 :]], turns) == order[place + 1 :]


def test_owners_take_turns_whatever_one_of_them_has_queued(tmp_path: Path) -> None:
    store = Store(tmp_path)
    jobs = {name: queued(store, name, name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")}
    urgent, late = queued(store, "a4", "a", priority=-5), queued(store, "c2", "c", priority=5)
    expected = ["a4", "b1", "c1", "a1", "b2", "a2", "a3", "c2"]
    names = {job.id: job.name for job in (*jobs.values(), urgent, late)}
    assert [names[job_id] for job_id in store.jobs.queue()] == expected
    started = []
    while (job := store.jobs.start_next()) is not None:
        assert job.status is JobStatus.RUNNING
        started.append(job.name)
        left = [store.jobs.require(job_id) for job_id in store.jobs.queue()]
        assert [store.jobs.queue_position(other) for other in left] == list(range(1, len(left) + 1))
        assert store.jobs.queue_position(job) is None
        if len(started) == 3:  # whose turn it is survives a restart
            store.close()
            store = Store(tmp_path)
    assert started == expected
    newcomer, again = queued(store, "d1", "d"), queued(store, "b3", "b")
    assert store.jobs.queue() == [newcomer.id, again.id]
    store.close()


# ---------------------------------------------------------------- over HTTP


class FakeEngine:
    info = None

    async def notify_store_changed(self) -> None:
        pass


def make_app(store: Store, keys: tuple[str, ...] = KEYS) -> FastAPI:
    app = FastAPI()
    app.state.store, app.state.engine, app.state.started_s = store, FakeEngine(), 0.0
    app.state.settings = types.SimpleNamespace(served_model_name="base", max_file_bytes=4096, files_quota_bytes=1 << 20)
    install_error_handlers(app)
    app.add_middleware(Boundary, api_keys=keys, metrics=ServerMetrics("fineinfer:", "base", lambda: None))
    for module in (routes_files, routes_fine_tuning, routes_models):
        app.include_router(module.router)
    return app


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    it = Store(tmp_path / "state")
    yield it
    it.close()


@pytest.fixture
def http(store: Store) -> Iterator[Any]:
    with TestClient(make_app(store)) as client:
        yield client


def body(store: Store, **more: Any) -> dict[str, Any]:
    path = store.state_dir / "upload"
    path.write_text("{}\n")
    return {"model": "base", "training_file": add_file(store, path, "f", "fine-tune").id, **more}


def create(http: Any, key: str, asked: dict[str, Any], idempotency: str) -> Any:
    headers = {"authorization": f"Bearer {key}", "idempotency-key": idempotency}
    return http.post(JOBS, json=asked, headers=headers)


def test_a_key_makes_one_job_for_each_owner_and_after_a_restart_too(http: Any, store: Store) -> None:
    asked = body(store)
    anna, bert = (create(http, key, asked, "k").json()["id"] for key in KEYS)
    assert anna != bert
    owners = [store.jobs.require(job).owner for job in (anna, bert)]
    assert len(set(owners)) == 2 and all(len(owner) == 16 and owner not in KEYS for owner in owners)
    again = Store(store.state_dir)
    with TestClient(make_app(again)) as other_worker:
        assert [create(other_worker, key, asked, "k").json()["id"] for key in KEYS] == [anna, bert]
        refused = create(other_worker, KEYS[0], {**asked, "seed": 7}, "k")
        assert refused.status_code == 400 and refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert create(other_worker, KEYS[1], {**asked, "seed": 7}, "other").status_code == 200
    again.close()
    assert len(store.jobs.page()[0]) == 3


def test_the_same_create_many_times_at_once_makes_one_job(http: Any, store: Store) -> None:
    again = Store(store.state_dir)
    asked = body(store, suffix="lora")
    with TestClient(make_app(again)) as other_worker, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: create((http, other_worker)[n % 2], KEYS[0], asked, "k"), range(16)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1 == len(store.jobs.page()[0])
    assert len(list((store.state_dir / "jobs").iterdir())) == 1, "no folder is left of the others"
    again.close()


def test_pause_and_resume_by_the_stock_client(http: Any, store: Store) -> None:
    sdk = openai.OpenAI(base_url="http://testserver/v1", api_key=KEYS[0], http_client=http, max_retries=2)
    jobs = [queued(store, name) for name in "ab"]
    assert sdk.fine_tuning.jobs.pause(jobs[0].id).status == "paused"
    assert sdk.fine_tuning.jobs.retrieve(jobs[1].id).to_dict()["queue_position"] == 1
    assert sdk.fine_tuning.jobs.resume(jobs[0].id).status == "queued"
    assert store.jobs.start_next() is not None
    assert sdk.fine_tuning.jobs.pause(jobs[0].id).status == "pausing"
    with pytest.raises(openai.BadRequestError, match="is pausing and cannot be resumed") as refused:
        sdk.fine_tuning.jobs.resume(jobs[0].id)
    assert refused.value.code == "job_state_conflict" and refused.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.NotFoundError):
        sdk.fine_tuning.jobs.pause("ftjob-no")
    assert sdk.fine_tuning.jobs.cancel(jobs[0].id).status == "cancelled"


def test_versions_of_a_name_that_means_none_can_be_deleted(http: Any, store: Store) -> None:
    store.adapters.publish("lora", 3, "v", "/d", None, current=False)
    auth = {"authorization": f"Bearer {KEYS[0]}"}
    assert http.get("/v1/models/lora", headers=auth).status_code == 404
    assert http.get("/v1/models/lora@3", headers=auth).status_code == 200
    assert http.delete("/v1/models/lora", headers=auth).json()["deleted"]
    assert store.adapters.all() == []
