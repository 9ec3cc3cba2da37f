"""Registry of fine-tuning jobs, their events and checkpoints; the state machine is enforced here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fineinfer.store.database import Database, select_page
from fineinfer.store.job_queue import fair_order, next_turn
from fineinfer.store.records import (
    TERMINAL,
    TRANSITIONS,
    CheckpointRecord,
    EventRecord,
    JobRecord,
    JobStateConflictError,
    JobStatus,
    NameTakenError,
    new_id,
    now,
    to_json,
)

_JSON_COLUMNS = ("request", "settings", "dataset", "error", "progress", "result_files")


class IdempotencyConflictError(ValueError):
    """An ``Idempotency-Key`` that was used before with another body."""


class JobStore:
    """Rows of ``jobs``, ``events``, ``checkpoints`` and ``idempotency``.

    The status only changes by ``transition``, a compare-and-set on the record's version, so of two processes that
    decide on the same record exactly one wins.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    def create(self, record: JobRecord, *, idempotency_key: str | None = None, body_sha256: str = "") -> JobRecord:
        """Insert a new job with its first event; with a key seen before, return the job made then.

        Raises:
            IdempotencyConflictError: The key was used with another body.
            NameTakenError: The adapter name belongs to another live job or adapter.
        """
        with self._db.transaction():
            if idempotency_key is not None:
                known = self.by_idempotency_key(idempotency_key, body_sha256, record.owner)
                if known is not None:
                    return known
                scoped = _scoped(idempotency_key, record.owner)
                self._db.execute("INSERT INTO idempotency VALUES (?,?,?,?)", scoped, body_sha256, record.id, now())
            self._check_name_free(record.name)
            values: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
            values.update({name: _dump(values[name]) for name in _JSON_COLUMNS}, status=record.status.value)
            marks = ",".join("?" * len(values))
            self._db.execute(f"INSERT INTO jobs ({','.join(values)}) VALUES ({marks})", *values.values())
            self.add_event(record.id, "info", f"Created fine-tuning job: {record.id}")
        return record

    def by_idempotency_key(self, key: str, body_sha256: str, owner: str = "") -> JobRecord | None:
        """The job that this owner made with this key before, or None.

        Raises:
            IdempotencyConflictError: The key was used with another body.
        """
        seen = self._db.first("SELECT * FROM idempotency WHERE key = ?", _scoped(key, owner))
        if seen is None:
            return None
        if seen["body_sha256"] != body_sha256:
            raise IdempotencyConflictError("This Idempotency-Key was used with another request body.")
        return self.require(seen["job_id"])

    def _check_name_free(self, name: str) -> None:
        live = [row["id"] for row in self._db.rows("SELECT id, status FROM jobs WHERE name = ?", name)
                if row["status"] not in TERMINAL]  # fmt: skip
        adapter = self._db.first("SELECT job_id FROM adapters WHERE name = ?", name)
        if live or adapter is not None:
            owner = f"job {live[0]}" if live else "a published adapter"
            raise NameTakenError(
                f"The model name '{name}' belongs to {owner}; choose another suffix or delete it first."
            )

    def get(self, job_id: str) -> JobRecord | None:
        """The job, or None."""
        row = self._db.first("SELECT * FROM jobs WHERE id = ?", job_id)
        return _job(row) if row else None

    def require(self, job_id: str) -> JobRecord:
        """The job.

        Raises:
            LookupError: There is none with this id.
        """
        job = self.get(job_id)
        if job is None:
            raise LookupError(f"No fine-tuning job '{job_id}'.")
        return job

    def transition(self, job: JobRecord, to: JobStatus, **fields: Any) -> JobRecord:
        """Move the job to another status and set fields, if it is still at ``job.version``.

        Raises:
            JobStateConflictError: The state machine forbids it, or the job changed meanwhile.
        """
        if to not in TRANSITIONS[job.status]:
            raise JobStateConflictError(f"A job that is {job.status.value} cannot become {to.value}.")
        if to in TERMINAL:
            fields.setdefault("finished_at", now())
        fields.update(status=to.value, version=job.version + 1)
        names = ", ".join(f"{name} = ?" for name in fields)
        values = [_dump(value) if name in _JSON_COLUMNS else value for name, value in fields.items()]
        changed = self._db.execute(
            f"UPDATE jobs SET {names} WHERE id = ? AND version = ?", *values, job.id, job.version
        )
        if changed != 1:
            raise JobStateConflictError(f"Job {job.id} changed meanwhile.")
        return self.require(job.id)

    # ------------------------------------------------------------ what users ask for

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel a job that has not ended, whatever it is doing; of two ends the first one counts.

        Raises:
            LookupError: There is no such job.
            JobStateConflictError: The job has ended already.
        """
        return self._act(job_id, "cancelled", _CANCEL)

    def pause(self, job_id: str) -> JobRecord:
        """Take a queued job out of the queue, or let the engine stop a running one, which takes a moment.

        Raises:
            LookupError: There is no such job.
            JobStateConflictError: The job is neither queued nor running.
        """
        return self._act(job_id, "paused", _PAUSE)

    def resume(self, job_id: str) -> JobRecord:
        """Queue a paused job again; it goes on from its newest checkpoint.

        Raises:
            LookupError: There is no such job.
            JobStateConflictError: The job is not paused.
        """
        return self._act(job_id, "resumed", _RESUME, num_engine_deaths=0)  # a new chance

    def _act(self, job_id: str, done: str, moves: dict[JobStatus, tuple[JobStatus, str]], **fields: Any) -> JobRecord:
        with self._db.transaction():
            job = self.require(job_id)
            if job.status not in moves:
                raise JobStateConflictError(f"Job {job_id} {_DOING[job.status]} and cannot be {done}.")
            to, message = moves[job.status]
            job = self.transition(job, to, **fields)
            self.add_event(job_id, "info", message)
        return job

    # ------------------------------------------------------------ queue

    def queue(self) -> list[str]:
        """Ids of the queued jobs in the order in which they will start, see ``fair_order``."""
        rows = self._db.rows("SELECT id, owner, priority FROM jobs WHERE status = 'queued' ORDER BY seq")
        return fair_order([(row["id"], row["owner"], row["priority"]) for row in rows], self._turns())

    def start_next(self) -> JobRecord | None:
        """Move the first job of the queue to ``running``; None if there is none."""
        with self._db.transaction():
            queue = self.queue()
            if not queue:
                return None
            job = self.transition(self.require(queue[0]), JobStatus.RUNNING)
            turn = next_turn(self._turns())
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", _TURN + job.owner, str(turn))
        return job

    def _turns(self) -> dict[str, int]:
        """When each owner's last job started, counted in starts."""
        rows = self._db.rows("SELECT key, value FROM meta WHERE key GLOB ?", _TURN + "*")
        return {row["key"].removeprefix(_TURN): int(row["value"]) for row in rows}

    def queue_position(self, job: JobRecord) -> int | None:
        """1 for the queued job that runs next; None for a job that is not queued."""
        queue = self.queue() if job.status is JobStatus.QUEUED else []
        return queue.index(job.id) + 1 if job.id in queue else None

    # ------------------------------------------------------------ what the engine reports

    def record_progress(self, job_id: str, step: int, data: dict[str, Any], trained_tokens: int) -> bool:
        """Store the metrics of one update, keyed by (job, step). False if not training.

        Of one that is told or trained again its rates stay, if it comes without: a resumed job repeats its last ones.
        Only one that no run has come to before clears the job of the engines that died with it.
        """
        with self._db.transaction():
            job = self.get(job_id)
            if job is None or job.status not in TRAINING:
                return False
            before = self.metrics_of(job_id, step)
            if not data.get("tokens_per_second"):
                data = data | {key: before[key] for key in _RATES if key in before}
            shown = {key: value for key, value in (job.progress or {}).items() if key in _KEPT_PROGRESS} | data
            newest = self._db.first("SELECT max(step) AS step FROM events WHERE job_id = ?", job_id)
            deaths = 0 if newest is None or step > (newest["step"] or 0) else job.num_engine_deaths
            self._db.execute(
                "UPDATE jobs SET progress = ?, trained_tokens = ?, num_engine_deaths = ? WHERE id = ?",
                to_json(shown), trained_tokens, deaths, job_id,
            )  # fmt: skip
            self._put_metrics(job_id, step, data | {key: before[key] for key in _EVALUATED if key in before})
        return True

    def record_eval(self, job_id: str, step: int, loss: float, accuracy: float, best: bool) -> bool:
        """Add an evaluation to the metrics of its step; a replayed one changes nothing. False if not training."""
        with self._db.transaction():
            job = self.get(job_id)
            if job is None or job.status not in TRAINING:
                return False
            before = self.metrics_of(job_id, step)
            found = {"valid_loss": loss, "valid_mean_token_accuracy": accuracy}
            self._put_metrics(job_id, step, {"step": step} | before | found)
            if job.progress is not None:
                shown = {"eval_step": step, "eval_loss": loss, "eval_mean_token_accuracy": accuracy}
                self._db.execute("UPDATE jobs SET progress = ? WHERE id = ?", to_json(job.progress | shown), job_id)
            if "valid_loss" not in before:  # those who follow the events saw the step's metrics without it
                text = f"Evaluation at step {step}: loss={loss:.4f}, token accuracy={accuracy:.4f}"
                self.add_event(job_id, "info", text + (", the best so far" if best else ""), {"step": step} | found)
        return True

    def metrics_of(self, job_id: str, step: int) -> dict[str, Any]:
        """The metrics of one update, empty if there are none."""
        row = self._db.first("SELECT data FROM events WHERE job_id = ? AND step = ?", job_id, step)
        return {} if row is None else msgspec.json.decode(row["data"], type=dict[str, Any])

    def checkpoint_losses(self, job_id: str) -> dict[int, float]:
        """Evaluation loss by step, of the checkpoints that have one."""
        sql = "SELECT step, metrics ->> '$.valid_loss' AS loss FROM checkpoints WHERE job_id = ? ORDER BY step"
        return {row["step"]: row["loss"] for row in self._db.rows(sql, job_id) if row["loss"] is not None}

    def _put_metrics(self, job_id: str, step: int, data: dict[str, Any]) -> None:
        parts = [f"{words}={data[key]:.4f}" for key, words in _LOSSES.items() if data.get(key) is not None]
        message = f"Step {step}/{data.get('total_steps', '?')}: {', '.join(parts)}"
        self._db.execute(
            "INSERT INTO events (id, job_id, created_at, level, type, message, data, step) "
            "VALUES (?,?,?,'info','metrics',?,?,?) ON CONFLICT (job_id, step) WHERE step IS NOT NULL "
            "DO UPDATE SET message = excluded.message, data = excluded.data, created_at = excluded.created_at",
            new_id("ftevent"), job_id, now(), message, to_json(data), step,
        )  # fmt: skip

    def record_usage(self, job_id: str, device_s: float) -> None:
        """Store how much device time a job has used in all; an older, smaller number changes nothing."""
        self._db.execute("UPDATE jobs SET device_s = max(device_s, ?) WHERE id = ?", device_s, job_id)

    def count_engine_death(self, job_id: str) -> int:
        """An engine died while it trained this job; returns how many did so without finishing an update."""
        self._db.execute("UPDATE jobs SET num_engine_deaths = num_engine_deaths + 1 WHERE id = ?", job_id)
        return self.require(job_id).num_engine_deaths

    def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Register a durable checkpoint; the same (job, step) again replaces it."""
        self._db.execute(
            "INSERT INTO checkpoints (id, job_id, created_at, step, name, version, metrics) VALUES (?,?,?,?,?,?,?) "
            "ON CONFLICT (job_id, step) DO UPDATE SET version = excluded.version, metrics = excluded.metrics",
            record.id, record.job_id, record.created_at, record.step, record.name, record.version,
            to_json(record.metrics),
        )  # fmt: skip

    def add_event(self, job_id: str, level: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Append a ``message`` event; ``level`` is info, warn or error."""
        self._db.execute(
            "INSERT INTO events (id, job_id, created_at, level, type, message, data) VALUES (?,?,?,?,'message',?,?)",
            new_id("ftevent"), job_id, now(), level, message, to_json(data or {}),
        )  # fmt: skip

    def with_status(self, *statuses: JobStatus) -> list[JobRecord]:
        """Jobs in any of these statuses, oldest first."""
        marks = ",".join("?" * len(statuses))
        sql = f"SELECT * FROM jobs WHERE status IN ({marks}) ORDER BY seq"
        return [_job(row) for row in self._db.rows(sql, *(status.value for status in statuses))]

    def by_local_key(self, key: str) -> JobRecord | None:
        """The newest ``--lora-train`` job made from the same file, name and settings."""
        row = self._db.first("SELECT * FROM jobs WHERE local_key = ? ORDER BY seq DESC LIMIT 1", key)
        return _job(row) if row else None

    # ------------------------------------------------------------ lists

    def page(
        self, *, after: str | None = None, limit: int = 20, metadata: dict[str, str] | None = None
    ) -> tuple[list[JobRecord], bool]:
        """One page of jobs, newest first, and whether more follow.

        Raises:
            UnknownCursorError: ``after`` is not a job's id.
        """
        where, args = "1 = 1", list[Any]()
        for key, value in (metadata or {}).items():
            where += (" AND EXISTS (SELECT 1 FROM json_each(jobs.request, '$.metadata') AS pair"
                      " WHERE pair.key = ? AND pair.value = ?)")  # fmt: skip
            args += [key, value]
        rows, more = select_page(self._db, "jobs", where, args, (after, limit, True))
        return [_job(row) for row in rows], more

    def events(
        self, job_id: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True
    ) -> tuple[list[EventRecord], bool]:
        """One page of a job's events and whether more follow.

        Raises:
            UnknownCursorError: ``after`` is not an event's id.
        """
        rows, more = select_page(self._db, "events", "job_id = ?", [job_id], (after, limit, newest_first))
        return [_typed(row, EventRecord, ("data",)) for row in rows], more

    def metrics(self, job_id: str) -> list[EventRecord]:
        """The metrics of every step, in step order."""
        sql = "SELECT * FROM events WHERE job_id = ? AND step IS NOT NULL ORDER BY step"
        return [_typed(row, EventRecord, ("data",)) for row in self._db.rows(sql, job_id)]

    def checkpoint(self, checkpoint_id: str) -> CheckpointRecord | None:
        """The checkpoint with this id, or None."""
        row = self._db.first("SELECT * FROM checkpoints WHERE id = ?", checkpoint_id)
        return _typed(row, CheckpointRecord, ("metrics",)) if row else None

    def checkpoints(
        self, job_id: str, *, after: str | None = None, limit: int = 10
    ) -> tuple[list[CheckpointRecord], bool]:
        """One page of a job's checkpoints, newest first, and whether more follow.

        Raises:
            UnknownCursorError: ``after`` is not a checkpoint's id.
        """
        rows, more = select_page(self._db, "checkpoints", "job_id = ?", [job_id], (after, limit, True))
        return [_typed(row, CheckpointRecord, ("metrics",)) for row in rows], more


TRAINING = frozenset({JobStatus.RUNNING, JobStatus.PAUSING})  # what the engine reports of these counts
_TURN = "turn:"  # keys of ``meta``: when an owner's last job started
_RATES = ("tokens_per_second", "eta_seconds")
_EVALUATED = ("valid_loss", "valid_mean_token_accuracy")
_KEPT_PROGRESS = ("eval_step", "eval_loss", "eval_mean_token_accuracy")  # of the latest evaluation, until the next
_LOSSES = {"train_loss": "training loss", "valid_loss": "validation loss"}
_DOING = {
    JobStatus.VALIDATING: "is validating its files",
    JobStatus.QUEUED: "is queued",
    JobStatus.RUNNING: "is running",
    JobStatus.PAUSING: "is pausing",
    JobStatus.PAUSED: "is paused",
    JobStatus.FINALIZING: "is finalizing",
    JobStatus.SUCCEEDED: "has already succeeded",
    JobStatus.FAILED: "has already failed",
    JobStatus.CANCELLED: "has already been cancelled",
}
# what users may ask for: status -> (next status, event)
_CANCEL = {
    status: (JobStatus.CANCELLED, "The job has been cancelled") for status in JobStatus if status not in TERMINAL
}
_PAUSE = {
    JobStatus.QUEUED: (JobStatus.PAUSED, "The job has been paused"),
    JobStatus.RUNNING: (JobStatus.PAUSING, "The job is being paused"),
}
_RESUME = {JobStatus.PAUSED: (JobStatus.QUEUED, "The job has been resumed and is queued")}


def _scoped(key: str, owner: str) -> str:
    """One owner's key; a line break cannot be in a header, so no key of another can be the same text."""
    return f"{owner}\n{key}" if owner else key


def _dump(value: Any) -> str | None:
    return None if value is None else to_json(value)


def _typed(row: Any, kind: type[Any], json_columns: Iterable[str]) -> Any:
    values = dict(row)
    del values["seq"]
    for name in json_columns:
        values[name] = None if values[name] is None else msgspec.json.decode(values[name])
    return msgspec.convert(values, kind)


def _job(row: Any) -> JobRecord:
    job: JobRecord = _typed(row, JobRecord, _JSON_COLUMNS)
    return job
