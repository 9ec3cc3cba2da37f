"""The running job inside the engine: one unit per call, its events, its memory; a job's failure never leaves here."""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec
import torch

from fineinfer.engine.memory_ladder import MemoryLadder
from fineinfer.engine.outbox import Outbox
from fineinfer.messages import JobEnded, JobNote, JobProgress, JobStarted, StartJob
from fineinfer.model.decoder import Decoder
from fineinfer.scheduler.latency_model import LatencyModel
from fineinfer.scheduler.scheduler import TrainingState
from fineinfer.training.errors import TrainingError
from fineinfer.training.ops import pick_ops
from fineinfer.training.trainer import Trainer

logger = logging.getLogger(__name__)

RATE_UPDATES = 16  # the rate shown is the mean over this many updates
LAUNCH_AHEAD = 2  # units in flight on a GPU: a host wait after every unit costs 0.5 ms of a 1.4 to 2.7 ms unit


class TrainingHost:
    """Owns the trainer of the one running job.

    Args:
        decoder: The shared base model.
        ladder: Memory.
        latency: Slice times.
        outbox: Job events go to the supervisor.
        backend: ``reference`` or ``triton``, as serving.
        deterministic: See ``Trainer``.
    """

    def __init__(
        self,
        decoder: Decoder,
        ladder: MemoryLadder,
        latency: LatencyModel,
        outbox: Outbox,
        backend: str,
        deterministic: bool = False,
    ) -> None:
        self._decoder = decoder
        self._ladder = ladder
        self._latency = latency
        self._outbox = outbox
        self._ops, self._deterministic = pick_ops(backend, decoder.device), deterministic
        self._pending: deque[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.job: StartJob | None = None
        self.trainer: Trainer | None = None
        self.last_progress: JobProgress | None = None
        self.total_tokens = 0
        self.yielded_s = 0.0
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=RATE_UPDATES)  # (when, step, tokens) of updates
        self._last_unit_s: float | None = None

    # ------------------------------------------------------------ life of a job

    def start(self, message: StartJob) -> None:
        """Begin or resume a job; a second one while one runs is refused."""
        if self.trainer is not None:
            if self.job is not None and self.job.job_id != message.job_id:
                self._ended(message.job_id, "failed", "job_state_conflict", "another job is running")
            return
        self.job = message
        try:
            trainer = Trainer(self._decoder, message, self._keep, None, self._ops, self._deterministic)
            self.trainer = trainer
            state_bytes, micro_batch = trainer.state_bytes, trainer.bytes_if_recomputed(trainer.max_micro_batch_tokens)
            if not self._ladder.lease_state(state_bytes + micro_batch):
                raise TrainingError(
                    f"the job needs {state_bytes / 2**20:.0f} MiB for adapter and optimizer and "
                    f"{micro_batch / 2**20:.0f} MiB for its largest micro-batch, more than the memory budget leaves",
                    code="out_of_memory",
                )
            self._ladder.lease_state(state_bytes)
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
        self._ended(job_id, "cancelled")

    def park(self) -> None:
        """Write a checkpoint of the last finished update and let go; the job stays ``running`` and resumes later."""
        if self.trainer is None:
            return
        try:
            self.trainer.save_resume_point()
        except Exception as error:
            logger.warning("the job could not be checkpointed at shutdown: %s", error)
        self._close()

    def _keep(self, num_tokens: int, layer: int) -> bool:
        return self._ladder.keeps(self._decoder.spec.num_layers, layer)

    # ------------------------------------------------------------ one unit

    def state(self, now_s: float) -> TrainingState:
        """What the scheduler needs to decide."""
        trainer = self.trainer
        if trainer is None or (not trainer.micro_batch_open and self._ladder.holding(now_s)):
            return TrainingState()
        started = not trainer.at_update_boundary
        units = trainer.remaining_units() if started else trainer.next_update_units()
        left_s = sum(count * self._latency.estimate(kind, tokens) for (kind, tokens), count in units.items())
        unit_s = left_s / max(1, units.total())
        return TrainingState(ready=True, update_started=started, update_left_s=left_s, unit_s=unit_s)

    def run_unit(self) -> bool:
        """Run exactly one unit of the job.

        Returns:
            False if it had to wait for memory.
        """
        trainer = self.trainer
        if trainer is None:
            return False
        try:
            if trainer.begins_micro_batch and not self._ladder.lease_micro_batch(trainer):
                return False
            self._timed_advance(trainer)
            self._report(trainer)
        except Exception as error:
            self._fail(error)
        return True

    def _timed_advance(self, trainer: Trainer) -> None:
        now_s = time.perf_counter()
        if self._last_unit_s is not None and not trainer.at_update_boundary:
            self.yielded_s += max(0.0, now_s - self._last_unit_s)
        if self._decoder.device.type == "cpu":
            report = trainer.advance()
            self._latency.observe(report.kind, report.num_tokens, time.perf_counter() - now_s)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            report = trainer.advance()
            end.record()
            self._pending.append((report.kind, report.num_tokens, begin, end))
            while len(self._pending) > LAUNCH_AHEAD:
                kind, num_tokens, begin, end = self._pending.popleft()
                end.synchronize()
                self._latency.observe(kind, num_tokens, 1e-3 * begin.elapsed_time(end))
        self._last_unit_s = time.perf_counter()

    def _report(self, trainer: Trainer) -> None:
        """Send what the unit finished: updates, notes, checkpoints, the job."""
        for progress in trainer.take_progress():
            self.last_progress = self._with_rate(progress)
            self._outbox.notify(self.last_progress)
        for note in trainer.take_notes():
            self._outbox.notify(note)
        for checkpoint in trainer.take_checkpoints():
            self._outbox.notify(checkpoint)
        if trainer.finished:
            job_id = trainer.job_id
            self._close()
            self._ended(job_id, "succeeded")

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
        code = error.code if isinstance(error, TrainingError) else "server_error"
        if not isinstance(error, TrainingError):
            logger.exception("job %s failed", job_id)
        self._close()
        self._ended(job_id, "failed", code, str(error) or type(error).__name__)

    def _close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = None
        self.job = None
        self._pending.clear()
        self._last_unit_s = None
        self._ladder.end_job()

    def _ended(self, job_id: str, status: str, code: str | None = None, message: str | None = None) -> None:
        self._outbox.notify(JobEnded(job_id=job_id, status=status, error_code=code, error_message=message))

    def note(self, level: str, message: str, **data: float) -> None:
        """Tell the job's user something."""
        if self.job is not None:
            self._outbox.notify(JobNote(job_id=self.job.job_id, level=level, message=message, data=data))
