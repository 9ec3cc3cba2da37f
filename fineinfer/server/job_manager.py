"""Moves fine-tuning jobs through their states, in the supervisor's event loop; the store is the truth (no torch).

Every change is committed before anyone acts on it, so a crash at any point is repaired by reading the store again:
a job found in ``validating_files`` is validated from the start, one found ``running`` is sent to the engine, which
goes on from its newest checkpoint. User actions come in through the store too: a cancelled job is terminal at once,
and whatever still works on it is stopped here.
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
    AdapterRejected,
    CancelJob,
    EngineInfo,
    FromEngine,
    JobCheckpoint,
    JobEnded,
    JobNote,
    JobProgress,
    JobStarted,
    JobUsage,
    StartJob,
    ToEngine,
    TrainingSettings,
)
from fineinfer.request import InvalidRequestError
from fineinfer.server.adapter_sync import AdapterSync
from fineinfer.server.job_creation import add_file, check_references, create_job
from fineinfer.server.job_params import Limits, check_together, make_request, parse_hyperparameters, parse_suffix
from fineinfer.server.job_results import write_result_file
from fineinfer.server.job_validation import JobSettings, Validation
from fineinfer.store import (
    CheckpointRecord,
    JobRecord,
    JobStateConflictError,
    JobStatus,
    NameTakenError,
    Store,
    new_id,
    now,
)

__all__ = ["JobManager", "JobSettings", "LocalJobError"]

logger = logging.getLogger(__name__)
POLL_S = 0.2
MAX_ENGINE_DEATHS = 3  # in a row, without one finished update: the job itself must be what kills the engine
_LEVELS = ("info", "warn", "error")


class LocalJobError(ValueError):
    """The ``--lora-train`` job cannot be created; the message is one line for the user."""


class JobManager:
    """The one writer of job states besides the user's cancel.

    Args:
        store: The supervisor's own registry connection.
        state_dir: Root of the artifacts.
        settings: The base model and the limits of this server.
        send: Sends a message to the engine; messages for a dead engine may be dropped.
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
        self._cancelling = False
        self._adapters = AdapterSync(store, send)
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
            if self._validation is not None:
                await self._validation.stop()

    async def _turn(self) -> None:
        """Bring engine and data child in line with the store."""
        self._remove_expired_files()
        await self._adapters.send_news()
        await self._stop_what_ended()
        self._validate_next()
        await self._start_next()

    def _remove_expired_files(self) -> None:
        for file_id in self._store.files.expired():
            if self._store.files.delete(file_id):
                self._store.file_path(file_id).unlink(missing_ok=True)

    async def _stop_what_ended(self) -> None:
        validation = self._validation
        if validation is not None and self._store.jobs.require(validation.job_id).status is not JobStatus.VALIDATING:
            validation.kill()
        if self._active is None or self._engine is None or self._cancelling:
            return
        if self._store.jobs.require(self._active).status is not JobStatus.RUNNING:
            self._cancelling = True
            await self._send(CancelJob(job_id=self._active))

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
        jobs = self._store.jobs
        job = next(iter(jobs.with_status(JobStatus.RUNNING)), None)
        if job is None:
            queued = jobs.with_status(JobStatus.QUEUED)
            if not queued:
                return
            try:
                job = jobs.transition(queued[0], JobStatus.RUNNING)
            except JobStateConflictError:  # cancelled this very moment
                self.wake()
                return
        self._active, self._cancelling = job.id, False
        await self._send(self._start_message(job))

    def _start_message(self, job: JobRecord) -> StartJob:
        dataset = job.dataset or {}
        return StartJob(
            job_id=job.id,
            name=job.name,
            base_model=self._settings.base_model,
            settings=msgspec.convert(job.settings, TrainingSettings),
            job_dir=str(self._store.job_dir(job.id)),
            adapters_dir=str(self._state_dir / "adapters"),
            dataset_sha256=dataset["sha256"],
            device_s=job.device_s,
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
            return
        self._store.jobs.add_event(job_id, "warn", "The engine stopped; the job goes on from its last checkpoint")
        if self._store.jobs.count_engine_death(job_id) >= MAX_ENGINE_DEATHS:
            message = f"The engine stopped {MAX_ENGINE_DEATHS} times in a row while it trained this job."
            self._fail(job_id, "engine_failed", message)

    async def on_engine_message(self, message: FromEngine) -> None:
        """Apply one job event of the engine to the store; events of a job that has ended change nothing."""
        if isinstance(message, JobEnded):
            self._on_ended(message)
        elif isinstance(message, JobProgress):
            self._on_progress(message)
        elif isinstance(message, JobUsage):
            self._store.jobs.record_usage(message.job_id, message.device_s)
        elif isinstance(message, JobCheckpoint):
            if self._on_checkpoint(message):
                await self._adapters.send_news()
        elif isinstance(message, AdapterRejected):
            logger.error("adapter %s@%d cannot be served: %s", message.name, message.step, message.message)
            adapter = self._store.adapters.resolve(f"{message.name}@{message.step}")
            if adapter is not None and adapter.job_id is not None:
                text = f"{message.name}@{message.step} cannot be served: {message.message}"
                self._store.jobs.add_event(adapter.job_id, "error", text)
        elif isinstance(message, (JobStarted, JobNote)) and self._store.jobs.get(message.job_id) is not None:
            self._on_story(message)

    def _on_story(self, message: JobStarted | JobNote) -> None:
        if isinstance(message, JobNote):
            level = message.level if message.level in _LEVELS else "info"
            self._store.jobs.add_event(message.job_id, level, message.message, dict(message.data))
            return
        how = "Fine-tuning job started" if message.step == 0 else f"Fine-tuning job resumed from step {message.step}"
        data = msgspec.to_builtins(message)
        facts = {key: data[key] for key in ("step", "total_steps", "steps_per_epoch", "num_trainable_parameters")}
        self._store.jobs.add_event(message.job_id, "info", how, facts)

    def _on_progress(self, message: JobProgress) -> None:
        job = self._store.jobs.get(message.job_id)
        data = {
            "step": message.step,
            "total_steps": message.total_steps,
            "epoch": message.epoch,
            "train_loss": message.loss,
            "train_mean_token_accuracy": message.mean_token_accuracy,
            "learning_rate": message.learning_rate,
            "grad_norm": message.grad_norm,
            "trained_tokens": message.trained_tokens,
            "processed_tokens": message.processed_tokens,
            "tokens_per_second": message.tokens_per_s,
            "eta_seconds": message.eta_s,
            "device_seconds": 0.0 if job is None else job.device_s,
        }
        self._store.jobs.record_progress(message.job_id, message.step, data, message.trained_tokens)

    def _on_checkpoint(self, message: JobCheckpoint) -> bool:
        """Commit checkpoint and adapter version together; False if the job has ended."""
        store = self._store
        with store.db.transaction():
            job = store.jobs.get(message.job_id)
            if job is None or job.status is not JobStatus.RUNNING:
                return False
            store.adapters.publish(job.name, message.step, message.version, message.directory, job.id)
            latest = job.progress or {}
            metrics = {"step": message.step, "train_loss": message.loss}
            if latest.get("step") == message.step:
                metrics["train_mean_token_accuracy"] = latest["train_mean_token_accuracy"]
            record = CheckpointRecord(
                id=new_id("ftckpt"),
                job_id=job.id,
                created_at=now(),
                step=message.step,
                name=f"{job.name}@{message.step}",
                version=message.version,
                metrics=metrics,
            )
            store.jobs.add_checkpoint(record)
            text = f"Checkpoint created at step {message.step}; served as {record.name} and {job.name}"
            store.jobs.add_event(job.id, "info", text)
        return True

    def _on_ended(self, message: JobEnded) -> None:
        if message.job_id == self._active:
            self._active = None
        job = self._store.jobs.get(message.job_id)
        if job is not None and job.status is JobStatus.RUNNING:
            if message.status == "succeeded":
                self._succeed(job)
            elif message.status == "cancelled":
                with contextlib.suppress(JobStateConflictError):
                    self._store.jobs.cancel(job.id)
            else:
                reason = message.error_message or "The engine gave no reason."
                self._fail(job.id, message.error_code or "server_error", reason)
        self.wake()

    def _succeed(self, job: JobRecord) -> None:
        adapter = self._store.adapters.resolve(job.name)
        if adapter is None or adapter.job_id != job.id:
            self._fail(job.id, "server_error", "The job ended without an adapter.")
            return
        try:
            job = self._store.jobs.transition(job, JobStatus.FINALIZING)
        except JobStateConflictError:  # cancelled this very moment
            return
        result = write_result_file(self._store, job)
        try:
            with self._store.db.transaction():
                self._store.files.add(result)
                self._store.jobs.transition(job, JobStatus.SUCCEEDED, result_files=[result.id])
                self._store.jobs.add_event(job.id, "info", f"New fine-tuned model created: {job.name}")
                used = {"device_seconds": job.device_s}
                self._store.jobs.add_event(job.id, "info", "The job has successfully completed", used)
        except JobStateConflictError:  # cancelled this very moment
            self._store.file_path(result.id).unlink(missing_ok=True)

    def _fail(self, job_id: str, code: str, message: str) -> None:
        with contextlib.suppress(JobStateConflictError), self._store.db.transaction():
            error = {"code": code, "message": message, "param": None}
            self._store.jobs.transition(self._store.jobs.require(job_id), JobStatus.FAILED, error=error)
            self._store.jobs.add_event(job_id, "error", f"The job failed: {message}")

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
            record = add_file(self._store, path, path.name, "fine-tune")
            evaluated = (
                None if validation is None else add_file(self._store, validation, validation.name, "fine-tune").id
            )
            request = make_request(parsed, model=limits.base_model, training_file=record.id, validation_file=evaluated,
                                   suffix=name, seed=seed)  # fmt: skip
            check_together(request)
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
