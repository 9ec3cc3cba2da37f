"""Registry of adapter versions: ``name@step`` is immutable, ``name`` moves."""

from __future__ import annotations

from collections.abc import Iterable

from fineinfer.store.database import Database
from fineinfer.store.records import AdapterRecord, NameTakenError, now


class AdapterStore:
    """Rows of the ``adapters`` table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def publish(self, name: str, step: int, version: str, directory: str, job_id: str | None) -> AdapterRecord:
        """Make this version ``name@step`` and let ``name`` mean it, in one transaction. Publishing it again is fine.

        Raises:
            NameTakenError: The name belongs to another job.
        """
        with self._db.transaction():
            owner = self._db.first("SELECT job_id FROM adapters WHERE name = ? AND job_id IS NOT ?", name, job_id)
            if owner is not None:
                raise NameTakenError(f"The model name '{name}' belongs to another job.")
            self._db.execute("UPDATE adapters SET current = 0 WHERE name = ?", name)
            self._db.execute(
                "INSERT OR REPLACE INTO adapters (name, step, version, directory, job_id, created_at, current) "
                "VALUES (?,?,?,?,?,?,1)",
                name, step, version, directory, job_id, now(),
            )  # fmt: skip
        record = self.resolve(name)
        if record is None:
            raise NameTakenError(f"The model name '{name}' was removed while it was published.")
        return record

    def resolve(self, name: str) -> AdapterRecord | None:
        """The version that ``name`` or ``name@step`` means now, or None."""
        row = self._db.first("SELECT * FROM adapters WHERE name = ? AND current = 1", name)
        base, _, step = name.rpartition("@")
        if row is None and base and step.isascii() and step.isdigit() and len(step) < 18:
            row = self._db.first("SELECT * FROM adapters WHERE name = ? AND step = ?", base, int(step))
        return _record(dict(row)) if row else None

    def all(self) -> list[AdapterRecord]:
        """Every version, by name, oldest step first."""
        return _records(self._db.rows("SELECT * FROM adapters ORDER BY name, step"))

    def current(self) -> list[AdapterRecord]:
        """The version behind each plain name."""
        return _records(self._db.rows("SELECT * FROM adapters WHERE current = 1 ORDER BY name"))

    def delete(self, name: str) -> bool:
        """Forget every version of ``name``; False if there is none. The supervisor tells the engine."""
        return self._db.execute("DELETE FROM adapters WHERE name = ?", name) > 0


def _records(rows: Iterable[object]) -> list[AdapterRecord]:
    return [_record(dict(row)) for row in rows]  # type: ignore[call-overload]


def _record(row: dict[str, object]) -> AdapterRecord:
    return AdapterRecord(**{**row, "current": bool(row["current"])})  # type: ignore[arg-type]
