"""The running job inside the engine: one unit per call, its events, its memory; a job's failure never leaves here."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from fineinfer.engine.job_memory import why_too_large
from fineinfer.engine.memory_ladder import MemoryLadder
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.rungs import LadderStep
from fineinfer.engine.unit_times import UnitTimes
from fineinfer.messages import JobEnded, JobNote, JobProgress, JobStarted, JobUsage, StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.scheduler import TrainingState
from fineinfer.training.checkpoint import CheckpointError, DiskFullError
from fineinfer.training.errors import TrainingError
from fineinfer.training.ops import pick_ops
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)

RATE_UPDATES = 16  # the rate shown is the mean over this many updates
USAGE_EVERY_S = 1.0  # device time between two reports of what the job has used; a kill loses at most that
AHEAD_S, MAX_BESIDE = 6e-3, 6  # of units in flight beside requests: enough for the device until the host looks again


@dataclass(frozen=True)
class TrainingWay:
    """On what jobs are trained.

    Attributes:
        backend: ``reference`` or ``triton``, as serving.
        stream: Of the jobs' work, beside requests; None: it runs between their steps, on the stream that is current.
        deterministic: See ``Trainer``.
    """

    backend: str
    stream: torch.cuda.Stream | None = None
    deterministic: bool = False


class _Pausing(NamedTuple):
    """A job that stands still; ``written`` when its resume point is on disk, ``beside`` requests or at once."""

    trainer: ParkableTrainer
    written: Future[None]
    beside: bool


class TrainingHost:
    """Owns the trainer of the one running job.

    Args:
        decoder: The shared base model.
        ladder: Memory.
        latency: Slice times.
        outbox: Job events go to the supervisor.
        how: On what it trains.
    """

    def __init__(
        self,
        decoder: Decoder,
        ladder: MemoryLadder,
        latency: LatencyModel,
        outbox: Outbox,
        how: TrainingWay,
    ) -> None:
        self._decoder = decoder
        self._ladder = ladder
        self._latency = latency
        self._outbox = outbox
        self._how, self._ops = how, pick_ops(how.backend, decoder.device)
        self._times = UnitTimes(latency, decoder.device, self.can_run_beside)
        self.job: StartJob | None = None
        self.trainer: ParkableTrainer | None = None
        self._pausing: _Pausing | None = None
        self.last_progress: JobProgress | None = None
        self.total_tokens = 0
        self._reported_s = self.yielded_s = 0.0  # of what the job has used of the device; see EngineStats
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_UPDATES)  # (when, step, tokens) of updates
        self._last_unit_s: float | None = None
        self._stood_back = False  # the last unit had to wait for memory: requests have the next turn

    # ------------------------------------------------------------ life of a job

    def start(self, message: StartJob) -> None:
        """Begin or resume a job; a second one while one runs is refused."""
        self.end_pause(wait=True)
        if self.trainer is not None:
            if self.job is not None and self.job.job_id != message.job_id:
                self._ended(message.job_id, "failed", "job_state_conflict", "another job is running")
            return
        self.job = message
        self._times.used_s = self._reported_s = message.device_s
        try:
            with torch.cuda.stream(self._how.stream):  # of None: the current one
                trainer = ParkableTrainer(self._decoder, message, self._keep, None, self._ops, self._how.deterministic)
            self.trainer = trainer
            if not self._ladder.can_ever_hold(trainer):
                raise TrainingError(why_too_large(trainer, self._ladder.shares()), "out_of_memory")
            trainer.check_disk_space()
            if not self._ladder.begin_job(trainer):
                trainer.park()  # requests have the memory now: it begins as one that was parked for them
        except Exception as error:
            self._fail(error)
            return
        self._recent.clear()
        self._recent.append((time.perf_counter(), trainer.step, trainer.cursor.processed_tokens))
        self._outbox.notify(
            JobStarted(
                job_id=message.job_id,
                step=trainer.step,
                total_steps=trainer.total_steps,
                steps_per_epoch=trainer.steps_per_epoch,
                num_trainable_parameters=trainer.num_trainable_parameters,
            )
        )

    def cancel(self, job_id: str) -> None:
        """Stop in mid-step and give the memory back."""
        if self.job is not None and self.job.job_id == job_id:
            self._close()
        if self._pausing is not None and self._pausing.trainer.job_id == job_id:
            self._pausing.trainer.close()
            self._pausing = None
        self._ended(job_id, "cancelled")

    def pause(self, job_id: str) -> None:
        """Stop in mid-step, give the memory back and write a checkpoint of the last finished update.

        The answer comes when that is on disk, from ``end_pause``. If it cannot be written the job is paused all the
        same, and goes on from the checkpoint before.
        """
        trainer = self.trainer
        if trainer is None or trainer.job_id != job_id:
            if self._pausing is None or self._pausing.trainer.job_id != job_id:
                self._ended(job_id, "paused")
            return
        try:
            written = trainer.leave()
        except Exception as error:
            self._fail(error)
            return
        self._pausing = _Pausing(trainer, written, not written.done())
        if self._pausing.beside:
            self.trainer = None  # it lives on in host memory
        self._close()
        self.end_pause()

    def end_pause(self, wait: bool = False) -> None:
        """Answer a pause whose resume point is written by now.

        Args:
            wait: Until it is.
        """
        if self._pausing is None or not (wait or self._pausing.written.done()):
            return
        (trainer, written, beside), self._pausing = self._pausing, None
        error = written.exception()
        if isinstance(error, CheckpointError):
            message = f"paused without a new checkpoint, the updates since the last one will run again: {error}"
            self._outbox.notify(JobNote(job_id=trainer.job_id, level="error", message=message))
            error = None
        self._send(trainer)
        if beside:
            trainer.close()
        self._ended_by(trainer.job_id, error, "paused")

    def park(self) -> None:
        """Write a checkpoint of the last finished update and let go; the job stays ``running`` and resumes later."""
        self.end_pause(wait=True)
        if self.trainer is None:
            return
        try:
            self.trainer.save_and_leave()
        except Exception as error:
            logger.warning("the job could not be checkpointed at shutdown: %s", error)
        self._send(self.trainer)
        self._close()

    def _keep(self, num_tokens: int, layer: int) -> bool:
        return self._ladder.keeps(self._decoder.spec.num_layers, layer)

    # ------------------------------------------------------------ one unit

    def should_finish(self, idle: bool) -> bool:
        """Whether the micro-batch under way is to go on for those that wait for its memory.

        Args:
            idle: No request can run meanwhile.
        """
        return self.trainer is not None and self.trainer.micro_batch_open and (idle or self._ladder.finishing)

    def state(self, now_s: float) -> TrainingState:
        """What the scheduler needs to decide."""
        trainer, stood_back = self.trainer, self._stood_back
        self._stood_back = False
        if trainer is None or stood_back or (not trainer.micro_batch_open and self._ladder.holding(now_s)):
            return TrainingState()
        ready = not trainer.parked or self._ladder.has_room_for(trainer)
        withheld = self._ladder.slots_withheld if trainer.parked else 0
        started = not trainer.at_update_boundary
        units = trainer.remaining_units() if started else trainer.next_update_units()
        left_s = sum(count * self._estimate(kind, tokens) for (kind, tokens), count in units.items())
        unit_s = left_s / max(1, units.total())
        max_share = 1.0 if self.job is None else self.job.max_share
        return TrainingState(ready, started, left_s, unit_s, withheld, self.can_run_beside, max_share)

    def _estimate(self, kind: str, num_tokens: int) -> float:
        """Seconds of a unit; before the first evaluation its units count as training's."""
        seconds = self._latency.estimate(kind, num_tokens)
        return seconds or self._latency.estimate(kind.removeprefix("eval_"), num_tokens)

    @property
    def can_run_beside(self) -> bool:
        """Whether units can run beside steps."""
        return self._how.stream is not None

    @property
    def job_device_s(self) -> float:
        """Seconds of the device that the job has used, over all engine processes."""
        return self._times.used_s

    def step_begins(self) -> bool:
        """Note that a step is launched now; whether the device still runs units then."""
        return self._times.step_begins()

    def feed(self) -> bool:
        """Launch a unit beside requests if too few are on their way; never waits for the device.

        Returns:
            False if there is nothing to launch now.
        """
        self._times.take_finished()
        trainer, on_their_way = self.trainer, self._times.num_pending
        if trainer is None or on_their_way >= MAX_BESIDE or (on_their_way and trainer.next_unit_waits):
            return False
        if self._times.pending_s >= AHEAD_S:
            return False
        return self.run_unit(beside=True)

    def run_unit(self, beside: bool = False) -> bool:
        """Run exactly one unit of the job.

        Args:
            beside: Requests run at the same time.

        Returns:
            False if it had to wait for memory.
        """
        trainer = self.trainer
        if trainer is None:
            return False
        try:
            if trainer.parked:
                self._stood_back = not self._ladder.unpark(trainer)
                return not self._stood_back
            if trainer.begins_micro_batch and not self._ladder.lease_micro_batch(trainer):
                self._stood_back = True
                return False
            self._timed_advance(trainer, beside)
            self._report(trainer)
        except Exception as error:
            self._fail(error)
        return True

    def _timed_advance(self, trainer: ParkableTrainer, beside: bool) -> None:
        now_s = time.perf_counter()
        if self._last_unit_s is not None and not trainer.at_update_boundary:
            self.yielded_s += max(0.0, now_s - self._last_unit_s)
        self._times.advance(trainer, beside)
        self._last_unit_s = time.perf_counter()

    def _report_usage(self) -> None:
        if self.job is not None and self.job_device_s > self._reported_s:
            self._outbox.notify(JobUsage(job_id=self.job.job_id, device_s=self.job_device_s))
            self._reported_s = self.job_device_s

    def _report(self, trainer: ParkableTrainer) -> None:
        """Send what the unit finished: updates, notes, checkpoints, the job."""
        if self.job_device_s - self._reported_s >= USAGE_EVERY_S:
            self._report_usage()
        self._send(trainer)
        if trainer.finished:
            ended = JobEnded(
                job_id=trainer.job_id,
                status="succeeded",
                best_step=trainer.best_step,
                early_stopped=trainer.early_stopped,
            )
            self._close()
            self._outbox.notify(ended)

    def _send(self, trainer: ParkableTrainer) -> None:
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
        """Fill in tokens per second and the time left, over the last updates of this run."""
        self._recent.append((time.perf_counter(), progress.step, progress.processed_tokens))
        (begin_s, begin_step, begin_tokens), (end_s, _, _) = self._recent[0], self._recent[-1]
        if end_s - begin_s <= 0.0 or progress.step <= begin_step:
            return progress
        elapsed_s = end_s - begin_s
        rate = (progress.processed_tokens - begin_tokens) / elapsed_s
        left_s = (progress.total_steps - progress.step) * elapsed_s / (progress.step - begin_step)
        self.total_tokens += progress.processed_tokens - self._recent[-2][2]
        return msgspec.structs.replace(progress, tokens_per_s=rate, eta_s=left_s)

    # ------------------------------------------------------------ ends

    def _fail(self, error: Exception) -> None:
        job_id = "" if self.job is None else self.job.job_id
        if self.trainer is not None:
            self._send(self.trainer)
        self._close()
        self._ended_by(job_id, error)

    def _ended_by(self, job_id: str, error: BaseException | None, status: str = "failed") -> None:
        """A full disk pauses the job, another error fails it; none: ``status``."""
        if error is None:
            self._ended(job_id, status)
            return
        if not isinstance(error, TrainingError):
            logger.error("job %s failed", job_id, exc_info=error)
        code = error.code if isinstance(error, TrainingError) else "server_error"
        status = "paused" if isinstance(error, DiskFullError) else "failed"
        self._ended(job_id, status, code, str(error) or type(error).__name__)

    def _close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken device must not keep a job from ending
            self._times.wait(0)
        self._report_usage()
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
        self.job = None
        self._times.forget()
        self._last_unit_s = None
        self._ladder.end_job()

    def _ended(self, job_id: str, status: str, code: str | None = None, message: str | None = None) -> None:
        self._outbox.notify(JobEnded(job_id=job_id, status=status, error_code=code, error_message=message))

    def tell(self, steps: list[LadderStep]) -> None:
        """Tell the job's user what its memory went through."""
        if self.job is None:
            return
        for step in steps:
            data = {"bytes": float(step.num_bytes), "ms": step.ms, "layers": float(step.num_layers)}
            self._outbox.notify(JobNote(job_id=self.job.job_id, level="info", message=step.told(), data=data))
