"""A manager, two api workers and a scripted engine; and a model of what they must agree on, written without their code.

Users talk over HTTP. The engine's words wait in its outbox until they are delivered, so orders and answers cross. At
every await of the manager something else may happen, and it may be killed at any write to the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from fineinfer.data.packed import DatasetSummary, write_summary
from fineinfer.messages import (
    CancelJob,
    EngineInfo,
    JobCheckpoint,
    JobEnded,
    JobProgress,
    JobStarted,
    PauseJob,
    RemoveAdapter,
    SetAdapter,
    StartJob,
)
from fineinfer.server import routes_fine_tuning, routes_models
from fineinfer.server.boundary import Boundary
from fineinfer.server.errors import install_error_handlers
from fineinfer.server.job_creation import add_file, create_job
from fineinfer.server.job_manager import MAX_ENGINE_DEATHS, JobManager, JobSettings
from fineinfer.server.job_params import JobRequest
from fineinfer.server.metrics import ServerMetrics
from fineinfer.store import NameTakenError, Store

JOBS = "/v1/fine_tuning/jobs"
KEYS, NAMES, STEPS = ("key-0", "key-1"), ("a", "b", "c", "d", "e", "f"), 5
ENDED = {"succeeded", "failed", "cancelled"}
AT_ENGINE = {"running", "pausing"}
ACTIONS: dict[str, dict[str, str]] = {
    "cancel": dict.fromkeys(("validating_files", "queued", "running", "pausing", "paused", "finalizing"), "cancelled"),
    "pause": {"queued": "paused", "running": "pausing"},
    "resume": {"paused": "queued"},
}
LEGAL = {(old, new) for moves in ACTIONS.values() for old, new in moves.items()} | {
    ("validating_files", "queued"), ("validating_files", "failed"), ("queued", "running"), ("running", "paused"),
    ("running", "finalizing"), ("running", "failed"), ("pausing", "paused"), ("pausing", "finalizing"),
    ("pausing", "failed"), ("finalizing", "succeeded"), ("finalizing", "failed"),
}  # fmt: skip
SAID = {"cancelled": "The job has been cancelled", "failed": "The job failed: ",
        "succeeded": "The job has successfully completed"}  # fmt: skip


class Killed(BaseException):
    """kill -9 of the supervisor, and the engine with it."""


class WorkerFault(Exception):
    """An api worker breaks in the middle of a request."""


@dataclass
class Job:
    """What the model knows of a job."""

    id: str
    name: str
    owner: str
    priority: int = 0
    bad: bool = False
    off: bool = False  # serve_while_training
    status: str = "validating_files"
    deaths: int = 0
    newest: int = 0  # update that was told of
    best: int | None = None  # what the engine said at the end of its last run
    steps: set[int] = field(default_factory=set)  # of its checkpoints


class Life:
    """One server's life; every method is something that happens."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.store = Store(self.path)
        self.store.db.execute("CREATE TABLE moves (job TEXT, old TEXT, new TEXT)")
        self.store.db.execute(
            "CREATE TRIGGER log_moves AFTER UPDATE ON jobs WHEN old.status <> new.status "
            "BEGIN INSERT INTO moves VALUES (old.id, old.status, new.status); END"
        )
        self.workers = [_Worker(self.path) for _ in range(2)]
        self.files = {bad: self._file(b"bad\n" if bad else b"good\n") for bad in (False, True)}
        self.jobs: dict[str, Job] = {}  # oldest first
        self.keys: dict[tuple[int, str], tuple[Any, str]] = {}  # (user, key) -> (body, job)
        self.last_start: dict[str, int] = {}  # owner -> count
        self.num_starts = self.calls = self.boots = 0
        self.current: dict[str, int | None] = {}  # name -> step
        self.mid: list[tuple[str, int, int]] = []  # what happens at the manager's next awaits
        self.fuse: int | None = None  # writes of the manager until it is killed
        self.engine_starts_anew(up=False)
        self.manager = self._new_manager()

    def _file(self, content: bytes) -> str:
        path = self.path / "upload"
        path.write_bytes(content)
        return add_file(self.store, path, "f", "fine-tune").id

    def _new_manager(self) -> JobManager:
        execute = self.store.db.execute

        def fused(sql: str, *args: Any) -> int:
            if self.fuse is not None:
                if self.fuse == 0:
                    raise Killed
                self.fuse -= 1
            return execute(sql, *args)

        self.store.db.execute = fused  # type: ignore[method-assign]
        return JobManager(self.store, self.path, JobSettings(base_model="base"), self._send)

    def pick(self, index: int) -> Job | None:
        """The newest jobs come up more often than the old ones, which have ended."""
        jobs = list(self.jobs.values())[-6:]
        return jobs[index % len(jobs)] if jobs else None

    # ------------------------------------------------------------ users

    def http(self, worker: int, method: str, path: str, user: int, **more: Any) -> Any:
        self.calls += 1
        headers = {"authorization": f"Bearer {KEYS[user]}"} | more.pop("headers", {})
        answer = self.workers[worker].client.request(method, path, headers=headers, **more)
        assert answer.status_code != 409 or answer.headers["x-should-retry"] == "false"
        return answer

    def create(self, worker: int, user: int, name: str, key: str | None, bad: bool = False, fault: int = -1) -> None:
        """``fault``: the worker breaks at this write; then the client tries again, as the SDK does."""
        body = {"model": "base", "training_file": self.files[bad], "suffix": name}
        headers = {} if key is None else {"idempotency-key": key}
        self.workers[worker].fuse = fault
        answer = self.http(worker, "POST", JOBS, user, json=body, headers=headers)
        if answer.status_code == 500:
            assert self.workers[worker].fuse == -1 and fault >= 0
            answer = self.http(1 - worker, "POST", JOBS, user, json=body, headers=headers)
        self.workers[worker].fuse = -1
        known = None if key is None else self.keys.get((user, key))
        if known is not None:
            if known[0] == body:
                assert answer.json()["id"] == known[1] and answer.json()["status"] == self.jobs[known[1]].status
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "idempotency_key_reused")
            return
        if not self.is_free(name):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_name_taken")
            return
        assert answer.status_code == 200 and answer.json()["id"] not in self.jobs, answer.text
        job = Job(answer.json()["id"], name, f"user {user}", bad=bad)
        self.jobs[job.id] = job
        if key is not None:
            self.keys[user, key] = (body, job.id)

    def create_local(self, name: str, priority: int, off: bool) -> None:
        """One that is not made by a user: no owner, and settings of its own."""
        request = JobRequest(
            model="base", training_file=self.files[False], suffix=name, priority=priority,
            serve="off" if off else "checkpoint",
        )  # fmt: skip
        try:
            record = create_job(self.workers[0].store, request)
        except NameTakenError:
            assert not self.is_free(name)
            return
        assert self.is_free(name)
        self.jobs[record.id] = Job(record.id, name, "", priority, off=off)

    def is_free(self, name: str) -> bool:
        mine = [job for job in self.jobs.values() if job.name == name]
        return name not in self.current and all(job.status in ENDED for job in mine)

    def act(self, worker: int, user: int, action: str, index: int) -> None:
        job = self.pick(index)
        path = "ftjob-none" if job is None else job.id
        answer = self.http(worker, "POST", f"{JOBS}/{path}/{action}", user)
        if job is None:
            assert answer.status_code == 404
        elif job.status not in ACTIONS[action]:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "job_state_conflict")
            assert answer.headers["x-should-retry"] == "false"
        else:
            job.status = ACTIONS[action][job.status]
            assert (answer.status_code, answer.json()["status"]) == (200, job.status)
            if action == "resume":
                job.deaths = 0

    def get(self, worker: int, user: int, index: int) -> None:
        job = self.pick(index)
        if job is not None:
            shown = self.http(worker, "GET", f"{JOBS}/{job.id}", user).json()
            assert shown["status"] == job.status
            order = self.order()
            assert shown["queue_position"] == (order.index(job.id) + 1 if job.id in order else None)

    def delete_model(self, worker: int, user: int, name: str) -> None:
        answer = self.http(worker, "DELETE", f"/v1/models/{name}", user)
        if name not in self.current:
            assert answer.status_code == 404
        elif any(job.name == name and job.status not in ENDED for job in self.jobs.values()):
            assert answer.status_code == 409
        else:
            assert answer.status_code == 200
            del self.current[name]

    def order(self) -> list[str]:
        """Who starts next, and so on: picked one by one."""
        queue = [job for job in self.jobs.values() if job.status == "queued"]
        last, count, order = dict(self.last_start), self.num_starts, list[str]()
        ages = {job_id: age for age, job_id in enumerate(self.jobs)}
        while queue:
            job = min(queue, key=lambda job: (job.priority, last.get(job.owner, 0), ages[job.id]))
            queue.remove(job)
            count += 1
            last[job.owner] = count
            order.append(job.id)
        return order

    # ------------------------------------------------------------ the manager

    def turn(self, mid: list[tuple[str, int, int]], fuse: int | None = None) -> None:
        """One turn, and the data child it started, to the end. ``mid`` happens meanwhile; killed at the fuse's end."""
        self._will_settle()
        self._run(self._turn(), mid, fuse)

    async def _turn(self) -> None:
        await self.manager._turn()
        validation = self.manager._validation
        if validation is not None and validation._task is not None:
            await validation._task
            await asyncio.sleep(0)

    def _run(self, what: Any, mid: list[tuple[str, int, int]], fuse: int | None = None) -> None:
        self.mid, self.fuse = mid, fuse
        try:
            self.loop.run_until_complete(what)
        except Killed:
            self.server_dies()
        finally:
            self.mid, self.fuse = [], None

    def _will_settle(self) -> None:
        """What a turn does first."""
        for job in self.jobs.values():
            if job.status == "pausing" and self.manager._active != job.id:
                job.status = "paused"
            elif job.status == "finalizing":
                self._finished(job)

    def _finished(self, job: Job) -> None:
        job.status = "succeeded" if job.steps else "failed"
        if job.steps:
            self.current[job.name] = job.best if job.best in job.steps else max(job.steps)

    async def _send(self, message: Any) -> None:
        if self.up:
            self._engine_hears(message)
        await self.midway()
        await asyncio.sleep(0)

    async def midway(self) -> None:
        """An await of the manager."""
        if not self.mid:
            return
        kind, a, b = self.mid.pop(0)
        if kind == "die":
            raise Killed
        if kind == "engine dies":
            self._engine_dies()
        elif kind == "engine":
            self.engine_works(a, b)
            await self._deliver()
        elif kind == "create":
            self.create(a % 2, b % 2, NAMES[a % len(NAMES)], f"k{b % 4}")
        else:
            self.act(a % 2, b % 2, kind, b)

    def server_dies(self) -> None:
        """Supervisor and engine together; only the file of the store is left, and the model learns what got into it."""
        self.fuse = None
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending))
        self.store.close()
        self.store = Store(self.path)
        self.engine_starts_anew(up=False)
        for job in self.jobs.values():
            record = self.store.jobs.require(job.id)
            now = record.status.value
            if job.status == "queued" and now == "running":
                self._note_start(job)
            job.status, job.deaths = now, record.num_engine_deaths
            told = self.store.db.first("SELECT max(step) AS step FROM events WHERE job_id = ?", job.id)
            job.newest = (told and told["step"]) or 0
            job.steps = {checkpoint.step for checkpoint in self.store.jobs.checkpoints(job.id)[0]}
        self.current = {a.name: None for a in self.store.adapters.all()}
        self.current |= {a.name: a.step for a in self.store.adapters.current()}
        self.manager = self._new_manager()

    # ------------------------------------------------------------ the engine

    def engine_starts_anew(self, up: bool = True) -> None:
        self.up = up
        self.in_engine: str | None = None
        self.told: str | None = None  # of the job there
        self.asked = False  # whether the manager has sent a pause or cancel since its last StartJob
        self.outbox: list[Any] = []
        self.engine_names: dict[str, int] = {}
        self.engine_steps: set[tuple[str, int]] = set()

    def boot(self, mid: list[tuple[str, int, int]]) -> None:
        if self.up:
            return
        self.boots += 1
        self.engine_starts_anew()
        info = EngineInfo(
            boot_id=str(self.boots), base_model="base", max_model_len=64, max_request_tokens=64, vocab_size=9,
            eos_token_ids=[2], dtype="float32", device="cpu", memory_plan={},
        )  # fmt: skip
        self._run(self.manager.on_engine_up(info), mid)

    def engine_dies(self) -> None:
        if self.up:
            self._engine_dies()

    def _engine_dies(self) -> None:
        if not self.up:
            return
        active = self.manager._active
        self.engine_starts_anew(up=False)
        self.manager.on_engine_down()
        job = None if active is None else self.jobs[active]
        if job is not None and job.status == "running":
            job.deaths += 1
            if job.deaths >= MAX_ENGINE_DEATHS:
                job.status = "failed"

    def _engine_hears(self, message: Any) -> None:
        if isinstance(message, StartJob):
            assert self.in_engine is None or self.told, "the engine has one job at a time"
            if self.in_engine is not None:  # which it lets go of, as it was told before
                self.outbox.append(JobEnded(job_id=self.in_engine, status=str(self.told)))
            job = self.jobs[message.job_id]
            if job.status == "queued":
                assert self.order()[0] == job.id, "out of turn"
                self._note_start(job)
                job.status = "running"
            assert job.status == "running"
            self.in_engine, self.told, self.asked = job.id, None, False
            self.outbox.append(JobStarted(
                job_id=job.id, step=0, total_steps=STEPS, steps_per_epoch=STEPS, num_trainable_parameters=1
            ))  # fmt: skip
        elif isinstance(message, (PauseJob, CancelJob)):
            stop, self.asked = "paused" if isinstance(message, PauseJob) else "cancelled", True
            assert self.jobs[message.job_id].status == ("pausing" if stop == "paused" else "cancelled")
            if message.job_id == self.in_engine:
                assert self.told != stop, "said once"
                self.told = stop
            else:  # it has just ended; the engine answers that it does not have it
                self.outbox.append(JobEnded(job_id=message.job_id, status=stop))
        elif isinstance(message, SetAdapter):
            adapter = self.workers[0].store.adapters.resolve(f"{message.name}@{message.step}")
            assert adapter is not None and adapter.version == message.version, "the store commits first"
            self.engine_steps.add((message.name, message.step))
            if message.current:
                self.engine_names[message.name] = message.step
        elif isinstance(message, RemoveAdapter):
            self.engine_names.pop(message.name, None)
            self.engine_steps = {key for key in self.engine_steps if key[0] != message.name}

    def _note_start(self, job: Job) -> None:
        self.num_starts += 1
        self.last_start[job.owner] = self.num_starts

    def engine_works(self, what: int, step: int) -> None:
        """The engine does something and says so; nobody has heard it yet."""
        job_id = self.in_engine
        if job_id is None or not self.up:
            return
        step = step % STEPS + 1
        kind = what % 8
        if kind < 2 or (kind < 4 and self.told is None):
            self.outbox.append(JobProgress(
                job_id=job_id, step=step, total_steps=STEPS, epoch=1.0, loss=1.0, learning_rate=1.0, grad_norm=1.0,
                mean_token_accuracy=1.0, trained_tokens=step, processed_tokens=step, tokens_per_s=1.0, eta_s=1.0,
            ))  # fmt: skip
            if kind > 0:
                self.outbox.append(JobCheckpoint(
                    job_id=job_id, name=self.jobs[job_id].name, step=step, version=f"{job_id}-{step}", directory="/d",
                    checkpoint_dir="/c", loss=1.0, trained_tokens=step, final=False,
                ))  # fmt: skip
            return
        self.in_engine = None
        if kind < 6 and self.told is not None:
            self.outbox.append(JobEnded(job_id=job_id, status=self.told))
        elif kind == 6:
            self.outbox.append(JobEnded(job_id=job_id, status="paused", error_code="disk_full", error_message="full"))
        elif kind == 5:
            self.outbox.append(JobEnded(job_id=job_id, status="failed", error_message="it broke"))
        else:
            self.outbox.append(JobEnded(job_id=job_id, status="succeeded", best_step=step if what % 3 else None))

    def deliver(self, mid: list[tuple[str, int, int]], fuse: int | None = None) -> None:
        """The manager hears the engine's next word."""
        self._run(self._deliver(), mid, fuse)

    async def _deliver(self) -> None:
        if not self.outbox:
            return
        message = self.outbox.pop(0)
        job = self.jobs[message.job_id]
        late = isinstance(message, JobEnded) and (
            self.manager._active != job.id
            or (message.status == "paused" and message.error_code is None and not self.asked)
        )
        if job.status in AT_ENGINE and not late:
            if isinstance(message, JobProgress):
                job.deaths = 0 if message.step > job.newest else job.deaths
                job.newest = max(job.newest, message.step)
            elif isinstance(message, JobCheckpoint):
                job.steps.add(message.step)
                old = self.current.get(job.name)
                self.current[job.name] = message.step if not job.off or old == message.step else old
            elif isinstance(message, JobEnded):
                if message.status == "succeeded":
                    job.best = message.best_step  # which must survive a crash from now on
                    self._finished(job)
                else:
                    job.status = message.status
        await self.manager.on_engine_message(message)

    # ------------------------------------------------------------ what holds

    def check(self) -> None:
        """What is true at any time."""
        store = self.workers[1].store
        found = {job.id: job for job in store.jobs.page(limit=1000)[0]}
        assert {job_id: record.status.value for job_id, record in found.items()} == {
            job.id: job.status for job in self.jobs.values()
        }
        for record in found.values():
            status = record.status.value
            assert (record.finished_at is not None) == (status in ENDED)
            assert (record.error is not None) == (status == "failed")
            assert bool(record.result_files) == (status == "succeeded")
            job = self.jobs[record.id]
            assert record.num_engine_deaths == job.deaths
            assert {checkpoint.step for checkpoint in store.jobs.checkpoints(job.id)[0]} == job.steps
            versions = {version.step for version in store.adapters.versions(job.name) if version.job_id == job.id}
            assert versions == job.steps or (not versions and status in ENDED), "both are committed, or neither"
        assert sum(job.status in AT_ENGINE for job in self.jobs.values()) <= 1
        means: dict[str, int | None] = {adapter.name: None for adapter in store.adapters.all()}
        assert means | {a.name: a.step for a in store.adapters.current()} == self.current

    def check_when_calm(self) -> None:
        """What a turn without surprises brings about: nothing is forgotten, and the engine is told what it must."""
        if not self.up:
            self.boot([])
        for _ in range(len(self.jobs) + 2):  # a validation each
            self.turn([])
        self.check()
        statuses = [job.status for job in self.jobs.values()]
        assert "validating_files" not in statuses and "finalizing" not in statuses
        active = self.manager._active
        assert all(job.status not in AT_ENGINE or job.id == active for job in self.jobs.values())
        if active is None:
            assert "queued" not in statuses, "the queue stands still"
        elif self.in_engine is not None:
            assert self.in_engine == active
            expected = {"running": None, "pausing": "paused"}.get(self.jobs[active].status, "cancelled")
            assert self.told == expected, "it keeps its memory"
        assert self.engine_names == {name: step for name, step in self.current.items() if step is not None}
        assert self.engine_steps == {(a.name, a.step) for a in self.store.adapters.all()}

    def check_history(self) -> None:
        """Every move was legal, and the events tell the same story."""
        moves: dict[str, list[tuple[str, str]]] = {job_id: [] for job_id in self.jobs}
        for row in self.store.db.rows("SELECT * FROM moves ORDER BY rowid"):
            moves[row["job"]].append((row["old"], row["new"]))
        for job in self.jobs.values():
            path = moves[job.id]
            assert set(path) <= LEGAL, path
            assert [old for old, _ in path] == ["validating_files", *(new for _, new in path)][:-1] or not path
            said = [event.message for event in self.store.jobs.events(job.id, limit=10_000)[0]]
            assert said[-1] == f"Created fine-tuning job: {job.id}"
            for status, text in SAID.items():
                assert sum(message.startswith(text) for message in said) == (job.status == status)
            paused = sum(new == "paused" for _, new in path)
            assert sum(message.startswith("The job has been paused") for message in said) == paused
            resumed = sum(message.startswith("The job has been resumed") for message in said)
            assert resumed == sum(old == "paused" and new == "queued" for old, new in path)
            metrics = [event.step for event in self.store.jobs.metrics(job.id)]
            assert len(metrics) == len(set(metrics))
        results = {file for record in self.store.jobs.page(limit=1000)[0] for file in record.result_files}
        known = results | set(self.files.values())
        assert {path.name for path in (self.path / "files").iterdir()} >= known
        folders = {path.name for path in (self.path / "jobs").iterdir()}
        assert folders == set(self.jobs), "a job's folder is there, and no other"

    def close(self) -> None:
        self.loop.close()
        self.store.close()
        for worker in self.workers:
            worker.close()
        self.folder.cleanup()


class _Worker:
    """An api process: its own connection to the store, its own HTTP application; may break at a write."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path)
        self.fuse = -1
        execute = self.store.db.execute

        def fused(sql: str, *args: Any) -> int:
            if self.fuse == 0:
                self.fuse = -1
                raise WorkerFault
            self.fuse -= self.fuse > 0
            return execute(sql, *args)

        self.store.db.execute = fused  # type: ignore[method-assign]
        app = FastAPI()
        app.state.store, app.state.engine = self.store, self
        app.state.settings = types.SimpleNamespace(served_model_name="base")
        install_error_handlers(app)
        app.add_middleware(Boundary, api_keys=KEYS, metrics=ServerMetrics("fineinfer:", "base", lambda: None))
        for module in (routes_fine_tuning, routes_models):
            app.include_router(module.router)
        self._open = contextlib.ExitStack()
        self.client = self._open.enter_context(TestClient(app, raise_server_exceptions=False))

    info = None

    async def notify_store_changed(self) -> None:
        """The manager is turned by hand."""

    def close(self) -> None:
        self._open.close()
        self.store.close()


def scripted_child(life: Life) -> Any:
    """A data child without a process, for ``Validation._run_child``."""

    async def run_child(validation: Any, folder: Path) -> int:
        await life.midway()
        await asyncio.sleep(0)
        job = life.jobs[validation.job_id]
        bad = (folder / "training.jsonl").read_bytes() == b"bad\n"
        (folder / "prepare.log").touch()
        if not bad:
            write_summary(folder, DatasetSummary(
                sha256="d", source_sha256="s", examples=4, tokens=4, trainable_tokens=2, longest=1, max_seq_length=64,
                masking="prefix",
            ))  # fmt: skip
        if job.status == "validating_files":
            job.status = "failed" if bad else "queued"
        return 1 if bad else 0

    return run_child
