"""The durable side of a trainer: checkpoints are written, published and announced, and read when a job resumes.

On a device with memory of its own a checkpoint is written beside training: masters and moments are copied to the host
behind the update, a thread does the rest (3 seconds of hashing and disk for an 8B model's adapter of rank 16), and the
version is announced between two later updates. Elsewhere it is written at once.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from fineinfer.adapters.weights import LoraWeights
from fineinfer.messages import JobNote, StartJob
from fineinfer.training.base_model import base_model_sha256
from fineinfer.training.checkpoint import (
    CheckpointError,
    DiskFullError,
    Moments,
    SavedState,
    checkpoint_folder,
    end_replacements,
    newest_step,
    publish_adapter,
    read_newest,
    write_checkpoint,
)
from fineinfer.training.disk_space import LOG_BYTES_PER_STEP, DiskNeed
from fineinfer.training.errors import TrainingError
from fineinfer.training.reports import Cursor, checkpoint_message, newest_reports, trainer_state
from fineinfer.training.state import AdapterState
from fineinfer.training.trainer_evaluation import TrainerEvaluation

NUM_REPLAYED_REPORTS = 8  # after a resume: progress messages that may have died with the process that sent them
LOOK_EVERY_S = 0.01  # at a checkpoint that training waits for


@dataclass
class _HostMoments:
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True)
class _Write:
    """A checkpoint being written: the job after an update, apart from what training changes next."""

    cursor: Cursor
    log_history: list[dict[str, Any]]
    written: Future[tuple[str, Path]]


class TrainerCheckpoints(TrainerEvaluation):
    """The part of ``Trainer`` that writes to disk; the attributes are the trainer's."""

    _job: StartJob
    _state: AdapterState
    _write: _Write | None = None
    _writer: ThreadPoolExecutor | None = None
    _host_buffers: tuple[torch.Tensor, ...] = ()
    _saved: Cursor  # of the newest checkpoint; that of the beginning if there is none
    _announced_step: int
    _base_sha256: str

    def _begin_checkpoints(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        self._saved, self._announced_step = Cursor(), 0
        self._base_sha256 = base_model_sha256(self._context.decoder)
        if self._context.decoder.device.type == "cuda":
            self._write_beside()
        self._resume()

    def _write_beside(self) -> None:
        """Make a thread, and room for what it writes, now: pinning memory takes a moment."""
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        tensors = self._state.masters.flat, self._state.optimizer.exp_avg, self._state.optimizer.exp_avg_sq
        pinned = self._context.decoder.device.type == "cuda"
        self._host_buffers = tuple(torch.empty_like(t, device="cpu", pin_memory=pinned) for t in tensors)

    # ------------------------------------------------------------ when

    @property
    def checkpoint_due(self) -> bool:
        """Whether there is something to do for a checkpoint at this update boundary.

        One is begun each ``save_steps``, else each epoch, and at the end. One that is being written is taken when it is
        done; at the job's end, or when the next is to begin, it is waited for.
        """
        step, write = self.cursor.step, self._write
        if write is None:
            return self._begins_at(step)
        waits = self.at_end or (step != write.cursor.step and self._begins_at(step))
        return waits or write.written.done()

    def check_disk_space(self) -> None:
        """Ask the disk for all that the job still writes.

        Raises:
            DiskFullError: It has too little room; nothing was written.
        """
        total, nbytes = self.schedule.total_steps, self._state.masters.flat.nbytes
        num_versions = len(self._publishing_steps(self.cursor.step))
        DiskNeed(nbytes, 2 * nbytes, LOG_BYTES_PER_STEP * total, num_versions).check(Path(self._job.job_dir))

    def _publishing_steps(self, begin: int) -> set[int]:
        """Updates from ``begin`` on after which a version is published."""
        total = self.schedule.total_steps
        every = self._job.settings.save_steps or self.schedule.steps_per_epoch
        steps = {*range(every, total, every), total, *self._steps_of_best()}
        return {step for step in steps if step >= begin}

    def _begins_at(self, step: int) -> bool:
        every = self._job.settings.save_steps or self.schedule.steps_per_epoch
        return step != self._announced_step and (step % every == 0 or self.at_end or self._is_best(step))

    @property
    def _is_saved(self) -> bool:
        """Whether the newest checkpoint holds all that there is: an evaluation adds to that of the same update."""
        return self.cursor == self._saved

    # ------------------------------------------------------------ writing

    def save_resume_point(self) -> None:
        """Write the state after the last finished update, without publishing it; nothing before the first update.

        May be called in mid-update: parameters change only in the optimizer unit, and the update starts anew on resume.
        A checkpoint that is being written is waited for and announced, since a resume would begin behind it.

        Raises:
            CheckpointError: Nothing was written and nothing was lost; try again.
            TrainingError: The adapter is not finite.
        """
        write = self._write
        if write is not None:
            wait([write.written])
            with contextlib.suppress(CheckpointError):
                self._take_write(write)
        if self._is_saved:
            return
        self._save(*self._durable(), self._durable_state())
        self._saved = replace(self.cursor)

    def save_and_leave(self) -> None:
        """``save_resume_point`` for a job that stops for a while.

        Of one that is served live it is announced too, so that its name means the last update from now on.

        Raises:
            CheckpointError, TrainingError: As there.
        """
        self.save_resume_point()
        if self._job.serve == "live" and self.cursor.step not in (0, self._announced_step):
            self._announce(self.cursor, self.log_history, self._publish(self.cursor.step))

    def _save(self, masters: LoraWeights, moments: Moments, state: dict[str, Any]) -> None:
        if not masters.is_finite():
            raise TrainingError(f"the adapter is not finite after update {state['step']}", "non_finite")
        write_checkpoint(Path(self._job.job_dir), masters, self._job.settings.lora, moments, state)

    def _durable(self) -> tuple[LoraWeights, Moments]:
        """What a checkpoint is made of."""
        return self._state.masters, self._state.optimizer

    def _durable_state(self) -> dict[str, Any]:
        """The rest of it."""
        history, epochs = list(self.log_history), self._job.settings.n_epochs
        state = trainer_state(self.cursor, self.schedule.total_steps, epochs, history)
        state |= {"optimizer_updates": self._state.optimizer.num_updates, "base_model": self._job.base_model}
        return state | self._identity()

    def _checkpoint_unit(self) -> str:
        """First save, then publish and announce; an error costs this checkpoint, and the job only at its end."""
        if self._write is not None:
            return self._take_write(self._write)
        if self._writer is not None:
            self._begin_write(self._writer)
            return "checkpoint"
        try:
            if not self._is_saved:
                self.save_resume_point()
                return "checkpoint"
            adapter = self._publish(self.cursor.step)
        except CheckpointError as error:
            return self._passed_over(error, self.cursor.step)
        return self._announce(self.cursor, self.log_history, adapter)

    def _publish(self, step: int) -> tuple[str, Path]:
        directory = checkpoint_folder(Path(self._job.job_dir), step)
        return publish_adapter(directory, Path(self._job.adapters_dir))

    def _begin_write(self, writer: ThreadPoolExecutor) -> None:
        cursor, history = replace(self.cursor), list(self.log_history)
        if self._is_saved:
            self._write = _Write(cursor, history, writer.submit(self._publish, cursor.step))
            return
        masters, moments = self._durable()
        for buffer, tensor in zip(self._host_buffers, (masters.flat, moments.exp_avg, moments.exp_avg_sq), strict=True):
            buffer.copy_(tensor, non_blocking=True)  # before the next update, as the stream has it
        copied = torch.cuda.Event() if masters.flat.is_cuda else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()  # type: ignore[no-untyped-call]
        weights = LoraWeights(masters.layout, self._host_buffers[0])
        kept, state = _HostMoments(*self._host_buffers[1:]), self._durable_state()

        def run() -> tuple[str, Path]:
            if copied is not None:
                copied.synchronize()  # type: ignore[no-untyped-call]
            self._save(weights, kept, state)
            return self._publish(state["step"])

        self._write = _Write(cursor, history, writer.submit(run))

    def _take_write(self, write: _Write) -> str:
        """Announce what was written, or wait for it a moment."""
        if not write.written.done():
            wait([write.written], LOOK_EVERY_S)
            return "checkpoint"
        self._write = None
        try:
            adapter = write.written.result()
        except CheckpointError as error:
            return self._passed_over(error, write.cursor.step)
        self._saved = write.cursor
        return self._announce(write.cursor, write.log_history, adapter)

    def _passed_over(self, error: CheckpointError, step: int) -> str:
        if isinstance(error, DiskFullError):
            begin = f"the checkpoint of update {self._saved.step}" if self._saved.step else "its beginning"
            raise DiskFullError(f"{error}; make room and resume the job, it goes on from {begin}") from error
        if self.at_end and step == self.cursor.step:
            raise error
        self._announced_step = step
        self.cursor.evaluated = self.cursor.evaluated.without(step)
        message = f"{error}; training goes on, the next checkpoint is tried at its time"
        self._reports.append(JobNote(job_id=self._job.job_id, level="error", message=message))
        return "checkpoint"

    def _announce(self, cursor: Cursor, log_history: list[dict[str, Any]], adapter: tuple[str, Path]) -> str:
        self._announced_step = cursor.step
        final = self._ends_at(cursor)
        self._reports.append(checkpoint_message(self._job, cursor, log_history, adapter, final))
        return "publish"

    def _close_checkpoints(self) -> None:
        """A checkpoint that is being written becomes whole or stays absent."""
        if self._writer is not None:
            self._writer.shutdown(wait=False)

    # ------------------------------------------------------------ reading

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be this job's."""
        job, settings = self._job, msgspec.json.decode(msgspec.json.encode(self._job.settings))
        identity = {"settings": settings, "dataset_sha256": job.dataset_sha256, "eval_sha256": job.eval_sha256}
        return identity | {"base_model_sha256": self._base_sha256}

    def _check_same_job(self, state: dict[str, Any]) -> None:
        """Raise TrainingError if the trainer state of a checkpoint is of another job."""
        identity = self._identity()
        if "base_model_sha256" not in state:  # an older version wrote it: the model's name is all that it tells
            del identity["base_model_sha256"]
            identity["base_model"] = self._job.base_model
        for key, value in identity.items():
            if state.get(key) != value:
                message = f"the checkpoint of update {state['step']} is of another {key}"
                raise TrainingError(message, "checkpoint_mismatch")

    def _resume(self) -> None:
        saved = self._read_saved()
        if saved is not None:
            self._restore_tensors(saved)
            self._go_on_from(saved)

    def _read_saved(self) -> SavedState | None:
        """The newest whole checkpoint, which is of this job; None if there is none."""
        job_dir = Path(self._job.job_dir)
        with contextlib.suppress(OSError):  # what is whole under its name can be read all the same
            end_replacements(job_dir)
        saved = read_newest(job_dir, self._context.decoder.spec, self._state.masters.layout.max_rank)
        damaged, step = newest_step(job_dir), 0 if saved is None else saved.step
        if damaged > step:
            message = f"the checkpoint of update {damaged} is damaged; the job goes on from update {step}"
            self._reports.append(JobNote(job_id=self._job.job_id, level="warn", message=message))
        if saved is not None:
            self._check_same_job(saved.trainer_state)
        return saved

    def _restore_tensors(self, saved: SavedState) -> None:
        self._state.restore(saved.weights, saved.moments, saved.trainer_state["optimizer_updates"])

    def _go_on_from(self, saved: SavedState) -> None:
        """Take cursor and log from a checkpoint, and tell once more what may have been lost."""
        job_id = self._job.job_id
        self.cursor, self.log_history = Cursor.of(saved.trainer_state["cursor"]), saved.trainer_state["log_history"]
        # Only saved, not announced: the message may be lost, and announcing a step again does no harm.
        self._saved, self._announced_step = replace(self.cursor), 0
        newest = self.log_history[-NUM_REPLAYED_REPORTS:]
        self._reports += newest_reports(job_id, newest, self.schedule.total_steps)
        message = f"training goes on from the checkpoint of update {saved.step}"
        self._reports.append(JobNote(job_id=job_id, level="info", message=message))
