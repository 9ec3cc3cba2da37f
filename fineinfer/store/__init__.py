"""The state registry: files, jobs, events, checkpoints and adapters in one SQLite file (no torch)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from fineinfer.store.adapters import AdapterStore
from fineinfer.store.database import Database, StoreError, UnknownCursorError
from fineinfer.store.files import FileStore
from fineinfer.store.jobs import TRAINING, IdempotencyConflictError, JobStore
from fineinfer.store.records import (
    TERMINAL,
    AdapterRecord,
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    JobStateConflictError,
    JobStatus,
    NameTakenError,
    new_id,
    now,
    to_json,
)

__all__ = [
    "TERMINAL",
    "TRAINING",
    "AdapterRecord",
    "CheckpointRecord",
    "EventRecord",
    "FileRecord",
    "IdempotencyConflictError",
    "JobRecord",
    "JobStateConflictError",
    "JobStatus",
    "NameTakenError",
    "Store",
    "StoreError",
    "UnknownCursorError",
    "new_id",
    "now",
    "to_json",
]


class Store:
    """Everything that must outlive the processes, in ``<state_dir>/fineinfer.db``; each process opens its own.

    Args:
        state_dir: Created (mode 0700) with its folders if missing.

    Attributes:
        db: Transactions and the change counter.
        files, jobs, adapters: The tables.
        state_dir: Where the artifacts lie.
    """

    def __init__(self, state_dir: Path | str) -> None:
        self.state_dir = Path(state_dir)
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("files", "jobs", "adapters"):
            (self.state_dir / name).mkdir(mode=0o700, exist_ok=True)
        self.db = Database(self.state_dir / "fineinfer.db")
        self.files = FileStore(self.db)
        self.jobs = JobStore(self.db)
        self.adapters = AdapterStore(self.db)

    def file_path(self, file_id: str) -> Path:
        """Where the bytes of a file are; ``file_id`` must come from a FileRecord."""
        return self.state_dir / "files" / file_id

    def remove_unknown_files(self) -> None:
        """Remove bytes and job folders that no record names: a crash before the record. Call before requests come."""
        for path in (self.state_dir / "files").iterdir():
            if self.db.first("SELECT 1 FROM files WHERE id = ?", path.name) is None:
                path.unlink()
        for path in (self.state_dir / "jobs").iterdir():
            if self.jobs.get(path.name) is None:
                shutil.rmtree(path, ignore_errors=True)

    def needs_adapter(self, version: str) -> bool:
        """Whether a name has this adapter version, or a live job begins with it."""
        begun = "SELECT 1 FROM jobs WHERE finished_at IS NULL AND instr(request, ?) LIMIT 1"
        return self.adapters.is_used(version) or self.db.first(begun, version) is not None

    def remove_unknown_adapters(self) -> None:
        """Remove folders of adapters that nobody needs. Call before anything is served.

        Requests may still need the folder of an adapter that was deleted, so deleting one does not remove it.
        """
        for path in (self.state_dir / "adapters").iterdir():
            if not self.needs_adapter(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def job_dir(self, job_id: str) -> Path:
        """The folder of a job; ``job_id`` must come from a JobRecord."""
        return self.state_dir / "jobs" / job_id

    def set_meta(self, key: str, value: Any) -> None:
        """Store a small JSON value that every process may read (limits of this server, for example)."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, to_json(value))

    def get_meta(self, key: str) -> Any:
        """The value stored under ``key``, or None."""
        row = self.db.first("SELECT value FROM meta WHERE key = ?", key)
        return msgspec.json.decode(row["value"]) if row else None

    def close(self) -> None:
        """Close the database connection."""
        self.db.close()
