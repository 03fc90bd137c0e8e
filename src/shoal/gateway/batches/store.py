"""What survives a restart: files, batches, where the lines are, and their results, in SQLite.

    files     one row per file that clients see; its bytes are beside the database
    batches   one row each, with its state, its counts, and the gateway that works on it (`owner`, until `lease_until`)
    lines     where each line of an unfinished batch is in its input file
    results   the output line of each request that is done; with the row comes its count, in one transaction

A batch's work can end at any moment, and goes on with the lines that have no result. Whoever lost the lease writes
nothing any more: every change of a batch's work asks for its owner. Once the files are written, lines and results go.

Durable against the end of the process, also by SIGKILL. A power cut may take the last moments' transactions along,
never a part of one: their lines are run again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal

from shoal.gateway.batches.objects import OPEN, Batch, File, Place, Status, before

BUSY_S = 5.0  # longest wait for another gateway's transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, model TEXT NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, status TEXT NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT, errors TEXT,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    owner TEXT NOT NULL DEFAULT '', lease_until REAL NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    custom_id TEXT NOT NULL, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, number INTEGER NOT NULL, ok INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (batch, number)
);
"""

Table = Literal["files", "batches"]


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


_COLUMNS: dict[Table, str] = {"files": ", ".join(_names(File)), "batches": ", ".join(_names(Batch))}


class Store:
    """All calls come from one thread. Raises sqlite3.Error, for instance where the disk is full."""

    def __init__(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))  # its log gets that mode
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    # -- files ---------------------------------------------------------------------------------------------------------

    def add_file(self, file: File, quota_bytes: int) -> bool:
        """False where the tenant's files would be more than its quota."""
        with self._transaction():
            used = self._db.execute("SELECT total(bytes) FROM files WHERE tenant = ?", (file.tenant,)).fetchone()[0]
            if used + file.bytes > quota_bytes:
                return False
            self._insert("files", file)
            return True

    def file(self, tenant: str, id: str) -> File | None:
        row = self._row("files", "id = ? AND tenant = ?", id, tenant)
        return None if row is None else File(**dict(row))

    def files(
        self, tenant: str, *, limit: int, after: str | None, ascending: bool, purpose: str | None
    ) -> list[File] | None:
        """None where there is no file `after`."""
        rows = self._page("files", tenant, limit, after, ascending, purpose)
        return None if rows is None else [File(**dict(row)) for row in rows]

    def delete_file(self, tenant: str, id: str) -> Literal["deleted", "in use", "missing"]:
        with self._transaction():
            if self.file(tenant, id) is None:
                return "missing"
            if self._row("batches", f"input_file_id = ? AND status IN ({_marks(OPEN)})", id, *OPEN) is not None:
                return "in use"
            self._db.execute("DELETE FROM files WHERE id = ?", (id,))
            return "deleted"

    # -- batches, for clients ------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch, most_open: int) -> Literal["added", "no file", "too many"]:
        """Too many: the tenant has `most_open` batches that have not ended."""
        with self._transaction():
            file = self.file(batch.tenant, batch.input_file_id)
            if file is None or file.purpose != "batch":
                return "no file"
            count = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({_marks(OPEN)})"
            if self._db.execute(count, (batch.tenant, *OPEN)).fetchone()[0] >= most_open:
                return "too many"
            self._insert("batches", batch)
            return "added"

    def batch(self, tenant: str, id: str) -> Batch | None:
        row = self._row("batches", "id = ? AND tenant = ?", id, tenant)
        return None if row is None else _batch(row)

    def batches(self, tenant: str, *, limit: int, after: str | None) -> list[Batch] | None:
        """Latest first. None where there is no batch `after`."""
        rows = self._page("batches", tenant, limit, after)
        return None if rows is None else [_batch(row) for row in rows]

    def cancel(self, id: str, now_s: float) -> bool:
        """False where it is too late. The batch's owner does the rest."""
        return self._move(id, Status.CANCELLING, now_s)

    # -- batches, for who works on them --------------------------------------------------------------------------------

    def claim(self, owner: str, model: str, now_s: float, lease_s: float) -> Batch | None:
        """The next batch that nobody works on, now `owner`'s: of the tenant with the fewest in hand, the oldest."""
        free = f"model = ? AND status IN ({_marks(OPEN)}) AND owner != ? AND lease_until <= ?"
        held = "SELECT count(*) FROM batches AS held WHERE held.owner = ? AND held.tenant = batches.tenant"
        values = (model, *OPEN, owner, now_s)
        row = self._row("batches", f"{free} ORDER BY ({held}), seq LIMIT 1", *values, owner)
        if row is None:
            return None
        take = f"UPDATE batches SET owner = ?, lease_until = ? WHERE id = ? AND {free}"
        taken = self._db.execute(take, (owner, now_s + lease_s, row["id"], *values))
        return _batch(row) if taken.rowcount else None

    def renew(self, owner: str, now_s: float, lease_s: float) -> list[Batch]:
        """All that are still the owner's, as they are now."""
        if self._row("batches", "owner = ? LIMIT 1", owner) is None:
            return []
        self._db.execute("UPDATE batches SET lease_until = ? WHERE owner = ?", (now_s + lease_s, owner))
        rows = self._db.execute(f"SELECT {_COLUMNS['batches']} FROM batches WHERE owner = ?", (owner,))
        return [_batch(row) for row in rows]

    def release(self, owner: str) -> None:
        """Gives up all that is the owner's."""
        self._db.execute("UPDATE batches SET owner = '', lease_until = 0 WHERE owner = ?", (owner,))

    def held(self, owner: str, id: str) -> Batch | None:
        row = self._row("batches", "id = ? AND owner = ?", id, owner)
        return None if row is None else _batch(row)

    def move(self, owner: str, id: str, to: Status, now_s: float, **changes: object) -> bool:
        """False where the batch is not the owner's, or in no state before `to`. `changes`: of other columns."""
        with self._transaction():
            return self.held(owner, id) is not None and self._move(id, to, now_s, **changes)

    def forget_lines(self, owner: str, id: str) -> None:
        """What an interrupted look at the input file has left."""
        with self._transaction():
            if self.held(owner, id) is not None:
                self._db.execute("DELETE FROM lines WHERE batch = ?", (id,))

    def add_lines(self, owner: str, id: str, places: Sequence[Place]) -> None:
        with self._transaction():
            if self.held(owner, id) is not None:
                rows = [(id, place.number, place.start, place.length, place.custom_id) for place in places]
                self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?)", rows)

    def pending(self, id: str, after: int, limit: int) -> list[Place]:
        """Lines without a result, in order."""
        rows = self._db.execute(
            """SELECT number, start, length, custom_id FROM lines WHERE batch = ? AND number > ? AND NOT EXISTS
               (SELECT 1 FROM results WHERE results.batch = lines.batch AND results.number = lines.number)
               ORDER BY number LIMIT ?""",
            (id, after, limit),
        )
        return [Place(*row) for row in rows]

    def add_result(self, owner: str, id: str, number: int, ok: bool, line: bytes) -> bool:
        """False where the batch is not the owner's. A line that has a result keeps it."""
        with self._transaction():
            if self.held(owner, id) is None:
                return False
            add = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
            if self._db.execute(add, (id, number, ok, line)).rowcount:
                count = "completed" if ok else "failed"
                self._db.execute(f"UPDATE batches SET {count} = {count} + 1 WHERE id = ?", (id,))
            return True

    def results(self, id: str, after: int, limit: int) -> list[tuple[int, bool, bytes]]:
        """(number, ok, line), in order."""
        rows = self._db.execute(
            "SELECT number, ok, line FROM results WHERE batch = ? AND number > ? ORDER BY number LIMIT ?",
            (id, after, limit),
        )
        return [(row["number"], bool(row["ok"]), row["line"]) for row in rows]

    def finish(
        self,
        owner: str,
        id: str,
        to: Status,
        now_s: float,
        *,
        output: File | None = None,
        errors: File | None = None,
        problems: str | None = None,
    ) -> bool:
        """The batch ends: its files are written, or its input has problems (JSON). What was kept for its work goes.
        False as with `move`."""
        changes = {"output_file_id": output and output.id, "error_file_id": errors and errors.id, "errors": problems}
        with self._transaction():
            if self.held(owner, id) is None or not self._move(id, to, now_s, **changes, owner="", lease_until=0):
                return False
            for file in filter(None, (output, errors)):
                self._insert("files", file)
            self._db.execute("DELETE FROM lines WHERE batch = ?", (id,))
            self._db.execute("DELETE FROM results WHERE batch = ?", (id,))
            return True

    # -- order ---------------------------------------------------------------------------------------------------------

    def purge(self, now_s: float, retention_s: float) -> None:
        """Forgets files that have expired, unless a batch still reads them, and batches that ended long ago."""
        with self._transaction():
            reads = f"SELECT input_file_id FROM batches WHERE status IN ({_marks(OPEN)})"
            self._db.execute(f"DELETE FROM files WHERE expires_at <= ? AND id NOT IN ({reads})", (now_s, *OPEN))
            ended = f"DELETE FROM batches WHERE expires_at <= ? AND status NOT IN ({_marks(OPEN)})"
            self._db.execute(ended, (now_s - retention_s, *OPEN))

    def file_ids(self) -> set[str]:
        return {row["id"] for row in self._db.execute("SELECT id FROM files")}

    # -- statements ----------------------------------------------------------------------------------------------------
    # Names of tables and columns come from this file; what comes from outside is always a bound value.

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # some failures end it by themselves
                self._db.execute("ROLLBACK")
            raise

    def _row(self, table: Table, condition: str, *values: object) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._db.execute(
            f"SELECT {_COLUMNS[table]} FROM {table} WHERE {condition}", values
        ).fetchone()
        return row

    def _page(
        self,
        table: Table,
        tenant: str,
        limit: int,
        after: str | None,
        ascending: bool = False,
        purpose: str | None = None,
    ) -> list[sqlite3.Row] | None:
        condition, values = "tenant = ?", [tenant]
        if purpose is not None:
            condition, values = f"{condition} AND purpose = ?", [*values, purpose]
        if after is not None:
            if self._row(table, "id = ? AND tenant = ?", after, tenant) is None:
                return None
            start = f"(SELECT seq FROM {table} WHERE id = ?)"
            condition, values = f"{condition} AND seq {'>' if ascending else '<'} {start}", [*values, after]
        order = f"ORDER BY seq {'ASC' if ascending else 'DESC'} LIMIT ?"
        rows = self._db.execute(f"SELECT {_COLUMNS[table]} FROM {table} WHERE {condition} {order}", (*values, limit))
        return rows.fetchall()

    def _insert(self, table: Table, value: File | Batch) -> None:
        names = _names(type(value))
        row = [getattr(value, name) for name in names]
        self._db.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({_marks(names)})", row)

    def _move(self, id: str, to: Status, now_s: float, **changes: object) -> bool:
        values = {"status": to.value, f"{to.value}_at": int(now_s), **changes}
        earlier = before(to)
        sets = ", ".join(f"{name} = ?" for name in values)
        change = f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({_marks(earlier)})"
        return self._db.execute(change, (*values.values(), id, *earlier)).rowcount > 0


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _batch(row: sqlite3.Row) -> Batch:
    return Batch(**{**dict(row), "status": Status(row["status"])})
