"""Moves fine-tuning jobs through their states, in the supervisor's event loop; the store is the truth (no torch).

Every change is committed before anyone acts on it, so a crash at any point is repaired by reading the store again:
a job found in ``validating_files`` is validated from the start, one found ``running`` is sent to the engine, which
goes on from its newest checkpoint, one found ``pausing`` is paused, and one found ``finalizing`` is finished. User
actions come in through the store too: a cancelled job is terminal at once, a running one that is paused is
``pausing``, and whatever still works on them is stopped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.hashing import file_sha256
from fineinfer.messages import (
    CancelJob,
    EngineInfo,
    FromEngine,
    JobCheckpoint,
    JobEnded,
    PauseJob,
    StartJob,
    ToEngine,
    TrainingSettings,
)
from fineinfer.request import InvalidRequestError
from fineinfer.server.adapter_sync import AdapterSync
from fineinfer.server.job_creation import add_file, check_references, create_job
from fineinfer.server.job_endings import fail, finalize, pause
from fineinfer.server.job_params import (
    JobRequest,
    Limits,
    check_together,
    make_request,
    parse_hyperparameters,
    parse_suffix,
)
from fineinfer.server.job_reports import JobReports
from fineinfer.server.job_validation import JobSettings, Validation
from fineinfer.store import TERMINAL, JobRecord, JobStateConflictError, JobStatus, NameTakenError, Store

__all__ = ["JobManager", "JobSettings", "LocalJobError"]

logger = logging.getLogger(__name__)
POLL_S = 0.2
MAX_ENGINE_DEATHS = 3  # in a row, without one finished update: the job itself must be what kills the engine
RETRY_S = 5.0  # until a result file that could not be written is tried again


class LocalJobError(ValueError):
    """The ``--lora-train`` job cannot be created; the message is one line for the user."""


class JobManager:
    """The one writer of job states besides what users ask for: cancel, pause and resume.

    Args:
        store: The supervisor's own registry connection.
        state_dir: Root of the artifacts.
        settings: The base model and the limits of this server.
        send: Sends a message to the engine; messages for a dead engine may be dropped.

    Attributes:
        reports: What the engine says passes through it.
    """

    def __init__(
        self, store: Store, state_dir: Path, settings: JobSettings, send: Callable[[ToEngine], Awaitable[None]]
    ) -> None:
        self._store = store
        store.remove_unknown_files()
        self._state_dir = state_dir
        self._settings = settings
        self._send = send
        self._wake = asyncio.Event()
        self._engine: EngineInfo | None = None
        self._active: str | None = None  # the job the engine has, until its JobEnded
        self._stop: type[PauseJob | CancelJob] | None = None  # what the engine was last told of it
        self._unfinished: set[str] = set()  # jobs whose result file could not be written
        self._retry: asyncio.TimerHandle | None = None  # when it is tried again
        self._adapters = AdapterSync(store, send)
        self.reports = JobReports(store)
        self._validation: Validation | None = None
        self._publish_limits()

    def _publish_limits(self) -> None:
        """Let the api workers judge requests by the same limits."""
        longest = None if self._engine is None else self._engine.max_model_len
        limits = Limits(self._settings.base_model, self._settings.max_lora_rank, longest)
        self._store.set_meta("limits", msgspec.to_builtins(limits))

    # ------------------------------------------------------------ loop

    def wake(self) -> None:
        """Look at the store now; called on ``StoreChanged``."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled; a running data child dies with it."""
        try:
            while True:
                self._wake.clear()
                seen = self._store.db.data_version()
                await self._turn()
                while not self._wake.is_set() and self._store.db.data_version() == seen:
                    # not wait_for: in 3.11 it loses a cancellation that meets the event
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._wake.wait()
        finally:
            if self._retry is not None:
                self._retry.cancel()
            if self._validation is not None:
                await self._validation.stop()

    async def _turn(self) -> None:
        """Bring engine and data child in line with the store."""
        self._remove_expired_files()
        self._settle()
        await self._adapters.send_news()
        await self._stop_what_is_unwanted()
        self._validate_next()
        await self._start_next()

    def _remove_expired_files(self) -> None:
        for file_id in self._store.files.expired():
            if self._store.files.delete(file_id):
                self._store.file_path(file_id).unlink(missing_ok=True)

    def _settle(self) -> None:
        """Finish what a crash or a dead engine left half done."""
        for job in self._store.jobs.with_status(JobStatus.PAUSING):
            if job.id != self._active:  # no engine has it
                with contextlib.suppress(JobStateConflictError):
                    pause(self._store, job, None)
        for job in self._store.jobs.with_status(JobStatus.FINALIZING):
            if self._retry is None:
                self._finalize(job)

    def _finalize(self, job: JobRecord) -> None:
        try:
            finalize(self._store, job)
        except OSError as error:
            if job.id not in self._unfinished:
                self._unfinished.add(job.id)
                text = f"The result file cannot be written and is tried again: {error.strerror or error}"
                self._store.jobs.add_event(job.id, "error", text)
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.wake()

    async def _stop_what_is_unwanted(self) -> None:
        validation = self._validation
        if validation is not None and self._store.jobs.require(validation.job_id).status is not JobStatus.VALIDATING:
            validation.kill()
        if self._active is None or self._engine is None:
            return
        status = self._store.jobs.require(self._active).status
        stop = CancelJob if status in TERMINAL else PauseJob if status is JobStatus.PAUSING else None
        if stop is not None and stop is not self._stop:
            self._stop = stop
            await self._send(stop(job_id=self._active))

    def _validate_next(self) -> None:
        # the first validation waits for the engine: it knows the longest sequence, and the model is on disk then
        if self._validation is not None or self._engine is None:
            return
        waiting = self._store.jobs.with_status(JobStatus.VALIDATING)
        if waiting:
            self._validation = Validation(self._store, self._settings, waiting[0], self._engine.max_model_len)
            self._validation.start(self._on_validated)

    def _on_validated(self) -> None:
        self._validation = None
        self.wake()

    async def _start_next(self) -> None:
        if self._engine is None or self._active is not None:
            return
        job = next(iter(self._store.jobs.with_status(JobStatus.RUNNING)), None) or self._store.jobs.start_next()
        if job is None:
            return
        self._active, self._stop = job.id, None
        await self._send(self._start_message(job))

    def _start_message(self, job: JobRecord) -> StartJob:
        dataset, request = job.dataset or {}, msgspec.convert(job.request, JobRequest)
        return StartJob(
            job_id=job.id,
            name=job.name,
            base_model=self._settings.base_model,
            settings=msgspec.convert(job.settings, TrainingSettings),
            job_dir=str(self._store.job_dir(job.id)),
            adapters_dir=str(self._state_dir / "adapters"),
            dataset_sha256=dataset["sha256"],
            device_s=job.device_s,
            eval_sha256=(dataset.get("eval") or {}).get("sha256"),
            init_from=request.init_from,
            serve=request.serve,
            max_share=request.max_share,
        )

    # ------------------------------------------------------------ engine

    async def on_engine_up(self, info: EngineInfo) -> None:
        """A new engine is ready: give it every adapter, then the running job. Said twice, it does nothing."""
        if self._engine is not None and self._engine.boot_id == info.boot_id:
            return
        if self._engine is not None:
            self.on_engine_down()
        self._engine = info
        self._adapters.engine_is_new()
        self._publish_limits()
        await self._adapters.send_news()
        self.wake()

    def on_engine_down(self) -> None:
        """The engine died: what it had is started again in the next one, unless it keeps killing engines."""
        job_id, self._active = self._active, None
        self._engine = None
        self._adapters.engine_is_gone()
        if job_id is None:
            return
        job = self._store.jobs.require(job_id)
        if job.status is not JobStatus.RUNNING:
            self.wake()  # it may have been pausing: now it is paused
            return
        self._store.jobs.add_event(job_id, "warn", "The engine stopped; the job goes on from its last checkpoint")
        if self._store.jobs.count_engine_death(job_id) >= MAX_ENGINE_DEATHS:
            message = f"The engine stopped {MAX_ENGINE_DEATHS} times in a row while it trained this job."
            fail(self._store, job_id, "engine_failed", message)

    async def on_engine_message(self, message: FromEngine) -> None:
        """Apply one job event of the engine to the store; events of a job that has ended change nothing."""
        if isinstance(message, JobEnded):
            if message.job_id != self._active or self._is_late(message):
                return
            self._active = None
        self.reports.apply(message)
        if isinstance(message, JobEnded):
            self._settle()
            self.wake()
        elif isinstance(message, JobCheckpoint):
            await self._adapters.send_news()

    def _is_late(self, message: JobEnded) -> bool:
        """Whether it answers a pause of the run before, which had ended by itself when the engine heard of that."""
        return message.status == "paused" and message.error_code is None and self._stop is None

    # ------------------------------------------------------------ --lora-train

    def create_local_job(self, path: Path, name: str, overrides: Mapping[str, Any]) -> JobRecord:
        """The job of ``--lora-train``: made once for a file, name and settings, found again after a restart.

        Args:
            path: Training file; copied into the store.
            name: Served name of the adapter.
            overrides: Hyperparameters as in the REST body, ``seed``, and ``validation_file`` as a path.

        Raises:
            LocalJobError: The settings are wrong, the file cannot be read or the name is taken.
        """
        values = dict(overrides)
        limits = Limits(self._settings.base_model, self._settings.max_lora_rank)
        try:
            parse_suffix(name, limits.base_model, "--lora-train-name")
            seed = values.pop("seed", self._settings.defaults.seed)
            validation: Path | None = values.pop("validation_file", None)
            parsed = parse_hyperparameters(values, limits)
            content = file_sha256(path)
            facts = [content, name, limits.base_model, seed, parsed]
            if validation is not None:
                facts.append(file_sha256(validation))
            key = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
            job = self._known_local_job(key)
            if job is not None:
                return job
            # the ids come when nothing is wrong any more: a refused job leaves no file
            request = make_request(parsed, model=limits.base_model, training_file="", suffix=name, seed=seed,
                                   validation_file=None if validation is None else "")  # fmt: skip
            check_together(request)
            files = {"training_file": path} | ({} if validation is None else {"validation_file": validation})
            ids = {field: add_file(self._store, file, file.name, "fine-tune").id for field, file in files.items()}
            request = msgspec.structs.replace(request, **ids)
            job = create_job(self._store, check_references(self._store, request, limits), local_key=key)
        except (InvalidRequestError, NameTakenError) as error:
            raise LocalJobError(str(error)) from error
        except OSError as error:
            raise LocalJobError(f"{path}: {error.strerror or error}") from error
        self.wake()
        return job

    def _known_local_job(self, key: str) -> JobRecord | None:
        """The job to go on with. One that failed or was cancelled is replaced, and so are its adapter's versions."""
        job = self._store.jobs.by_local_key(key)
        if job is None:
            return None
        adapter = self._store.adapters.resolve(job.name)
        mine = adapter is not None and adapter.job_id == job.id
        if job.status in (JobStatus.FAILED, JobStatus.CANCELLED):
            if mine:
                self._store.adapters.delete(job.name)
            return None
        return None if job.status is JobStatus.SUCCEEDED and not mine else job
