"""The job manager against a scripted engine: every state, crashes of either side."""

from __future__ import annotations

from pathlib import Path

import pytest

from fineinfer.messages import (
    AdapterRejected,
    CancelJob,
    JobEnded,
    JobNote,
    JobStarted,
    JobUsage,
    RemoveAdapter,
    SetAdapter,
    StartJob,
)
from fineinfer.server import job_manager
from fineinfer.server.job_manager import JobSettings
from fineinfer.store import JobStatus, Store

from .jobs_world import ROW, World, checkpoint, progress, quick_child, run, world

__all__ = ["quick_child"]  # a fixture


def test_a_job_from_file_to_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            start = next(message for message in w.sent if isinstance(message, StartJob))
            assert start.name == "lora" and start.dataset_sha256 == "d" and start.settings.max_seq_length == 256
            assert Path(start.job_dir, "training.jsonl").exists()
            await w.manager.on_engine_message(
                JobStarted(job_id=job.id, step=0, total_steps=4, steps_per_epoch=4, num_trainable_parameters=7)
            )
            for step in (1, 2):
                await w.manager.on_engine_message(progress(job.id, step))
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 2))
            assert w.sent[-1] == SetAdapter(name="lora", version="sha-2", step=2, directory="/adapters/sha-2")
            assert w.store.adapters.resolve("lora") is not None
            for step in (3, 4):
                await w.manager.on_engine_message(progress(job.id, step))
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 4, final=True))
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="succeeded"))
            done = w.store.jobs.require(job.id)
            assert done.status is JobStatus.SUCCEEDED and done.trained_tokens == 40
            result = w.store.files.get(done.result_files[0])
            assert result is not None and result.purpose == "fine-tune-results"
            lines = w.store.file_path(result.id).read_text().splitlines()
            assert lines[0].startswith("step,train_loss,train_accuracy,valid_loss") and len(lines) == 5
            assert [c.name for c in w.store.jobs.checkpoints(job.id)[0]] == ["lora@4", "lora@2"]
            assert any("Only 4 examples" in message for message in w.messages(job))

    run(scenario())


def test_jobs_run_one_after_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            jobs = [w.submit(f"n{i}") for i in range(3)]
            await w.up()
            await w.running(jobs[0])
            await w.until(lambda: all(w.status(job) is JobStatus.QUEUED for job in jobs[1:]))
            records = [w.store.jobs.require(job.id) for job in jobs]
            assert [w.store.jobs.queue_position(record) for record in records] == [None, 1, 2]
            await w.manager.on_engine_message(JobEnded(job_id=jobs[0].id, status="failed", error_message="boom"))
            await w.running(jobs[1])
            assert w.started() == [jobs[0].id, jobs[1].id]
            failed = w.store.jobs.require(jobs[0].id)
            assert failed.error == {"code": "server_error", "message": "boom", "param": None}

    run(scenario())


def test_cancel_of_a_running_job_frees_the_engine_and_late_messages_change_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            first, second = w.submit("a"), w.submit("b")
            await w.up()
            await w.running(first)
            other = Store(w.store.state_dir)  # an api worker
            other.jobs.cancel(first.id)
            other.close()
            await w.until(lambda: CancelJob(job_id=first.id) in w.sent)
            await w.manager.on_engine_message(progress(first.id, 1))
            await w.manager.on_engine_message(checkpoint(first.id, "a", 1))
            assert second.id not in w.started(), "the engine still holds the first"
            await w.manager.on_engine_message(JobEnded(job_id=first.id, status="succeeded"))
            await w.running(second)
            assert w.status(first) is JobStatus.CANCELLED
            assert w.store.adapters.all() == [] and w.store.jobs.metrics(first.id) == []
            assert w.sent.count(CancelJob(job_id=first.id)) == 1

    run(scenario())


def test_a_job_goes_on_after_the_engine_died(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(progress(job.id, 1))
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 1))
            await w.manager.on_engine_message(progress(job.id, 2, loss=9.0))
            w.manager.on_engine_down()
            w.sent.clear()
            await w.up("boot-2")
            await w.running(job)
            kinds = [type(message) for message in w.sent]
            assert kinds == [SetAdapter, StartJob], "adapters come first"
            await w.manager.on_engine_message(progress(job.id, 2, loss=1.0))
            assert [event.data["train_loss"] for event in w.store.jobs.metrics(job.id)] == [2.0, 1.0]

    run(scenario())


def test_device_time_is_counted_over_engines_and_after_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(JobUsage(job_id=job.id, device_s=2.5))
            await w.manager.on_engine_message(progress(job.id, 1))
            await w.restart_server()
            await w.up("boot-2")
            await w.running(job)
            assert next(m for m in w.sent if isinstance(m, StartJob)).device_s == 2.5
            await w.manager.on_engine_message(JobUsage(job_id=job.id, device_s=4.0))
            await w.manager.on_engine_message(progress(job.id, 2))
            assert [event.data["device_seconds"] for event in w.store.jobs.metrics(job.id)] == [2.5, 4.0]
            w.store.jobs.cancel(job.id)
            await w.manager.on_engine_message(JobUsage(job_id=job.id, device_s=4.5))  # until the engine heard of it
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="cancelled"))
            assert w.store.jobs.require(job.id).device_s == 4.5

    run(scenario())


def test_a_job_that_keeps_killing_the_engine_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            for boot in range(job_manager.MAX_ENGINE_DEATHS):
                assert w.status(job) in (JobStatus.VALIDATING, JobStatus.RUNNING)
                w.sent.clear()
                await w.up(f"boot-{boot}")
                await w.running(job)
                w.manager.on_engine_down()
            failed = w.store.jobs.require(job.id)
            assert failed.status is JobStatus.FAILED and failed.error is not None
            assert failed.error["code"] == "engine_failed"

    run(scenario())


def test_a_restarted_server_goes_on_in_every_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job, queued = w.submit("lora"), w.submit("next")
            await w.restart_server()
            assert w.status(job) is JobStatus.VALIDATING
            await w.up()
            await w.running(job)
            await w.until(lambda: w.status(queued) is JobStatus.QUEUED)
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 2))
            await w.restart_server()
            await w.up("boot-2")
            await w.running(job)
            assert [type(message) for message in w.sent] == [SetAdapter, StartJob]
            assert w.status(queued) is JobStatus.QUEUED

    run(scenario())


def test_success_without_an_adapter_is_a_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="succeeded"))
            assert w.status(job) is JobStatus.FAILED

    run(scenario())


def test_a_deleted_adapter_is_removed_from_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            w.store.adapters.publish("old", 1, "v1", "/1", None)
            w.store.adapters.publish("old", 2, "v2", "/2", None)
            await w.up()
            await w.up()  # said twice
            assert w.sent == [
                SetAdapter(name="old", version="v1", step=1, directory="/1", current=False),
                SetAdapter(name="old", version="v2", step=2, directory="/2"),
            ]
            w.store.adapters.delete("old")
            w.manager.wake()
            await w.until(lambda: RemoveAdapter(name="old") in w.sent)

    run(scenario())


def test_a_name_that_moves_back_is_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            await w.up()
            for step in (1, 2, 1):
                w.store.adapters.publish("lora", step, f"v{step}", f"/{step}", None)
                w.manager.wake()
                expected = SetAdapter(name="lora", version=f"v{step}", step=step, directory=f"/{step}")
                await w.until(lambda expected=expected: w.sent and w.sent[-1] == expected)
            assert len(w.sent) == 3

    run(scenario())


def test_notes_and_rejections_become_events_and_strangers_are_ignored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(JobNote(job_id=job.id, level="strange", message="gave 1 MiB back"))
            await w.manager.on_engine_message(checkpoint(job.id, "lora", 2))
            await w.manager.on_engine_message(AdapterRejected(name="lora", step=2, message="too wide"))
            strangers = (
                JobNote(job_id="x", level="info", message="m"),
                progress("x", 1),
                checkpoint("x", "y", 1),
                JobEnded(job_id="x", status="failed"),
                AdapterRejected(name="x", step=1, message="m"),
            )
            for message in strangers:
                await w.manager.on_engine_message(message)
            assert "gave 1 MiB back" in w.messages(job)
            assert "lora@2 cannot be served: too wide" in w.messages(job)
            assert w.status(job) is JobStatus.RUNNING

    run(scenario())


def test_a_deleted_file_keeps_working_for_its_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            job = w.submit("lora")
            file_id = job.request["training_file"]
            w.store.files.delete(file_id)
            w.store.file_path(file_id).unlink()
            assert (w.store.job_dir(job.id) / "training.jsonl").read_text().count("\n") == 4
            await w.up()
            await w.running(job)

    run(scenario())


def test_the_real_child_refuses_by_line_and_a_cancel_kills_it(
    tmp_path: Path, embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    async def scenario() -> None:
        w = World(tmp_path / "state", JobSettings(base_model="base", model=str(embedded_model)))
        try:
            doomed = w.submit("doomed")
            bad = w.submit("lora", [ROW, {"messages": [{"role": "bot", "content": "x"}]}, ROW, {"messages": 3}])
            await w.up()
            child = w.store.job_dir(doomed.id) / "prepare.log"
            await w.until(child.exists)
            w.store.jobs.cancel(doomed.id)
            w.manager.wake()
            await w.until(lambda: w.status(bad) is JobStatus.FAILED)
            assert w.status(doomed) is JobStatus.CANCELLED
            error = w.store.jobs.require(bad.id).error
            assert error is not None and error["code"] == "invalid_training_file" and error["param"] == "training_file"
            assert "line 2: " in error["message"] and 'did you mean "assistant"' in error["message"]
            assert "line 4: " in error["message"]
            assert next(m for m in w.messages(bad) if m.startswith("line ")).startswith("line 2: ")
            # what the job asks for reaches the child: two formats in one, a bad row, and all tokens trained
            rows = [{"instruction": "Hi", "output": f"a{n}", "text": "x"} for n in range(3)] + [{"instruction": "Hi"}]
            asked = {"format": "alpaca", "skip_invalid": True, "train_on": "all"}
            good = w.submit("good", rows, **asked)
            await w.until(lambda: good.id in w.started())
            job = w.store.jobs.require(good.id)
            assert job.dataset is not None and job.settings is not None and job.settings["batch_size"] == 3
            found = {key: job.dataset[key] for key in ("format", "examples", "skipped", "problems")}
            assert found == {"format": "alpaca", "examples": 3, "skipped": 1, "problems": {"missing_field": 1}}
            assert job.dataset["trainable_tokens"] == job.dataset["tokens"] - 3  # all but the first of each
            messages = w.messages(good)
            assert any("3 examples (alpaca)" in m and "1 rows left out" in m for m in messages), messages
            assert any("'text' is not used" in m for m in messages), messages
        finally:
            await w.close()

    run(scenario())
