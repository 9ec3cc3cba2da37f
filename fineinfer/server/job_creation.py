"""Makes a job: its folder with the training file in it, then its row; used by the HTTP route and by --lora-train."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from fineinfer.server.job_params import JobRequest
from fineinfer.store import FileRecord, JobRecord, JobStatus, Store, new_id, now

TRAINING_FILE = "training.jsonl"


def create_job(
    store: Store,
    request: JobRequest,
    *,
    idempotency_key: str | None = None,
    body_sha256: str = "",
    local_key: str | None = None,
    owner: str = "",
) -> JobRecord:
    """Create a job in ``validating_files``; the file stays usable for it even if its id is deleted later.

    Args:
        store: The registry.
        request: A checked request whose training file exists.
        idempotency_key: Requests with the same key make one job.
        body_sha256: Identifies the request body that the key stands for.
        local_key: Identifies a ``--lora-train`` job.
        owner: Whose job it is; keys of different owners do not meet, and queued jobs take turns by owner.

    Raises:
        FileNotFoundError: The training file was deleted meanwhile.
        IdempotencyConflictError: The key was used with another body.
        NameTakenError: The adapter's name belongs to another live job or adapter.
    """
    job_id = new_id("ftjob")
    record = JobRecord(
        id=job_id,
        version=1,
        status=JobStatus.VALIDATING,
        name=request.suffix or f"ft-{job_id.removeprefix('ftjob-')[:8]}",
        created_at=now(),
        finished_at=None,
        request=msgspec.to_builtins(request),
        settings=None,
        dataset=None,
        error=None,
        local_key=local_key,
        trained_tokens=None,
        progress=None,
        num_engine_deaths=0,
        result_files=[],
        owner=owner,
        priority=request.priority,
    )
    folder = store.job_dir(job_id)
    folder.mkdir(mode=0o700)
    try:
        _link_or_copy(store.file_path(request.training_file), folder / TRAINING_FILE)
        made = store.jobs.create(record, idempotency_key=idempotency_key, body_sha256=body_sha256)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if made.id != job_id:
        shutil.rmtree(folder, ignore_errors=True)
    return made


def add_file(store: Store, content: Path, filename: str, purpose: str) -> FileRecord:
    """Copy a local file into the store as a file object."""
    file_id = new_id("file")
    target = store.file_path(file_id)
    digest, size = hashlib.sha256(), 0
    with content.open("rb") as source, target.open("xb") as out:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    record = FileRecord(
        id=file_id, filename=filename, bytes=size, purpose=purpose, sha256=digest.hexdigest(), created_at=now()
    )
    store.files.add(record)
    return record


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
