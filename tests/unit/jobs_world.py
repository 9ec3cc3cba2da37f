"""A job manager on a real store with a scripted engine."""

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
    EngineInfo,
    JobCheckpoint,
    JobEval,
    JobProgress,
    StartJob,
)
from fineinfer.server import job_manager, job_validation
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_manager import JobManager, JobSettings
from fineinfer.server.job_params import JobRequest
from fineinfer.store import JobRecord, JobStatus, Store

from ..waiting import LIMIT_S

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


def evaluation(job_id: str, step: int, loss: float, best: bool = True) -> JobEval:
    return JobEval(job_id=job_id, step=step, loss=loss, mean_token_accuracy=0.25, num_tokens=9, best=best)


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

    def submit(
        self, name: str, rows: list[Any] | None = None, *, owner: str = "", asked: Any = None, **hyperparameters: Any
    ) -> JobRecord:
        """``asked``: fields of the JobRequest, beside its hyperparameters."""
        path = self.store.state_dir / "upload"
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows or [ROW] * 4)))
        file = add_file(self.store, path, "train.jsonl", "fine-tune")
        request = JobRequest(
            model="base", training_file=file.id, suffix=name, hyperparameters=hyperparameters, **(asked or {})
        )
        job = create_job(self.store, request, owner=owner)
        self.manager.wake()
        return job

    def status(self, job: JobRecord) -> JobStatus:
        return self.store.jobs.require(job.id).status

    def messages(self, job: JobRecord) -> list[str]:
        return [event.message for event in self.store.jobs.events(job.id, limit=100)[0]][::-1]

    async def until(self, condition: Any) -> None:
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError("the condition never held")
            await asyncio.sleep(0.01)

    def started(self) -> list[str]:
        return [message.job_id for message in self.sent if isinstance(message, StartJob)]

    async def tell(self, *messages: Any) -> None:
        for message in messages:
            await self.manager.on_engine_message(message)

    def ask(self, action: str, job: JobRecord) -> JobRecord:
        """What an api worker does: pause, resume or cancel, then wake the manager."""
        changed: JobRecord = getattr(self.store.jobs, action)(job.id)
        self.manager.wake()
        return changed

    def served(self, name: str) -> int | None:
        """The step that a name means, or None."""
        adapter = self.store.adapters.resolve(name)
        return None if adapter is None else adapter.step

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
