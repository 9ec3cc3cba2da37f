"""The job manager against a scripted engine: every state, crashes of either side, --lora-train."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fineinfer.data.packed import DatasetSummary, write_summary
from fineinfer.messages import (
    AdapterRejected,
    CancelJob,
    EngineInfo,
    JobCheckpoint,
    JobEnded,
    JobNote,
    JobProgress,
    JobStarted,
    RemoveAdapter,
    SetAdapter,
    StartJob,
)
from fineinfer.server import job_manager, job_validation
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_manager import JobManager, JobSettings, LocalJobError
from fineinfer.server.job_params import JobRequest
from fineinfer.store import JobRecord, JobStatus, Store

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def engine_info(boot_id: str) -> EngineInfo:
    return EngineInfo(
        boot_id=boot_id, base_model="base", max_model_len=256, max_request_tokens=256, vocab_size=100,
        eos_token_ids=[2], dtype="float32", device="cpu", memory_plan={},
    )  # fmt: skip


def progress(job_id: str, step: int, loss: float = 2.0) -> JobProgress:
    return JobProgress(
        job_id=job_id, step=step, total_steps=4, epoch=step / 4, loss=loss, learning_rate=1e-4, grad_norm=1.0,
        mean_token_accuracy=0.5, trained_tokens=10 * step, processed_tokens=20 * step, tokens_per_s=5.0, eta_s=9.0,
    )  # fmt: skip


def checkpoint(job_id: str, name: str, step: int, final: bool = False) -> JobCheckpoint:
    return JobCheckpoint(
        job_id=job_id, name=name, step=step, version=f"sha-{step}", directory=f"/adapters/sha-{step}",
        checkpoint_dir="/c", loss=1.5, trained_tokens=10 * step, final=final,
    )  # fmt: skip


class World:
    """A manager on a real store, with everything it sent to the engine."""

    def __init__(self, state_dir: Path, settings: JobSettings | None = None) -> None:
        self.store = Store(state_dir)
        self.sent: list[Any] = []
        self.settings = settings or JobSettings(base_model="base")
        self.manager = self._new_manager()
        self._task = asyncio.create_task(self.manager.run())

    def _new_manager(self) -> JobManager:
        return JobManager(self.store, self.store.state_dir, self.settings, self._send)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def up(self, boot_id: str = "boot-1") -> None:
        await self.manager.on_engine_up(engine_info(boot_id))

    async def restart_server(self) -> None:
        """kill -9 of the supervisor: nothing but the store is left."""
        await self.close()
        self.sent.clear()
        self.store = Store(self.store.state_dir)
        self.manager = self._new_manager()
        self._task = asyncio.create_task(self.manager.run())

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.store.close()

    def submit(self, name: str, rows: list[Any] | None = None) -> JobRecord:
        path = self.store.state_dir / "upload"
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows or [ROW] * 4)))
        file = add_file(self.store, path, "train.jsonl", "fine-tune")
        job = create_job(self.store, JobRequest(model="base", training_file=file.id, suffix=name))
        self.manager.wake()
        return job

    def status(self, job: JobRecord) -> JobStatus:
        return self.store.jobs.require(job.id).status

    def messages(self, job: JobRecord) -> list[str]:
        return [event.message for event in self.store.jobs.events(job.id, limit=100)[0]][::-1]

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError("the condition never held")
            await asyncio.sleep(0.01)

    def started(self) -> list[str]:
        return [message.job_id for message in self.sent if isinstance(message, StartJob)]

    async def running(self, job: JobRecord) -> None:
        await self.until(lambda: job.id in self.started())


@contextlib.asynccontextmanager
async def world(tmp_path: Path) -> AsyncIterator[World]:
    it = World(tmp_path / "state")
    try:
        yield it
    finally:
        await it.close()


@pytest.fixture(autouse=True)
def quick_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation that always succeeds and starts no process; one test below uses the real one."""

    async def run_child(self: Any, folder: Path) -> int:
        summary = DatasetSummary(
            sha256="d", source_sha256="s", examples=4, tokens=40, trainable_tokens=20, longest=10, max_seq_length=64,
            masking="prefix", warnings=["only 4 examples"],
        )  # fmt: skip
        write_summary(folder, summary)
        return 0

    monkeypatch.setattr(job_validation.Validation, "_run_child", run_child)
    monkeypatch.setattr(job_manager, "POLL_S", 0.02)


def run(scenario: Any) -> None:
    asyncio.run(scenario)


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


def test_lora_train_makes_one_job_for_the_same_file_name_and_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text(json.dumps(ROW) + "\n")
            overrides = {"n_epochs": 2, "lora": {"r": 4}, "recompute": "never"}
            job = w.manager.create_local_job(data, "my-lora", overrides)
            assert w.manager.create_local_job(data, "my-lora", dict(reversed(overrides.items()))).id == job.id
            await w.restart_server()
            assert w.manager.create_local_job(data, "my-lora", overrides).id == job.id
            with pytest.raises(LocalJobError, match="belongs to job"):
                w.manager.create_local_job(data, "my-lora", {"n_epochs": 3})
            await w.up()
            await w.running(job)
            start = next(message for message in w.sent if isinstance(message, StartJob))
            assert (start.settings.n_epochs, start.settings.lora.r, start.settings.lora.lora_alpha) == (2, 4, 8.0)
            await w.manager.on_engine_message(checkpoint(job.id, "my-lora", 2))
            await w.manager.on_engine_message(JobEnded(job_id=job.id, status="succeeded"))
            assert w.manager.create_local_job(data, "my-lora", overrides).id == job.id, "already trained"
            w.store.adapters.delete("my-lora")
            assert w.manager.create_local_job(data, "my-lora", overrides).id != job.id, "asked for again"

    run(scenario())


def test_a_cancelled_local_job_is_replaced_with_its_versions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text(json.dumps(ROW) + "\n")
            job = w.manager.create_local_job(data, "my-lora", {})
            await w.up()
            await w.running(job)
            await w.manager.on_engine_message(checkpoint(job.id, "my-lora", 2))
            w.store.jobs.cancel(job.id)
            again = w.manager.create_local_job(data, "my-lora", {})
            assert again.id != job.id and w.store.adapters.resolve("my-lora@2") is None

    run(scenario())


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("base", {}, "base model"),
        ("a/b", {}, "--lora-train-name"),
        ("x", {"n_epoch": 1}, "did you mean 'n_epochs'"),
        ("x", {"lora": {"r": 100}}, "lora.r"),
    ],
)
def test_wrong_local_settings_are_one_clear_line(
    tmp_path: Path, name: str, overrides: dict[str, Any], words: str
) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as w:
            data = tmp_path / "train.jsonl"
            data.write_text("{}\n")
            with pytest.raises(LocalJobError, match=words):
                w.manager.create_local_job(data, name, overrides)
            with pytest.raises(LocalJobError, match="No such file"):
                w.manager.create_local_job(tmp_path / "missing", "y", {})

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
            await w.until(child.exists, 30.0)
            w.store.jobs.cancel(doomed.id)
            w.manager.wake()
            await w.until(lambda: w.status(bad) is JobStatus.FAILED, 120.0)
            assert w.status(doomed) is JobStatus.CANCELLED
            error = w.store.jobs.require(bad.id).error
            assert error is not None and error["code"] == "invalid_training_file" and error["param"] == "training_file"
            assert "line 2: " in error["message"] and 'did you mean "assistant"' in error["message"]
            assert "line 4: " in error["message"]
            assert next(m for m in w.messages(bad) if m.startswith("line ")).startswith("line 2: ")
        finally:
            await w.close()

    run(scenario())
