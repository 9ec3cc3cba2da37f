"""The job's cursor and what is recorded and reported of a finished update."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fineinfer.messages import JobCheckpoint, JobProgress, StartJob
from fineinfer.training.checkpoint import checkpoint_folder


@dataclass
class Cursor:
    """Where the job stands; saved in every checkpoint.

    Attributes:
        step: Finished updates, skipped ones included.
        trained_tokens: Loss-carrying tokens so far.
        processed_tokens: All tokens so far.
        num_skipped: Updates skipped because loss or gradient was not finite.
        bad_in_a_row: The newest of them without a good one since.
    """

    step: int = 0
    trained_tokens: int = 0
    processed_tokens: int = 0
    num_skipped: int = 0
    bad_in_a_row: int = 0

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


def checkpoint_message(
    job: StartJob, cursor: Cursor, log_history: list[dict[str, Any]], adapter: tuple[str, Path], final: bool
) -> JobCheckpoint:
    """The message for a checkpoint at the cursor; ``adapter`` is the published version and its folder."""
    losses = [entry["loss"] for entry in log_history if entry["loss"] is not None]
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
