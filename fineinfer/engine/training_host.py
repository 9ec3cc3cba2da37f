"""The running job inside the engine: one unit per call, its events, its memory; a job's failure never leaves here."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from fineinfer.engine.job_memory import (
    JobNeed,
    NoMemoryNowError,
    Patience,
    is_out_of_memory,
    why_state_too_large,
    why_too_large,
)
from fineinfer.engine.job_pauses import Pausing, give_back
from fineinfer.engine.job_reports import JobReports, succeeded
from fineinfer.engine.memory_ladder import MemoryLadder
from fineinfer.engine.outbox import Outbox
from fineinfer.engine.rungs import LadderStep
from fineinfer.engine.unit_times import UnitTimes
from fineinfer.messages import JobUsage, StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.scheduler import TrainingState
from fineinfer.training.checkpoint import CheckpointError, newest_step
from fineinfer.training.errors import TrainingError
from fineinfer.training.ops import pick_ops
from fineinfer.training.parking import ParkableTrainer

logger = logging.getLogger(__name__)

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


class TrainingHost:
    """Owns the running job and its trainer, which is made once there is memory for what it always holds.

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
        self._outbox, self.reports = outbox, JobReports(outbox)
        self._how, self._ops = how, pick_ops(how.backend, decoder.device)
        self._times = UnitTimes(latency, decoder.device, self.can_run_beside)
        self.job: StartJob | None = None
        self._need, self._patience = JobNeed(0), Patience()  # what it takes to make its trainer, and to wait
        self.trainer: ParkableTrainer | None = None
        self._pausing: Pausing | None = None
        self._reported_s = self.yielded_s = 0.0  # of what the job has used of the device; see EngineStats
        self._last_unit_s: float | None = None
        self._stood_back = False  # the last unit had to wait for memory: requests have the next turn

    # ------------------------------------------------------------ life of a job

    def start(self, message: StartJob) -> None:
        """Begin or resume a job; a second one while one runs is refused."""
        self.end_pause(wait=True)
        if self.job is not None:
            if self.job.job_id != message.job_id:
                self.reports.ended(message.job_id, "failed", "job_state_conflict", "another job is running")
            return
        self.job, self._patience = message, Patience()
        self._need = JobNeed.of_state(message, self._decoder, self._ops is not None)
        self._times.used_s = self._reported_s = message.device_s
        try:
            if not self._make_trainer(message):
                self.reports.note(message.job_id, "info", "waits for memory that requests have now")
        except Exception as error:
            self._stumbled(error, lost=True)

    def _make_trainer(self, job: StartJob) -> bool:
        """Make the trainer on memory that was leased before; False, and none, while requests leave it too little.

        Raises:
            TrainingError: The job cannot run, or not now.
        """
        self._check_fits(job, self._need)
        if not self._ladder.has_room_for(self._need) or not self._ladder.lease_state(self._need.state_bytes):
            return False
        with torch.cuda.stream(self._how.stream):  # of None: the current one
            trainer = ParkableTrainer(self._decoder, job, self._keep, None, self._ops, self._how.deterministic)
        self.trainer, need = trainer, JobNeed.of(trainer)
        self._check_fits(job, need, trainer)
        trainer.check_disk_space()
        if not self._ladder.begin_job(need):
            trainer.park()  # requests have the memory now: it begins as one that was parked for them
            self._ladder.let_go()
        self.reports.started(trainer)
        return True

    def _check_fits(self, job: StartJob, need: JobNeed, trainer: ParkableTrainer | None = None) -> None:
        """Compare a job with the budget.

        Raises:
            NoMemoryNowError: It fits into another: the largest so far, or that under which it wrote its checkpoints.
            TrainingError: It never fits.
        """
        if self._ladder.can_ever_hold(need):
            return
        fits_later = newest_step(Path(job.job_dir)) > 0 or self._ladder.can_ever_hold(need, full=True)
        room, advised = self._ladder.shares(), not fits_later
        why = why_state_too_large(need, room, advised) if trainer is None else why_too_large(trainer, room, advised)
        raise NoMemoryNowError(why) if fits_later else TrainingError(why, "out_of_memory")

    def cancel(self, job_id: str) -> None:
        """Stop in mid-step and give the memory back."""
        if self.job is not None and self.job.job_id == job_id:
            self._close()
        if self._pausing is not None and self._pausing.trainer.job_id == job_id:
            self._pausing.trainer.close()
            self._pausing = None
        self.reports.ended(job_id, "cancelled")

    def pause(self, job_id: str) -> None:
        """Stop in mid-step, give the memory back and write a checkpoint of the last finished update.

        The answer comes when that is on disk, from ``end_pause``. If it cannot be written the job is paused all the
        same, and goes on from the checkpoint before.
        """
        if self.job is not None and self.job.job_id == job_id:
            self._leave(self.job)
        elif self._pausing is None or self._pausing.trainer.job_id != job_id:
            self.reports.ended(job_id, "paused")

    def _leave(self, job: StartJob, reason: TrainingError | None = None) -> None:
        """Pause the job, for a ``reason`` or because a user asked for it."""
        trainer = self.trainer
        if trainer is None:  # nothing of it is here
            self._close()
            self.reports.ended_by(job.job_id, reason, "paused")
            return
        try:
            written = trainer.leave()
        except Exception as error:
            self._fail(error)
            return
        self._pausing = Pausing(trainer, written, not written.done(), reason)
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
        (trainer, written, beside, reason), self._pausing = self._pausing, None
        error = written.exception()
        if error is not None and (isinstance(error, CheckpointError) or not isinstance(error, TrainingError)):
            logger.warning("job %s is paused without a checkpoint", trainer.job_id, exc_info=error)
            message = f"paused without a new checkpoint, the updates since the last one will run again: {error}"
            self.reports.note(trainer.job_id, "error", message)
            error = None
        self.reports.send(trainer)
        if beside:
            trainer.close()
        self.reports.ended_by(trainer.job_id, error or reason, "paused")

    def park(self) -> None:
        """Write a checkpoint of the last finished update and let go; the job stays ``running`` and resumes later."""
        self.end_pause(wait=True)
        if self.trainer is not None:
            try:
                self.trainer.save_and_leave()
            except Exception as error:
                logger.warning("the job could not be checkpointed at shutdown: %s", error)
            self.reports.send(self.trainer)
        if self.job is not None:
            self._close()

    def _keep(self, num_tokens: int, layer: int) -> bool:
        return self._ladder.keeps(self._decoder.spec.num_layers, layer)

    # ------------------------------------------------------------ one unit

    def should_finish(self, idle: bool) -> bool:
        """Whether the micro-batch under way is to go on for those that wait for its memory.

        Args:
            idle: No request can run meanwhile.
        """
        if self.trainer is None:
            return False
        goes_on = self.trainer.micro_batch_open and (idle or self._ladder.finishing)
        return goes_on or self._ladder.owes_update

    @property
    def stands_by(self) -> bool:
        """Whether the job holds nothing, so that its next unit begins by taking all its memory."""
        return self.trainer is None or self.trainer.parked

    def state(self, now_s: float) -> TrainingState:
        """What the scheduler needs to decide."""
        trainer, job, stood_back = self.trainer, self.job, self._stood_back
        self._stood_back = False
        if job is None or stood_back or now_s < self._patience.not_before_s:
            return TrainingState()
        if self._held(now_s):
            return TrainingState()
        if trainer is None or trainer.parked:
            ready = self._ladder.has_room_for(self._need if trainer is None else JobNeed.of(trainer))
        else:
            ready = self._ladder.regain_floor(trainer) or trainer.micro_batch_open
        withheld = self._ladder.slots_withheld
        started = trainer is not None and not trainer.at_update_boundary
        units = Counter[tuple[str, int]]()
        if trainer is not None:
            units = trainer.remaining_units() if started else trainer.next_update_units()
        left_s = sum(count * self._estimate(kind, tokens) for (kind, tokens), count in units.items())
        unit_s = left_s / max(1, units.total())
        return TrainingState(ready, started, left_s, unit_s, withheld, self.can_run_beside, job.max_share)

    def _held(self, now_s: float) -> bool:
        """Whether the next unit would begin to use memory that requests wait for."""
        trainer = self.trainer
        begins = trainer is None or self.stands_by or trainer.begins_micro_batch
        return begins and self._ladder.holding(now_s)

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
        if on_their_way >= MAX_BESIDE or (on_their_way and (trainer is None or trainer.next_unit_waits)):
            return False
        if self._times.pending_s >= AHEAD_S or self._held(time.monotonic()):
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
        lost = trainer is None  # with what fails now: one that is being made, or in an optimizer step
        if self.job is None or time.monotonic() < self._patience.not_before_s:
            return False
        try:
            if trainer is None:
                self._stood_back = not self._make_trainer(self.job)
                return not self._stood_back
            if trainer.parked:
                self._stood_back = not self._ladder.unpark(trainer)
                return not self._stood_back
            if trainer.begins_micro_batch and not self._ladder.lease_micro_batch(trainer):
                self._stood_back = True
                return False
            lost = trainer.next_unit_waits and not trainer.at_update_boundary
            self._timed_advance(trainer, beside)
            self._report(trainer)
        except Exception as error:
            self._stumbled(error, lost)
        return True

    def _timed_advance(self, trainer: ParkableTrainer, beside: bool) -> None:
        now_s = time.perf_counter()
        if self._last_unit_s is not None and not trainer.at_update_boundary and not self._times.num_pending:
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
        self.reports.send(trainer)
        if trainer.finished:
            ended = succeeded(trainer)
            self._close()
            self._outbox.notify(ended)

    # ------------------------------------------------------------ ends

    def _stumbled(self, error: Exception, lost: bool) -> None:
        """The job fails; but if it found no memory, which another program can have, it waits and tries again.

        Args:
            error: What happened.
            lost: The trainer is of no more use: the job goes on from its last checkpoint.
        """
        job, trainer = self.job, self.trainer
        if job is None or not is_out_of_memory(error):
            self._fail(error)
            return
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        step = 0 if trainer is None else trainer.step
        if trainer is not None and (lost or not give_back(trainer)):
            trainer.wait_until_written()
            self.reports.send(trainer)
            self._drop_trainer()
        self._ladder.let_go()
        why = str(error).partition("\n")[0] or type(error).__name__
        if not self._patience.tries_again(step, time.monotonic()):
            self._leave(job, NoMemoryNowError(f"there was no memory for it {self._patience.num_errors} times: {why}"))
            return
        message = f"parked: there was no memory for it, it is tried again in {self._patience.delay_s:.0f} s: {why}"
        logger.warning("job %s is %s", job.job_id, message)
        self.reports.note(job.job_id, "warn", message)

    def _fail(self, error: Exception) -> None:
        job_id = "" if self.job is None else self.job.job_id
        if self.trainer is not None:
            self.reports.send(self.trainer)
        self._close()
        self.reports.ended_by(job_id, error)

    def _close(self) -> None:
        self._drop_trainer()
        self.job = None

    def _drop_trainer(self) -> None:
        with contextlib.suppress(RuntimeError):  # a broken device must not keep a job from ending
            self._times.wait(0)
        self._report_usage()
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
        self._times.forget()
        self._last_unit_s = None
        self._ladder.end_job()

    def tell(self, steps: list[LadderStep]) -> None:
        """Tell the job's user what its memory went through."""
        if self.job is not None:
            self.reports.tell(self.job.job_id, steps)
