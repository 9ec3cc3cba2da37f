"""Registry of adapter versions: ``name@step`` is immutable, ``name`` moves."""

from __future__ import annotations

from collections.abc import Iterable

from fineinfer.store.database import Database
from fineinfer.store.records import AdapterRecord, NameTakenError, now


class AdapterStore:
    """Rows of the ``adapters`` table."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def publish(
        self, name: str, step: int, version: str, directory: str, job_id: str | None, *, current: bool = True
    ) -> AdapterRecord:
        """Make this version ``name@step`` and let ``name`` mean it, in one transaction. Publishing it again is fine.

        Args:
            name: The adapter's name.
            step: Number of the version.
            version: Hash of its content.
            directory: PEFT folder.
            job_id: The job that trained it.
            current: Whether ``name`` means it from now on; without, a name may have versions and mean none of them.

        Raises:
            NameTakenError: The name belongs to another job.
        """
        with self._db.transaction():
            owner = self._db.first("SELECT job_id FROM adapters WHERE name = ? AND job_id IS NOT ?", name, job_id)
            if owner is not None:
                raise NameTakenError(f"The model name '{name}' belongs to another job.")
            old = self._db.first("SELECT step FROM adapters WHERE name = ? AND current = 1", name)
            current = current or (old is not None and old["step"] == step)
            if current:
                self._db.execute("UPDATE adapters SET current = 0 WHERE name = ?", name)
            self._db.execute(
                "INSERT OR REPLACE INTO adapters (name, step, version, directory, job_id, created_at, current) "
                "VALUES (?,?,?,?,?,?,?)",
                name, step, version, directory, job_id, now(), current,
            )  # fmt: skip
        record = self.resolve(f"{name}@{step}")
        if record is None:
            raise NameTakenError(f"The model name '{name}' was removed while it was published.")
        return record

    def set_current(self, name: str, step: int) -> AdapterRecord:
        """Let ``name`` mean its version ``step`` from now on (a rollback, or the best of a job's checkpoints).

        Raises:
            LookupError: There is no such version.
        """
        with self._db.transaction():
            if self._db.first("SELECT 1 FROM adapters WHERE name = ? AND step = ?", name, step) is None:
                raise LookupError(f"There is no version '{name}@{step}'.")
            self._db.execute("UPDATE adapters SET current = 0 WHERE name = ?", name)
            self._db.execute("UPDATE adapters SET current = 1 WHERE name = ? AND step = ?", name, step)
        return next(record for record in self.current() if record.name == name)

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

    def versions(self, name: str) -> list[AdapterRecord]:
        """Every version of one name, oldest step first, whether or not the name means one."""
        return _records(self._db.rows("SELECT * FROM adapters WHERE name = ? ORDER BY step", name))

    def current(self) -> list[AdapterRecord]:
        """The version behind each plain name."""
        return _records(self._db.rows("SELECT * FROM adapters WHERE current = 1 ORDER BY name"))

    def delete(self, name: str) -> bool:
        """Forget every version of ``name``; False if there is none. The supervisor tells the engine."""
        return self._db.execute("DELETE FROM adapters WHERE name = ?", name) > 0


def _records(rows: Iterable[object]) -> list[AdapterRecord]:
    return [_record(dict(row)) for row in rows]  # type: ignore[call-overload]


def _record(row: dict[str, object]) -> AdapterRecord:
    return AdapterRecord(**{**row, "current": bool(row["current"]), "pinned": bool(row["pinned"])})  # type: ignore[arg-type]
