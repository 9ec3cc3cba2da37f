"""Registry of adapter versions: ``name@step`` is immutable, ``name`` moves."""

from __future__ import annotations

from collections.abc import Iterable

from fineinfer.store.database import Database
from fineinfer.store.records import TERMINAL, AdapterRecord, NameTakenError, now

_IS_LIVE = f"status NOT IN ({', '.join(repr(status.value) for status in sorted(TERMINAL))})"


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
            pinned = self._db.first("SELECT 1 FROM adapters WHERE name = ? AND pinned = 1", name) is not None
            self._db.execute(
                "INSERT OR REPLACE INTO adapters (name, step, version, directory, job_id, created_at, current, pinned) "
                "VALUES (?,?,?,?,?,?,?,?)",
                name, step, version, directory, job_id, now(), current, pinned,
            )  # fmt: skip
        record = self.resolve(f"{name}@{step}")
        if record is None:
            raise NameTakenError(f"The model name '{name}' was removed while it was published.")
        return record

    def check_free(self, name: str, replace: bool = False) -> None:
        """Raise NameTakenError if ``name`` belongs to a job, or to a loaded adapter and may not be replaced."""
        job = self._db.first(f"SELECT id AS job_id FROM jobs WHERE name = ? AND {_IS_LIVE}", name)
        owner = job or self._db.first("SELECT job_id FROM adapters WHERE name = ?", name)
        if owner is not None and owner["job_id"] is not None:
            raise NameTakenError(f"The name '{name}' belongs to fine-tuning job {owner['job_id']}.")
        if owner is not None and not replace:
            raise NameTakenError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )

    def load(
        self, name: str, version: str, directory: str, *, replace: bool = False, pinned: bool = False
    ) -> AdapterRecord:
        """Serve an adapter that no job of this server made, as the next step of its name, in one transaction.

        Args:
            name: Its name.
            version: Hash of its content; a version that the name has already becomes current again.
            directory: PEFT folder.
            replace: Whether the name may have versions already.
            pinned: Whether the name's current version keeps its slot.

        Raises:
            NameTakenError: The name belongs to a job, or to a loaded adapter and ``replace`` is not set.
        """
        with self._db.transaction():
            self.check_free(name, replace)
            rows = self._db.rows("SELECT step, version FROM adapters WHERE name = ? ORDER BY step DESC", name)
            known = next((row["step"] for row in rows if row["version"] == version), None)
            step = known or (rows[0]["step"] + 1 if rows else 1)
            if known is None:
                self.publish(name, step, version, directory, None)
            self._db.execute("UPDATE adapters SET pinned = ? WHERE name = ?", pinned, name)
            return self.set_current(name, step)

    def withdraw(self, name: str, step: int, former_step: int | None) -> None:
        """Undo a ``load`` that made a new version: the name means the former one again, or nothing."""
        with self._db.transaction():
            self._db.execute("DELETE FROM adapters WHERE name = ? AND step = ?", name, step)
            if former_step is not None:
                self.set_current(name, former_step)

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

    def live_job(self, name: str) -> str | None:
        """The running job that serves what it trains under this name, update by update; None: there is none."""
        row = self._db.first(
            "SELECT id FROM jobs WHERE name = ? AND status IN ('running', 'pausing') "
            "AND json_extract(request, '$.serve') = 'live'",
            name,
        )
        return None if row is None else str(row["id"])

    def live_names(self) -> list[str]:
        """Names for which there is a ``live_job``."""
        rows = self._db.rows("SELECT name FROM jobs WHERE status IN ('running', 'pausing') ORDER BY name")
        return [row["name"] for row in rows if self.live_job(row["name"]) is not None]

    def is_used(self, version: str) -> bool:
        """Whether any name has this version."""
        return self._db.first("SELECT 1 FROM adapters WHERE version = ?", version) is not None

    def num_pinned(self, besides: str) -> int:
        """How many other names are pinned."""
        sql = "SELECT count(DISTINCT name) FROM adapters WHERE pinned = 1 AND name <> ?"
        return int(self._db.one(sql, besides)[0])

    def delete(self, name: str) -> bool:
        """Forget every version of ``name``; False if there is none. The supervisor tells the engine."""
        return self._db.execute("DELETE FROM adapters WHERE name = ?", name) > 0


def _records(rows: Iterable[object]) -> list[AdapterRecord]:
    return [_record(dict(row)) for row in rows]  # type: ignore[call-overload]


def _record(row: dict[str, object]) -> AdapterRecord:
    return AdapterRecord(**{**row, "current": bool(row["current"]), "pinned": bool(row["pinned"])})  # type: ignore[arg-type]
