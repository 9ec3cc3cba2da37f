"""When a trainer evaluates, what it records of it, and when that ends the job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fineinfer.messages import JobCheckpoint, JobEval, JobNote, JobProgress, StartJob
from fineinfer.training.dataset import MicroBatch, Schedule
from fineinfer.training.errors import TrainingError
from fineinfer.training.evaluation import END, EvalSet, RunningEvaluation
from fineinfer.training.reports import Cursor, eval_entry, eval_message
from fineinfer.training.step import StepContext, Unit

Report = JobProgress | JobEval | JobNote | JobCheckpoint


class TrainerEvaluation:
    """The part of ``Trainer`` that evaluates; the attributes are the trainer's.

    An evaluation comes after an update, at an update boundary, before the checkpoint of the same step. It reads the
    adapter and changes nothing of the training; one that a kill interrupts is run again as a whole.
    """

    cursor: Cursor
    schedule: Schedule
    log_history: list[dict[str, Any]]
    _job: StartJob
    _context: StepContext
    _next: list[MicroBatch]
    _reports: list[Report]
    _evaluation: RunningEvaluation | None = None
    _eval_set: EvalSet | None = None

    def _load_eval_set(self) -> None:
        """Read ``eval.safetensors`` if the job has one."""
        job, settings = self._job, self._job.settings
        if job.eval_sha256 is None:
            if settings.early_stopping is not None or settings.load_best_model_at_end:
                message = "early_stopping and load_best_model_at_end need validation data"
                raise TrainingError(message, "invalid_hyperparameters")
            return
        vocab_size = self._context.decoder.spec.vocab_size
        self._eval_set = EvalSet(Path(job.job_dir), job.eval_sha256, vocab_size, settings.micro_batch_tokens)
        if self._eval_set.num_skipped:
            message = f"{self._eval_set.num_skipped} validation examples have no trained token and are left out"
            self._reports.append(JobNote(job_id=job.job_id, level="warn", message=message))

    # ------------------------------------------------------------ when

    @property
    def at_end(self) -> bool:
        """Whether no update follows: all are done, or an evaluation ended the job early."""
        return self._ends_at(self.cursor)

    def _ends_at(self, cursor: Cursor) -> bool:
        return cursor.step >= self.schedule.total_steps or cursor.evaluated.stopped

    @property
    def _every(self) -> int:
        return self._job.settings.eval_steps or self.schedule.steps_per_epoch

    def _begin_evaluation(self) -> None:
        """Begin the one that is due at this update boundary, if any."""
        step, every = self.cursor.step, self._every
        due = step > self.cursor.evaluated.step and (step % every == 0 or step >= self.schedule.total_steps)
        if due and self._eval_set is not None:
            self._evaluation = RunningEvaluation(self._context, self._eval_set)

    @property
    def _keeps_best(self) -> bool:
        """Whether a version of each best step must exist, since it may be the one to serve or to go back to."""
        return self._job.settings.load_best_model_at_end or self._job.settings.early_stopping is not None

    def _is_best(self, step: int) -> bool:
        return self._keeps_best and step == self.cursor.evaluated.best_step

    def _steps_of_best(self) -> range:
        """Updates that may turn out to be the best so far, each with a version of its own."""
        return range(self._every, self.schedule.total_steps, self._every) if self._keeps_best else range(0)

    @property
    def best_step(self) -> int | None:
        """The version to serve at the end where that is not the last one."""
        best = self.cursor.evaluated.best_step
        return best if self._job.settings.load_best_model_at_end and best != self.cursor.step else None

    @property
    def early_stopped(self) -> bool:
        """Whether the job ended before its last update, as its evaluations asked for."""
        return self.cursor.evaluated.stopped and self.cursor.step < self.schedule.total_steps

    # ------------------------------------------------------------ what

    def _advance_evaluation(self, evaluation: RunningEvaluation) -> Unit:
        if not evaluation.ends:
            return evaluation.advance()
        loss, accuracy = evaluation.totals()
        self._evaluation = None
        cursor, job = self.cursor, self._job
        cursor.evaluated = cursor.evaluated.after(cursor.step, loss, job.settings.early_stopping)
        entry = eval_entry(cursor, self.schedule.steps_per_epoch, loss, accuracy, evaluation.num_targets)
        self.log_history.append(entry)
        if math.isfinite(loss):
            self._reports.append(eval_message(job.job_id, entry))
        else:
            message = f"the evaluation after update {cursor.step} has a loss that is not finite and is not counted"
            self._reports.append(JobNote(job_id=job.job_id, level="warn", message=message))
        if self.early_stopped:
            self._next = []
            message = (
                f"stopped early after update {cursor.step}: {cursor.evaluated.bad_in_a_row} evaluations in a row "
                f"without a better loss than {cursor.evaluated.best_loss}"
            )
            self._reports.append(JobNote(job_id=job.job_id, level="info", message=message))
        return END, 0
