"""Registry of uploaded files."""

from __future__ import annotations

from fineinfer.store.database import Database, select_page
from fineinfer.store.records import FileRecord, now


class FileStore:
    """Rows of the ``files`` table; expired files count as deleted."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, record: FileRecord, quota_bytes: int | None = None) -> bool:
        """Register a file whose bytes are already on disk; False if all files would have more than the quota."""
        with self._db.transaction():
            if quota_bytes is not None and self.total_bytes() + record.bytes > quota_bytes:
                return False
            self._db.execute(
                "INSERT INTO files (id, filename, bytes, purpose, sha256, created_at, expires_at)"
                " VALUES (?,?,?,?,?,?,?)",
                record.id, record.filename, record.bytes, record.purpose, record.sha256, record.created_at,
                record.expires_at,
            )  # fmt: skip
        return True

    def get(self, file_id: str) -> FileRecord | None:
        """The file, or None if it never existed, was deleted or expired."""
        row = self._db.first(
            "SELECT * FROM files WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)", file_id, now()
        )
        return _record(dict(row)) if row else None

    def total_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return int(self._db.one("SELECT coalesce(sum(bytes), 0) FROM files")[0])

    def delete(self, file_id: str) -> bool:
        """Forget a file; False if there is none. The caller removes its bytes."""
        return self._db.execute("DELETE FROM files WHERE id = ?", file_id) == 1

    def expired(self) -> list[str]:
        """Ids of the files whose time is over."""
        return [row["id"] for row in self._db.rows("SELECT id FROM files WHERE expires_at <= ?", now())]

    def page(
        self, *, purpose: str | None = None, after: str | None = None, limit: int = 10000, newest_first: bool = True
    ) -> tuple[list[FileRecord], bool]:
        """One page of files and whether more follow.

        Raises:
            UnknownCursorError: ``after`` is not a file's id.
        """
        where, args = "(expires_at IS NULL OR expires_at > ?)", [now()]
        rows, more = select_page(
            self._db,
            "files",
            where if purpose is None else where + " AND purpose = ?",
            args if purpose is None else [*args, purpose],
            (after, limit, newest_first),
        )
        return [_record(dict(row)) for row in rows], more


def _record(row: dict[str, object]) -> FileRecord:
    del row["seq"]
    return FileRecord(**row)  # type: ignore[arg-type]
