"""The job's cursor and what is recorded and reported of a finished update."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fineinfer.messages import EarlyStopping, JobCheckpoint, JobEval, JobProgress, StartJob
from fineinfer.training.checkpoint import checkpoint_folder


@dataclass(frozen=True)
class Evaluated:
    """What the evaluations so far say.

    Attributes:
        step: Update of the newest, 0 before the first.
        count: How many there were.
        best_step: Of the lowest loss; None before a finite one.
        best_loss: That loss.
        mark: Loss of the newest one that was better by ``min_delta``.
        bad_in_a_row: Evaluations since then, those of the warm-up left out.
        stopped: Whether they are as many as ``patience``.
    """

    step: int = 0
    count: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    mark: float | None = None
    bad_in_a_row: int = 0
    stopped: bool = False

    def without(self, step: int) -> Evaluated:
        """If ``step`` was the best: it cannot be served, so the next one is the best of those that can."""
        return replace(self, best_step=None, best_loss=None) if step == self.best_step else self

    def after(self, step: int, loss: float, rule: EarlyStopping | None) -> Evaluated:
        """With one more evaluation; a loss that is not finite is never better."""
        finite = math.isfinite(loss)
        best = finite and (self.best_loss is None or loss < self.best_loss)
        min_delta = rule.min_delta if rule is not None else 0.0
        better = finite and (self.mark is None or loss < self.mark - min_delta)
        judged = rule is not None and self.count >= rule.warmup_evals
        bad = 0 if better else self.bad_in_a_row + judged
        return Evaluated(
            step=step,
            count=self.count + 1,
            best_step=step if best else self.best_step,
            best_loss=loss if best else self.best_loss,
            mark=loss if better else self.mark,
            bad_in_a_row=bad,
            stopped=rule is not None and bad >= rule.patience,
        )


@dataclass
class Cursor:
    """Where the job stands; saved in every checkpoint.

    Attributes:
        step: Finished updates, skipped ones included.
        trained_tokens: Loss-carrying tokens so far.
        processed_tokens: All tokens so far.
        num_skipped: Updates skipped because loss or gradient was not finite.
        bad_in_a_row: The newest of them without a good one since.
        evaluated: What evaluations said.
    """

    step: int = 0
    trained_tokens: int = 0
    processed_tokens: int = 0
    num_skipped: int = 0
    bad_in_a_row: int = 0
    evaluated: Evaluated = Evaluated()

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Cursor:
        """From a checkpoint's JSON."""
        return cls(**saved | {"evaluated": Evaluated(**saved.get("evaluated", {}))})

    def count(self, num_tokens: int, num_targets: int, skipped: bool) -> None:
        """Move past one update."""
        self.step += 1
        self.processed_tokens += num_tokens
        self.trained_tokens += num_targets
        self.num_skipped += skipped
        self.bad_in_a_row = self.bad_in_a_row + 1 if skipped else 0


def trainer_state(
    cursor: Cursor, total_steps: int, num_epochs: int, log_history: list[dict[str, Any]]
) -> dict[str, Any]:
    """The cursor's part of a checkpoint's state, with transformers' keys among them."""
    return {
        "step": cursor.step,
        "global_step": cursor.step,
        "max_steps": total_steps,
        "num_train_epochs": num_epochs,
        "cursor": asdict(cursor),
        "log_history": log_history,
    }


def log_entry(
    cursor: Cursor, steps_per_epoch: int, loss: float, learning_rate: float, grad_norm: float, accuracy: float
) -> dict[str, Any]:
    """Entry of ``log_history`` (transformers' and TRL's names) for the update the cursor has just passed."""
    return {
        "step": cursor.step,
        "epoch": cursor.step / steps_per_epoch,
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
        "learning_rate": learning_rate,
        "mean_token_accuracy": accuracy,
        "num_tokens": cursor.processed_tokens,
        "trained_tokens": cursor.trained_tokens,
        "skipped": cursor.bad_in_a_row > 0,
    }


def progress_message(job_id: str, entry: dict[str, Any], total_steps: int) -> JobProgress:
    """The message for one entry that was not skipped; rates are left to the host, which knows the clock."""
    return JobProgress(
        job_id=job_id,
        step=entry["step"],
        total_steps=total_steps,
        epoch=entry["epoch"],
        loss=entry["loss"],
        learning_rate=entry["learning_rate"],
        grad_norm=entry["grad_norm"],
        mean_token_accuracy=entry["mean_token_accuracy"],
        trained_tokens=entry["trained_tokens"],
        processed_tokens=entry["num_tokens"],
        tokens_per_s=0.0,
        eta_s=0.0,
    )


def eval_entry(cursor: Cursor, steps_per_epoch: int, loss: float, accuracy: float, num_targets: int) -> dict[str, Any]:
    """Entry of ``log_history`` for an evaluation after the cursor's update; its loss is among ``cursor.evaluated``."""
    return {
        "step": cursor.step,
        "epoch": cursor.step / steps_per_epoch,
        "eval_loss": loss if math.isfinite(loss) else None,
        "eval_mean_token_accuracy": accuracy,
        "eval_num_tokens": num_targets,
        "eval_best": cursor.evaluated.best_step == cursor.step,
    }


def eval_message(job_id: str, entry: dict[str, Any]) -> JobEval:
    """The message for one entry whose loss is finite."""
    return JobEval(
        job_id=job_id,
        step=entry["step"],
        loss=entry["eval_loss"],
        mean_token_accuracy=entry["eval_mean_token_accuracy"],
        num_tokens=entry["eval_num_tokens"],
        best=entry["eval_best"],
    )


def newest_reports(job_id: str, log_history: list[dict[str, Any]], total_steps: int) -> list[JobProgress | JobEval]:
    """What may not have been received of the newest entries, to be told once more."""
    reports: list[JobProgress | JobEval] = []
    for entry in log_history:
        if "eval_loss" in entry:
            reports += [eval_message(job_id, entry)] if entry["eval_loss"] is not None else []
        elif not entry["skipped"]:
            reports.append(progress_message(job_id, entry, total_steps))
    return reports


def checkpoint_message(
    job: StartJob, cursor: Cursor, log_history: list[dict[str, Any]], adapter: tuple[str, Path], final: bool
) -> JobCheckpoint:
    """The message for a checkpoint at the cursor; ``adapter`` is the published version and its folder."""
    losses = [entry["loss"] for entry in log_history if entry.get("loss") is not None]
    version, directory = adapter
    return JobCheckpoint(
        job_id=job.job_id,
        name=job.name,
        step=cursor.step,
        version=version,
        directory=str(directory),
        checkpoint_dir=str(checkpoint_folder(Path(job.job_dir), cursor.step)),
        loss=losses[-1] if losses else math.nan,
        trained_tokens=cursor.trained_tokens,
        final=final,
    )
