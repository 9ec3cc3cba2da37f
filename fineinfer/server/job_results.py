"""The result file of a finished job: its step metrics as CSV."""

from __future__ import annotations

import csv
import hashlib
import os

from fineinfer.store import FileRecord, JobRecord, Store, new_id, now

_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "trained_tokens": "trained_tokens",
}


def write_result_file(store: Store, job: JobRecord) -> FileRecord:
    """Write the CSV (OpenAI's columns first) and return its record, which the caller commits.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    file_id = new_id("file")
    path = store.file_path(file_id)
    try:
        with path.open("x", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(_COLUMNS)
            for event in store.jobs.metrics(job.id):
                writer.writerow([event.data.get(key, "") for key in _COLUMNS.values()])
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    content = path.read_bytes()
    return FileRecord(
        id=file_id,
        filename="step_metrics.csv",
        bytes=len(content),
        purpose="fine-tune-results",
        sha256=hashlib.sha256(content).hexdigest(),
        created_at=now(),
    )
