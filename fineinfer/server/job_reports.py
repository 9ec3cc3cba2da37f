"""Writes what the engine reports of its job into the store; the one place that progress, evaluations, checkpoints and
ends pass by (no torch).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from fineinfer.messages import (
    AdapterRejected,
    FromEngine,
    JobCheckpoint,
    JobEnded,
    JobEval,
    JobNote,
    JobProgress,
    JobStarted,
    JobUsage,
)
from fineinfer.server.job_endings import apply_end
from fineinfer.server.job_params import JobRequest
from fineinfer.store import TRAINING, CheckpointRecord, JobRecord, Store, new_id, now

logger = logging.getLogger(__name__)
JobWatcher = Callable[[JobRecord, FromEngine], None]
_LEVELS = ("info", "warn", "error")
_COPIED = ("train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy")  # of a step, to its checkpoint


class JobReports:
    """Commits the engine's messages; those of a job that has ended change nothing.

    Args:
        store: The registry.

    Attributes:
        watchers: Called with the job as it is now and the message, after ``JobStarted``, ``JobProgress``, ``JobEval``,
            ``JobCheckpoint`` or ``JobEnded`` was committed. They must be quick, and their errors are only logged.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.watchers: list[JobWatcher] = []

    def apply(self, message: FromEngine) -> None:
        """Commit one message and tell the watchers, unless it came too late to count."""
        if isinstance(message, JobUsage):
            self._store.jobs.record_usage(message.job_id, message.device_s)
        elif isinstance(message, AdapterRejected):
            self._on_rejected(message)
        elif isinstance(message, JobNote):
            if self._store.jobs.get(message.job_id) is not None:
                level = message.level if message.level in _LEVELS else "info"
                self._store.jobs.add_event(message.job_id, level, message.message, dict(message.data))
        elif isinstance(message, (JobStarted, JobProgress, JobEval, JobCheckpoint, JobEnded)) and self._commit(message):
            self._tell(message)

    def _commit(self, message: JobStarted | JobProgress | JobEval | JobCheckpoint | JobEnded) -> bool:
        if isinstance(message, JobEnded):
            return apply_end(self._store, message)
        if isinstance(message, JobProgress):
            return self._on_progress(message)
        if isinstance(message, JobEval):
            return self._store.jobs.record_eval(
                message.job_id, message.step, message.loss, message.mean_token_accuracy, message.best
            )
        return self._on_checkpoint(message) if isinstance(message, JobCheckpoint) else self._on_started(message)

    def _tell(self, message: JobStarted | JobProgress | JobEval | JobCheckpoint | JobEnded) -> None:
        job = self._store.jobs.require(message.job_id)
        for watcher in self.watchers:
            try:
                watcher(job, message)
            except Exception:  # a tracker must never hold up the job
                logger.exception("a watcher of job %s failed", job.id)

    def _on_rejected(self, message: AdapterRejected) -> None:
        logger.error("adapter %s@%d cannot be served: %s", message.name, message.step, message.message)
        adapter = self._store.adapters.resolve(f"{message.name}@{message.step}")
        if adapter is not None and adapter.job_id is not None:
            text = f"{message.name}@{message.step} cannot be served: {message.message}"
            self._store.jobs.add_event(adapter.job_id, "error", text)

    def _on_started(self, message: JobStarted) -> bool:
        if self._store.jobs.get(message.job_id) is None:
            return False
        how = "Fine-tuning job started" if message.step == 0 else f"Fine-tuning job resumed from step {message.step}"
        data = msgspec.to_builtins(message)
        facts = {key: data[key] for key in ("step", "total_steps", "steps_per_epoch", "num_trainable_parameters")}
        self._store.jobs.add_event(message.job_id, "info", how, facts)
        return True

    def _on_progress(self, message: JobProgress) -> bool:
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
        return self._store.jobs.record_progress(message.job_id, message.step, data, message.trained_tokens)

    def _on_checkpoint(self, message: JobCheckpoint) -> bool:
        """Commit checkpoint and adapter version together; False if the job has ended."""
        store = self._store
        with store.db.transaction():
            job = store.jobs.get(message.job_id)
            if job is None or job.status not in TRAINING:
                return False
            found = store.jobs.metrics_of(job.id, message.step)
            current = self._is_for_all(job, message.step, found.get("valid_loss"))
            version = store.adapters.publish(
                job.name, message.step, message.version, message.directory, job.id, current=current
            )
            metrics: dict[str, Any] = {"step": message.step, "train_loss": message.loss}
            metrics |= {key: found[key] for key in _COPIED if key in found}
            # every evaluation is over the whole set
            metrics |= {f"full_{key}": found[key] for key in _COPIED if key in found and key.startswith("valid_")}
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
            served = f"{record.name} and {job.name}" if version.current else record.name
            store.jobs.add_event(job.id, "info", f"Checkpoint created at step {message.step}; served as {served}")
        return True

    def _is_for_all(self, job: JobRecord, step: int, loss: float | None) -> bool:
        """Whether the plain name is to mean this version while the job runs."""
        request = msgspec.convert(job.request, JobRequest)
        if request.serve == "off":
            return False
        served = any(version.current for version in self._store.adapters.versions(job.name))
        if request.publish != "if_better" or not served:
            return True
        others = [value for other, value in self._store.jobs.checkpoint_losses(job.id).items() if other != step]
        return loss is not None and all(loss < other for other in others)
