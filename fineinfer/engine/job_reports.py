"""What the engine tells the supervisor of the running job."""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec

from fineinfer.engine.job_memory import NoMemoryNowError
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.rungs import LadderStep
from fineinfer.messages import JobEnded, JobNote, JobProgress, JobStarted
from fineinfer.training.checkpoint import DiskFullError
from fineinfer.training.errors import TrainingError
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)

RATE_UPDATES = 16  # the rate shown is the mean over this many updates


class JobReports:
    """Sends a job's events, and keeps what statistics show of them.

    Args:
        outbox: To the supervisor.

    Attributes:
        last_progress: The newest update since a job was started.
        total_tokens: Of all updates.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.last_progress: JobProgress | None = None
        self.total_tokens = 0
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_UPDATES)  # (when, step, tokens) of updates

    def started(self, trainer: ParkableTrainer) -> None:
        """The job's trainer is there."""
        self.last_progress = None
        self._recent.clear()
        self._recent.append((time.perf_counter(), trainer.step, trainer.cursor.processed_tokens))
        self._outbox.notify(
            JobStarted(
                job_id=trainer.job_id,
                step=trainer.step,
                total_steps=trainer.total_steps,
                steps_per_epoch=trainer.steps_per_epoch,
                num_trainable_parameters=trainer.num_trainable_parameters,
            )
        )

    def send(self, trainer: ParkableTrainer) -> None:
        """What has come of the job since the last call: updates, evaluations, notes, checkpoints."""
        for progress in trainer.take_progress():
            self.last_progress = self._with_rate(progress)
            self._outbox.notify(self.last_progress)
        for evaluation in trainer.take_evals():
            self._outbox.notify(evaluation)
        for note in trainer.take_notes():
            self._outbox.notify(note)
        for checkpoint in trainer.take_checkpoints():
            self._outbox.notify(checkpoint)

    def _with_rate(self, progress: JobProgress) -> JobProgress:
        """Fill in tokens per second and the time left, over the last updates of this run; not of repeated ones."""
        if self._recent and progress.step <= self._recent[-1][1]:
            return progress
        self._recent.append((time.perf_counter(), progress.step, progress.processed_tokens))
        (begin_s, begin_step, begin_tokens), (end_s, _, _) = self._recent[0], self._recent[-1]
        if end_s - begin_s <= 0.0 or progress.step <= begin_step:
            return progress
        elapsed_s = end_s - begin_s
        rate = (progress.processed_tokens - begin_tokens) / elapsed_s
        left_s = (progress.total_steps - progress.step) * elapsed_s / (progress.step - begin_step)
        self.total_tokens += progress.processed_tokens - self._recent[-2][2]
        return msgspec.structs.replace(progress, tokens_per_s=rate, eta_s=left_s)

    def note(self, job_id: str, level: str, message: str) -> None:
        """Something the job's user should read."""
        self._outbox.notify(JobNote(job_id=job_id, level=level, message=message))

    def tell(self, job_id: str, steps: list[LadderStep]) -> None:
        """What the job's memory went through."""
        for step in steps:
            data = {"bytes": float(step.num_bytes), "ms": step.ms, "layers": float(step.num_layers)}
            self._outbox.notify(JobNote(job_id=job_id, level="info", message=step.told(), data=data))

    def ended(self, job_id: str, status: str, code: str | None = None, message: str | None = None) -> None:
        """The job's run is over."""
        self._outbox.notify(JobEnded(job_id=job_id, status=status, error_code=code, error_message=message))

    def ended_by(self, job_id: str, error: BaseException | None, status: str = "failed") -> None:
        """A full disk or a lack of memory pauses the job, another error fails it; none: ``status``."""
        if error is None:
            self.ended(job_id, status)
            return
        if not isinstance(error, TrainingError):
            logger.error("job %s failed", job_id, exc_info=error)
        code = error.code if isinstance(error, TrainingError) else "server_error"
        status = "paused" if isinstance(error, (DiskFullError, NoMemoryNowError)) else "failed"
        self.ended(job_id, status, code, str(error) or type(error).__name__)


def succeeded(trainer: ParkableTrainer) -> JobEnded:
    """Of a job that is finished."""
    return JobEnded(
        job_id=trainer.job_id,
        status="succeeded",
        best_step=trainer.best_step,
        early_stopped=trainer.early_stopped,
    )
