"""SQLite connection, schema and migrations of the state registry (one file, several processes)."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 3
BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    purpose TEXT NOT NULL, sha256 TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, status TEXT NOT NULL,
    name TEXT NOT NULL, created_at INTEGER NOT NULL, finished_at INTEGER, request TEXT NOT NULL, settings TEXT,
    dataset TEXT, error TEXT, local_key TEXT, trained_tokens INTEGER, progress TEXT, num_engine_deaths INTEGER NOT NULL,
    result_files TEXT NOT NULL);
CREATE INDEX jobs_by_status ON jobs (status, seq);
CREATE UNIQUE INDEX jobs_one_live_name ON jobs (name) WHERE status IN ('validating_files', 'queued', 'running');
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job_id TEXT NOT NULL, created_at INTEGER NOT NULL,
    level TEXT NOT NULL, type TEXT NOT NULL, message TEXT NOT NULL, data TEXT NOT NULL, step INTEGER);
CREATE INDEX events_by_job ON events (job_id, seq);
CREATE UNIQUE INDEX events_one_metric ON events (job_id, step) WHERE step IS NOT NULL;
CREATE TABLE checkpoints (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job_id TEXT NOT NULL, created_at INTEGER NOT NULL,
    step INTEGER NOT NULL, name TEXT NOT NULL, version TEXT NOT NULL, metrics TEXT NOT NULL, UNIQUE (job_id, step));
CREATE TABLE adapters (
    name TEXT NOT NULL, step INTEGER NOT NULL, version TEXT NOT NULL, directory TEXT NOT NULL, job_id TEXT,
    created_at INTEGER NOT NULL, current INTEGER NOT NULL, PRIMARY KEY (name, step));
CREATE UNIQUE INDEX adapters_one_current ON adapters (name) WHERE current = 1;
CREATE TABLE idempotency (
    key TEXT PRIMARY KEY, body_sha256 TEXT NOT NULL, job_id TEXT NOT NULL, created_at INTEGER NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


# from this version to the next
_MIGRATIONS = {
    1: "ALTER TABLE jobs ADD COLUMN device_s REAL NOT NULL DEFAULT 0",
    2: """
ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
DROP INDEX jobs_one_live_name;
CREATE UNIQUE INDEX jobs_one_live_name ON jobs (name) WHERE status NOT IN ('succeeded', 'failed', 'cancelled');
ALTER TABLE adapters ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
""",
}


class StoreError(RuntimeError):
    """The state database cannot be used (written by a newer version, or damaged)."""


class Database:
    """One SQLite connection, usable from any thread of this process; other processes open their own.

    WAL with ``synchronous=FULL``: a committed transaction survives a power cut, and readers never block the writer.

    Args:
        path: The database file; created with the schema if missing.

    Raises:
        StoreError: The file has the schema of a newer program.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._migrate(path)

    def _migrate(self, path: Path) -> None:
        with self.transaction():
            version = int(self.one("PRAGMA user_version")[0])
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self.execute(statement)
                version = 1
            if version > SCHEMA_VERSION:
                raise StoreError(f"{path} has schema version {version}; this program knows version {SCHEMA_VERSION}.")
            for step in range(version, SCHEMA_VERSION):
                for statement in _MIGRATIONS[step].split(";"):
                    self.execute(statement)
            self.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside commit together or not at all; takes the write lock at once; nests."""
        with self._lock:
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                if self._depth == 0:
                    self._connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self._connection.execute("COMMIT")

    def execute(self, sql: str, *args: Any) -> int:
        """Run one statement; returns the number of rows it changed."""
        with self._lock:
            return self._connection.execute(sql, args).rowcount

    def rows(self, sql: str, *args: Any) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._lock:
            return self._connection.execute(sql, args).fetchall()

    def first(self, sql: str, *args: Any) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        rows = self.rows(sql, *args)
        return rows[0] if rows else None

    def one(self, sql: str, *args: Any) -> sqlite3.Row:
        """The first row of a query that always has one."""
        return self.rows(sql, *args)[0]

    def data_version(self) -> int:
        """A number that changes whenever another connection (process) committed something."""
        return int(self.one("PRAGMA data_version")[0])

    def change_mark(self) -> tuple[int, int]:
        """As ``data_version``, but changes with commits of this connection too."""
        with self._lock:
            return self.data_version(), self._connection.total_changes

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()


def select_page(
    db: Database, table: str, where: str, args: list[Any], cursor: tuple[str | None, int, bool]
) -> tuple[list[sqlite3.Row], bool]:
    """One page of a table in creation order, the way OpenAI's lists page.

    Args:
        db: Where to look.
        table: Table name (from code, never from a request).
        where: SQL condition with ``?`` marks for ``args``.
        args: Values of the condition.
        cursor: (id after which the page begins or None, most rows, newest first).

    Returns:
        The rows and whether more follow.

    Raises:
        UnknownCursorError: No row has the id of the cursor.
    """
    after, limit, newest_first = cursor
    if after is not None:
        start = db.first(f"SELECT seq FROM {table} WHERE id = ?", after)
        if start is None:
            raise UnknownCursorError(after)
        where += f" AND seq {'<' if newest_first else '>'} ?"
        args = [*args, start["seq"]]
    order = "DESC" if newest_first else "ASC"
    rows = db.rows(f"SELECT * FROM {table} WHERE {where} ORDER BY seq {order} LIMIT ?", *args, limit + 1)
    return rows[:limit], len(rows) > limit


class UnknownCursorError(LookupError):
    """``after`` names an object that is not in the list."""
