"""API actions, engine events and crashes in any order against a small model of the job's states."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fineinfer.data.packed import DatasetSummary, write_summary
from fineinfer.messages import CancelJob, EngineInfo, JobCheckpoint, JobEnded, JobProgress, SetAdapter, StartJob
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_manager import MAX_ENGINE_DEATHS, JobManager, JobSettings
from fineinfer.server.job_params import JobRequest
from fineinfer.server.job_validation import Validation
from fineinfer.store import TERMINAL, JobStateConflictError, JobStatus, NameTakenError, Store

TOTAL_STEPS = 5
NAMES = ("a", "b", "c")
TURNS = st.sampled_from([0, 1, 3])


class JobLife(RuleBasedStateMachine):
    """The model: status by job, what the engine holds, which names are published by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name))
        self.other = Store(Path(self.folder.name))  # an api worker's connection
        self.status: dict[str, JobStatus] = {}
        self.name_of: dict[str, str] = {}
        self.bad_files: set[str] = set()
        self.published: dict[str, tuple[str, int]] = {}  # name -> (job, step)
        self.deaths: dict[str, int] = {}
        self.boots = 0
        self.up = False
        self.in_engine: str | None = None
        self.sent: list[Any] = []
        self.manager = self._manager()

    def _manager(self) -> JobManager:
        return JobManager(self.store, self.store.state_dir, JobSettings(base_model="base"), self._send)

    async def _send(self, message: Any) -> None:
        if isinstance(message, StartJob):
            assert self.in_engine is None, "the engine has one job at a time"
            assert self.status[message.job_id] in (JobStatus.QUEUED, JobStatus.RUNNING)
            self.in_engine = message.job_id
            self.status[message.job_id] = JobStatus.RUNNING
        elif isinstance(message, CancelJob):
            assert message.job_id == self.in_engine and self.status[message.job_id] in TERMINAL
        elif isinstance(message, SetAdapter):
            adapter = self.other.adapters.resolve(f"{message.name}@{message.step}")
            assert adapter is not None and adapter.version == message.version, "the store commits first"
        self.sent.append(message)

    @initialize()
    def file(self) -> None:
        path = Path(self.folder.name) / "upload"
        path.write_text("{}\n")
        self.file_id = add_file(self.store, path, "f", "fine-tune").id
        self.create("a", False)
        self.restart(3)

    # ------------------------------------------------------------ users

    @rule(name=st.sampled_from(NAMES), bad=st.sampled_from([False, False, True]), num_turns=TURNS)
    def submit(self, name: str, bad: bool, num_turns: int) -> None:
        self.create(name, bad)
        self.turns(num_turns)

    def create(self, name: str, bad: bool) -> None:
        live = any(self.name_of[job] == name and self.status[job] not in TERMINAL for job in self.status)
        request = JobRequest(model="base", training_file=self.file_id, suffix=name)
        try:
            job = create_job(self.store, request)
        except NameTakenError:
            assert live or name in self.published
            return
        assert not live and name not in self.published
        self.status[job.id], self.name_of[job.id], self.deaths[job.id] = JobStatus.VALIDATING, name, 0
        if bad:
            self.bad_files.add(job.id)
            (self.store.job_dir(job.id) / "bad").touch()

    @precondition(lambda self: self.status)
    @rule(data=st.data(), num_turns=TURNS)
    def cancel(self, data: st.DataObject, num_turns: int) -> None:
        job = data.draw(st.sampled_from(list(self.status)))
        try:
            self.other.jobs.cancel(job)
        except JobStateConflictError:
            assert self.status[job] in TERMINAL
        else:
            assert self.status[job] not in TERMINAL
            self.status[job] = JobStatus.CANCELLED
        self.turns(num_turns)

    # ------------------------------------------------------------ processes

    @rule(num_turns=TURNS)
    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.turn()

    def turn(self) -> None:
        """One turn of the manager, and the data child it started, to the end."""
        had_validation = self.manager._validation is not None
        self.loop.run_until_complete(self._turn())
        if self.up and not had_validation:
            waiting = [job for job, status in self.status.items() if status is JobStatus.VALIDATING]
            if waiting:
                self.status[waiting[0]] = JobStatus.FAILED if waiting[0] in self.bad_files else JobStatus.QUEUED

    async def _turn(self) -> None:
        await self.manager._turn()
        validation = self.manager._validation
        if validation is not None and validation._task is not None:
            await validation._task
            await asyncio.sleep(0)

    @precondition(lambda self: not self.up)
    @rule(num_turns=TURNS)
    def restart(self, num_turns: int) -> None:
        self.engine_starts()
        self.turns(num_turns)

    def engine_starts(self) -> None:
        self.boots += 1
        self.up = True
        info = EngineInfo(
            boot_id=str(self.boots), base_model="base", max_model_len=64, max_request_tokens=64, vocab_size=9,
            eos_token_ids=[2], dtype="float32", device="cpu", memory_plan={},
        )  # fmt: skip
        self.loop.run_until_complete(self.manager.on_engine_up(info))

    @precondition(lambda self: self.up)
    @rule(whole_server=st.booleans())
    def crash(self, whole_server: bool) -> None:
        if whole_server:
            self.server_dies()
        else:
            self.engine_dies()

    def engine_dies(self) -> None:
        job, self.in_engine, self.up = self.in_engine, None, False
        self.manager.on_engine_down()
        if job is not None and self.status[job] is JobStatus.RUNNING:
            self.deaths[job] += 1
            if self.deaths[job] >= MAX_ENGINE_DEATHS:
                self.status[job] = JobStatus.FAILED

    def server_dies(self) -> None:
        """Supervisor and engine together; only the file of the store is left."""
        self.store.close()
        self.store = Store(Path(self.folder.name))
        self.in_engine, self.up = None, False
        self.manager = self._manager()

    # ------------------------------------------------------------ the engine's messages

    def tell(self, message: Any) -> None:
        self.loop.run_until_complete(self.manager.on_engine_message(message))

    @precondition(lambda self: self.in_engine is not None)
    @rule(step=st.integers(1, TOTAL_STEPS), saved=st.booleans())
    def train(self, step: int, saved: bool) -> None:
        self.progress(step)
        if saved:
            self.checkpoint(step)

    def progress(self, step: int) -> None:
        job = str(self.in_engine)
        self.tell(JobProgress(
            job_id=job, step=step, total_steps=TOTAL_STEPS, epoch=1.0, loss=1.0, learning_rate=1.0, grad_norm=1.0,
            mean_token_accuracy=1.0, trained_tokens=step, processed_tokens=step, tokens_per_s=1.0, eta_s=1.0,
        ))  # fmt: skip
        if self.status[job] is JobStatus.RUNNING:
            self.deaths[job] = 0

    def checkpoint(self, step: int) -> None:
        job = str(self.in_engine)
        name = self.name_of[job]
        self.tell(JobCheckpoint(
            job_id=job, name=name, step=step, version=f"{job}-{step}", directory="/d", checkpoint_dir="/c", loss=1.0,
            trained_tokens=step, final=False,
        ))  # fmt: skip
        if self.status[job] is JobStatus.RUNNING:
            self.published[name] = (job, step)

    @precondition(lambda self: self.in_engine is not None)
    @rule(end=st.sampled_from(["succeeded", "failed", "cancelled"]))
    def ended(self, end: str) -> None:
        job = str(self.in_engine)
        self.in_engine = None
        self.tell(JobEnded(job_id=job, status=end))
        if self.status[job] is JobStatus.RUNNING:
            has_adapter = self.published.get(self.name_of[job], ("", 0))[0] == job
            self.status[job] = JobStatus(end) if end != "succeeded" or has_adapter else JobStatus.FAILED

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_store_agrees(self) -> None:
        other = self.other
        found = {job.id: job for job in other.jobs.page(limit=100)[0]}
        assert {job: record.status for job, record in found.items()} == self.status
        for record in found.values():
            assert (record.finished_at is not None) == (record.status in TERMINAL)
            assert (record.error is not None) == (record.status is JobStatus.FAILED)
            assert bool(record.result_files) == (record.status is JobStatus.SUCCEEDED)
        assert sum(status is JobStatus.RUNNING for status in self.status.values()) <= 1
        current = {a.name: (a.job_id, a.step) for a in other.adapters.all() if a.current}
        assert current == self.published

    def teardown(self) -> None:
        self.loop.close()
        self.store.close()
        self.other.close()
        self.folder.cleanup()


@pytest.fixture(autouse=True)
def scripted_child(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_child(self: Any, folder: Path) -> int:
        (folder / "prepare.log").touch()
        if (folder / "bad").exists():
            return 1
        summary = DatasetSummary(
            sha256="d", source_sha256="s", examples=4, tokens=4, trainable_tokens=2, longest=1, max_seq_length=64,
            masking="prefix",
        )  # fmt: skip
        write_summary(folder, summary)
        return 0

    monkeypatch.setattr(Validation, "_run_child", run_child)


def test_jobs_are_never_lost_doubled_or_in_two_states() -> None:
    run_state_machine_as_test(
        JobLife,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
