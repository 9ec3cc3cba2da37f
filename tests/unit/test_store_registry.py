"""The registry: compare-and-set, pagination, names, idempotency, several processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fineinfer.store import (
    FileRecord,
    IdempotencyConflictError,
    JobRecord,
    JobStateConflictError,
    JobStatus,
    NameTakenError,
    Store,
    StoreError,
    UnknownCursorError,
    new_id,
    now,
)


def make_job(name: str = "a", **changes: object) -> JobRecord:
    values: dict[str, object] = {
        "id": new_id("ftjob"), "version": 1, "status": JobStatus.VALIDATING, "name": name, "created_at": now(),
        "finished_at": None, "request": {"model": "m", "training_file": "f"}, "settings": None, "dataset": None,
        "error": None, "local_key": None, "trained_tokens": None, "progress": None, "num_engine_deaths": 0,
        "result_files": [],
    }  # fmt: skip
    return JobRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def test_a_committed_job_is_there_after_reopening(store: Store) -> None:
    job = store.jobs.create(make_job())
    store.close()
    again = Store(store.state_dir)
    assert again.jobs.require(job.id) == job
    assert again.db.one("PRAGMA journal_mode")[0] == "wal"
    assert again.db.one("PRAGMA synchronous")[0] == 2


def test_of_two_decisions_on_one_version_exactly_one_wins(store: Store) -> None:
    job = store.jobs.create(make_job())
    other = Store(store.state_dir)
    assert store.jobs.transition(job, JobStatus.QUEUED).version == 2
    with pytest.raises(JobStateConflictError):
        other.jobs.transition(job, JobStatus.CANCELLED)
    assert other.jobs.require(job.id).status is JobStatus.QUEUED


def test_only_legal_transitions_pass_and_ends_are_final(store: Store) -> None:
    job = store.jobs.create(make_job())
    with pytest.raises(JobStateConflictError):
        store.jobs.transition(job, JobStatus.RUNNING)
    job = store.jobs.cancel(job.id)
    assert job.finished_at is not None
    for status in JobStatus:
        with pytest.raises(JobStateConflictError):
            store.jobs.transition(job, status)
    with pytest.raises(JobStateConflictError):
        store.jobs.cancel(job.id)


def test_racing_cancels_give_one_winner(store: Store) -> None:
    job = store.jobs.create(make_job())
    results: list[bool] = []

    def cancel() -> None:
        mine = Store(store.state_dir)
        try:
            mine.jobs.cancel(job.id)
            results.append(True)
        except JobStateConflictError:
            results.append(False)
        finally:
            mine.close()

    threads = [threading.Thread(target=cancel) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 5 + [True]


def test_another_process_sees_and_is_seen(store: Store) -> None:
    job = store.jobs.create(make_job())
    before = store.db.data_version()
    code = "import sys; from fineinfer.store import Store; Store(sys.argv[1]).jobs.cancel(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(store.state_dir), job.id], check=True)
    assert store.db.data_version() != before
    assert store.jobs.require(job.id).status is JobStatus.CANCELLED


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    job = store.jobs.create(make_job())
    with pytest.raises(ZeroDivisionError), store.db.transaction():
        store.jobs.cancel(job.id)
        raise ZeroDivisionError
    assert store.jobs.require(job.id) == job


def test_lists_page_newest_first_without_gap_or_repeat(store: Store) -> None:
    ids = [store.jobs.create(make_job(f"n{i}")).id for i in range(7)]
    seen: list[str] = []
    after, more = None, True
    while more:
        jobs, more = store.jobs.page(after=after, limit=3)
        seen += [job.id for job in jobs]
        after = seen[-1]
    assert seen == ids[::-1]
    assert store.jobs.page(limit=7)[1] is False
    with pytest.raises(UnknownCursorError):
        store.jobs.page(after="ftjob-none")


def test_jobs_filter_by_metadata(store: Store) -> None:
    for i, value in enumerate(("x", "y", "x")):
        store.jobs.create(make_job(f"n{i}", request={"metadata": {"k": value, "é'\"": "1"}}))
    assert len(store.jobs.page(metadata={"k": "x"})[0]) == 2
    assert len(store.jobs.page(metadata={"k": "x", "é'\"": "1"})[0]) == 2
    assert store.jobs.page(metadata={"k": "z"})[0] == []


def test_a_live_name_is_given_once(store: Store) -> None:
    first = store.jobs.create(make_job("lora"))
    with pytest.raises(NameTakenError):
        store.jobs.create(make_job("lora"))
    store.jobs.cancel(first.id)
    second = store.jobs.create(make_job("lora"))
    store.adapters.publish("lora", 3, "v", "/d", second.id)
    store.jobs.cancel(second.id)
    with pytest.raises(NameTakenError):
        store.jobs.create(make_job("lora"))
    assert store.adapters.delete("lora")
    store.jobs.create(make_job("lora"))


def test_idempotency_key_makes_one_job(store: Store) -> None:
    one = store.jobs.create(make_job("a"), idempotency_key="k", body_sha256="b")
    assert store.jobs.create(make_job("a"), idempotency_key="k", body_sha256="b").id == one.id
    with pytest.raises(IdempotencyConflictError):
        store.jobs.create(make_job("a"), idempotency_key="k", body_sha256="other")
    assert len(store.jobs.page()[0]) == 1


def test_names_move_and_steps_stay(store: Store) -> None:
    for step in (5, 10):
        store.adapters.publish("lora", step, f"v{step}", f"/{step}", "ftjob-1")
    current, old = store.adapters.resolve("lora"), store.adapters.resolve("lora@5")
    assert current is not None and (current.step, current.version) == (10, "v10")
    assert old is not None and (old.version, old.current) == ("v5", False)
    for missing in ("lora@7", "lora@", "@5", "lora@-5", "lora@5 ", "lora@²", "lora@" + "9" * 40, "other"):
        assert store.adapters.resolve(missing) is None
    with pytest.raises(NameTakenError):
        store.adapters.publish("lora", 1, "x", "/x", "ftjob-2")
    assert [(a.step, a.current) for a in store.adapters.all()] == [(5, False), (10, True)]


def test_metrics_of_a_replayed_step_overwrite(store: Store) -> None:
    job = store.jobs.create(make_job())
    assert not store.jobs.record_progress(job.id, 1, {"total_steps": 2, "train_loss": 3.0}, 10)
    job = store.jobs.transition(store.jobs.transition(job, JobStatus.QUEUED), JobStatus.RUNNING)
    for loss in (3.0, 2.5):
        assert store.jobs.record_progress(job.id, 1, {"total_steps": 2, "train_loss": loss}, 10)
    metrics = store.jobs.metrics(job.id)
    assert [event.data["train_loss"] for event in metrics] == [2.5]
    assert "2.5000" in metrics[0].message
    assert store.jobs.require(job.id).version == 3, "progress must not make a user's cancel fail"


def test_updates_that_a_resumed_job_repeats_keep_their_rates_and_clear_no_engine_deaths(store: Store) -> None:
    job = store.jobs.create(make_job())
    job = store.jobs.transition(store.jobs.transition(job, JobStatus.QUEUED), JobStatus.RUNNING)

    def tell(step: int, rate: float) -> int:
        data = {"step": step, "total_steps": 9, "train_loss": 3.0, "tokens_per_second": rate, "eta_seconds": rate / 10}
        assert store.jobs.record_progress(job.id, step, data, step)
        return store.jobs.require(job.id).num_engine_deaths

    for step in (1, 2):
        tell(step, 100.0 * step)
    for deaths in (1, 2, 3):
        assert store.jobs.count_engine_death(job.id) == deaths
        assert [tell(step, 0.0) for step in (1, 2)] == [deaths, deaths]
    rates = [(event.data["tokens_per_second"], event.data["eta_seconds"]) for event in store.jobs.metrics(job.id)]
    assert rates == [(100.0, 10.0), (200.0, 20.0)]
    assert tell(3, 0.0) == 0


def test_expired_files_are_gone(store: Store) -> None:
    for i, expires in enumerate((None, now() - 1, now() + 100)):
        store.files.add(
            FileRecord(
                id=f"file-{i}",
                filename="x",
                bytes=1,
                purpose="fine-tune",
                sha256="",
                created_at=now(),
                expires_at=expires,
            )
        )
    assert store.files.get("file-1") is None
    assert [record.id for record in store.files.page()[0]] == ["file-2", "file-0"]
    assert [record.id for record in store.files.page(newest_first=False)[0]] == ["file-0", "file-2"]
    assert store.files.page(purpose="batch")[0] == []
    assert store.files.expired() == ["file-1"]


def test_an_older_schema_is_brought_up_to_date_without_loss(store: Store) -> None:
    path = store.state_dir / "fineinfer.db"
    job = store.jobs.create(make_job())
    store.close()
    with sqlite3.connect(path) as connection:
        for table, column in (("jobs", "device_s"), ("jobs", "owner"), ("jobs", "priority"), ("adapters", "pinned")):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("PRAGMA user_version=1")
    connection.close()
    store = Store(path.parent)
    assert store.jobs.require(job.id) == job and job.device_s == 0.0
    for used in (2.5, 4.0, 3.0):  # late news is no news
        store.jobs.record_usage(job.id, used)
    store.close()
    assert Store(path.parent).jobs.require(job.id).device_s == 4.0


def test_a_newer_schema_is_refused(store: Store) -> None:
    path = store.state_dir / "fineinfer.db"
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(StoreError, match="99"):
        Store(path.parent)
