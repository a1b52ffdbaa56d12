"""What is kept for a time: bodies by owner and key, all kinds of them in one table, whose rows know when they end.

    kind        what the body is
    owner       for whom it is kept
    key         by which the owner finds it
    expires_s   when nobody finds it any more, in seconds since the epoch; 0: never
    size_bytes  what counts against the most that is kept of the kind
    body        bytes, whose meaning is the kind's

What is deleted is overwritten. A commit does not wait for the disk: it outlives the process at once, and a loss of
power some time later.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from .database import Schema
from .migration import OldFormat

_ROOM = 0.95
"""What is left of the bytes after making room, so that not every write has to."""

_TABLE = """
CREATE TABLE IF NOT EXISTS kept (
    kind TEXT NOT NULL, owner TEXT NOT NULL, key NOT NULL, expires_s REAL NOT NULL, size_bytes INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (kind, owner, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kept_until ON kept (kind, owner, expires_s, size_bytes) WHERE expires_s > 0;
"""
KEPT = Schema(
    "",
    (0x746D4B50, 1),
    _TABLE,
    ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "secure_delete=ON", "synchronous=NORMAL"),
    was_imported="SELECT 1 FROM kept WHERE kind = 'taken over' AND owner = '' AND key = ?",
    note_imported="INSERT INTO kept VALUES ('taken over', '', ?, 0, 0, x'')",
)
Key = str | bytes | int


class Row(NamedTuple):
    kind: str
    owner: str
    key: Key
    expires_s: float
    size_bytes: int
    body: bytes


class Kind(NamedTuple):
    """Rows of one kind in an open database, for its thread. What writes is inside a transaction of the caller's.
    max_bytes: kept of it; None: what it takes."""

    name: str
    max_bytes: int | None = None

    def put(
        self, database: sqlite3.Connection, owner: str, key: Key, body: bytes, expires_s: float, size_bytes: int = 0
    ) -> None:
        """In place of what was there."""
        insert(database, [Row(self.name, owner, key, expires_s, size_bytes, body)])

    def change(self, database: sqlite3.Connection, owner: str, key: Key, body: bytes) -> None:
        """Another body of what is there: one of the same size needs no room."""
        database.execute(
            "UPDATE kept SET body = ? WHERE kind = ? AND owner = ? AND key = ?", (body, self.name, owner, key)
        )

    def get(self, database: sqlite3.Connection, owner: str, key: Key, now_s: float) -> bytes | None:
        row = database.execute(
            "SELECT body FROM kept WHERE kind = ? AND owner = ? AND key = ? AND (expires_s = 0 OR expires_s > ?)",
            (self.name, owner, key, now_s),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def rows(self, database: sqlite3.Connection, owner: str | None = None) -> list[tuple[str, Key, bytes]]:
        """(owner, key, body), in this order; of one owner alone where it is given."""
        where, values = ("", ()) if owner is None else (" AND owner = ?", (owner,))
        query = f"SELECT owner, key, body FROM kept WHERE kind = ?{where} ORDER BY owner, key"
        return database.execute(query, (self.name, *values)).fetchall()

    def latest(self, database: sqlite3.Connection, owner: str, prefix: str) -> Iterator[bytes]:
        """Bodies of the keys that begin so and go on, the last key first."""
        query = "SELECT body FROM kept WHERE kind = ? AND owner = ? AND key > ? AND key < ? ORDER BY key DESC"
        for (body,) in database.execute(query, (self.name, owner, prefix, prefix + chr(sys.maxunicode))):
            yield body

    def postpone(self, database: sqlite3.Connection, by_s: float) -> None:
        """Have all that expires do so later, or, by less than 0, earlier."""
        database.execute(
            "UPDATE kept SET expires_s = expires_s + ? WHERE kind = ? AND expires_s > 0", (by_s, self.name)
        )

    def delete(self, database: sqlite3.Connection, owner: str, key: Key) -> bool:
        """Whether there was one."""
        found = database.execute("DELETE FROM kept WHERE kind = ? AND owner = ? AND key = ?", (self.name, owner, key))
        return found.rowcount > 0

    def delete_all(self, database: sqlite3.Connection, owner: str) -> None:
        database.execute("DELETE FROM kept WHERE kind = ? AND owner = ?", (self.name, owner))

    def make_room(self, database: sqlite3.Connection, now_s: float) -> None:
        """What has expired goes; where the rest is too large, what expires first, of the owner that has the most."""
        mine = "FROM kept WHERE kind = ? AND expires_s > 0"
        held, first_s = database.execute(
            f"SELECT COALESCE(SUM(size_bytes), 0), COALESCE(MIN(expires_s), ?) {mine}", (now_s + 1, self.name)
        ).fetchone()
        if first_s <= now_s:
            expired = f"SELECT owner, key, size_bytes {mine} AND expires_s <= ?"
            for owner, key, freed in database.execute(expired, (self.name, now_s)).fetchall():
                self.delete(database, owner, key)
                held -= freed
        if self.max_bytes is None or held <= self.max_bytes:
            return
        while held > self.max_bytes * _ROOM:
            (owner,) = database.execute(
                f"SELECT owner {mine} GROUP BY owner ORDER BY SUM(size_bytes) DESC, owner LIMIT 1", (self.name,)
            ).fetchone()
            key, freed = database.execute(
                f"SELECT key, size_bytes {mine} AND owner = ? ORDER BY expires_s, key LIMIT 1", (self.name, owner)
            ).fetchone()
            self.delete(database, owner, key)
            held -= freed


def insert(database: sqlite3.Connection, rows: Iterable[Row]) -> None:
    database.executemany(
        "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET expires_s = excluded.expires_s, "
        "size_bytes = excluded.size_bytes, body = excluded.body",
        rows,
    )


def old_format(name: str, schema: Schema, rows: Callable[[sqlite3.Connection], Iterable[Row]]) -> OldFormat:
    """rows: what is in a file of an earlier version."""
    return OldFormat(name, schema, lambda source, target: insert(target, rows(source)))
