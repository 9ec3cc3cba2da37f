"""What the registry stores: immutable records, JSON inside where SQL never looks."""

from __future__ import annotations

import enum
import secrets
import time
from typing import Any

import msgspec


class JobStatus(enum.StrEnum):
    """OpenAI's statuses of a fine-tuning job, and those of a pause and of the time after the last update."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FINALIZING = "finalizing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({JobStatus.FAILED, JobStatus.CANCELLED})
TRANSITIONS: dict[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING: _ENDS | {JobStatus.QUEUED},
    JobStatus.QUEUED: _ENDS | {JobStatus.RUNNING, JobStatus.PAUSED},
    JobStatus.RUNNING: _ENDS | {JobStatus.PAUSING, JobStatus.PAUSED, JobStatus.FINALIZING},
    JobStatus.PAUSING: _ENDS | {JobStatus.PAUSED, JobStatus.FINALIZING},  # it may end before it hears of the pause
    JobStatus.PAUSED: _ENDS | {JobStatus.QUEUED},
    JobStatus.FINALIZING: _ENDS | {JobStatus.SUCCEEDED},
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}
TERMINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)


class JobStateConflictError(RuntimeError):
    """A transition the job's state machine does not allow, or a job that changed meanwhile."""


class NameTakenError(ValueError):
    """An adapter name that another job or adapter holds."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded (or produced) file; its bytes are ``<state>/files/<id>``."""

    id: str
    filename: str
    bytes: int
    purpose: str
    sha256: str
    created_at: int
    expires_at: int | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuning job.

    Attributes:
        version: Counts the changes of state; every change names the version it was decided on.
        name: Served name of the adapter.
        request: What the user asked for (a JobRequest of server/job_params.py as builtins).
        settings: Resolved TrainingSettings as builtins, once the file is validated.
        dataset: Content of dataset.json, once the file is validated.
        local_key: Set for ``--lora-train`` jobs: hash of file, name and settings.
        progress: The latest metrics.
        device_s: Seconds of the device that its training took, over all engine processes.
        num_engine_deaths: Engine processes that ended while training this job, since it came to a new update.
        owner: Whose job it is, see fineinfer.server.boundary; queued jobs take turns by owner.
        priority: Lower is trained earlier.
    """

    id: str
    version: int
    status: JobStatus
    name: str
    created_at: int
    finished_at: int | None
    request: dict[str, Any]
    settings: dict[str, Any] | None
    dataset: dict[str, Any] | None
    error: dict[str, Any] | None
    local_key: str | None
    trained_tokens: int | None
    progress: dict[str, Any] | None
    num_engine_deaths: int
    result_files: list[str]
    device_s: float = 0.0
    owner: str = ""
    priority: int = 0


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a job's story; ``type`` is ``message`` or ``metrics``."""

    id: str
    job_id: str
    created_at: int
    level: str
    type: str
    message: str
    data: dict[str, Any]
    step: int | None


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint that is served as ``name@step``."""

    id: str
    job_id: str
    created_at: int
    step: int
    name: str
    version: str
    metrics: dict[str, Any]


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable adapter version; ``current`` is the one that the plain name means, ``pinned`` stays loaded."""

    name: str
    step: int
    version: str
    directory: str
    job_id: str | None
    created_at: int
    current: bool
    pinned: bool = False


def new_id(prefix: str) -> str:
    """A fresh random id such as ``ftjob-3f…`` (96 bits)."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Unix time in whole seconds, as OpenAI's objects carry it."""
    return int(time.time())


def to_json(value: Any) -> str:
    """Compact JSON text of builtins or structs."""
    return msgspec.json.encode(value).decode()
