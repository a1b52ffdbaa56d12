"""Responses that outlive their call: a SQLite file, read and written by one thread, a day long and no larger than told.

A response is kept with the input of its own call and the id of the one that it continues; the conversation of a chain
is put together when it is asked for. What is kept belongs to who asked for it: `owner`. Jobs are done in the order in
which they come, so whoever has a response's last event finds the response.

The file is its user's alone (mode 0600), what is deleted is overwritten, and several servers of that user may share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...core.errors import Unavailable
from ...core.units import MiB
from ...state.database import Schema, cannot_use, make_room, open_database
from ...state.writer import BackgroundWriter

KEPT_S = 24 * 3600
MAX_BYTES = 256 * MiB
MAX_CHAIN = 1000
"""Responses that one may continue, one after the other."""

_SWEEP_S = 600.0
_BUSY_S = 5.0
_FAILURES = (sqlite3.Error, MemoryError)
_TABLE = """
CREATE TABLE IF NOT EXISTS response (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, previous TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS response_age ON response (created_s, size_bytes);
CREATE INDEX IF NOT EXISTS response_owner ON response (owner, created_s, size_bytes);
"""
SCHEMA = Schema(
    "--responses-store",
    (0x746D5253, 1),
    _TABLE,
    ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "secure_delete=ON", "synchronous=NORMAL"),
)

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """A response as it is kept. body: the object as JSON; input: the items of its own call, a JSON array; previous: the
    id of the response that it continues, "" for none."""

    id: str
    owner: str
    previous: str
    body: bytes
    input: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.input)


class ResponseStore:
    """`open` it before use, `close` it after; both wait for the thread. path: of the file, whose folder is made.
    wall_s: seconds since the epoch, also of other processes that use the file."""

    def __init__(
        self,
        path: str,
        *,
        max_bytes: int = MAX_BYTES,
        kept_s: float = KEPT_S,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._wall_s = wall_s
        self._database: sqlite3.Connection | None = None
        self._failure = ""
        self._writer = BackgroundWriter(
            "response-store", begin=self._begin, each_period=self._drop_old, period_s=_SWEEP_S, end=self._end
        )

    @property
    def max_record_bytes(self) -> int:
        """A call with more input than this is not kept."""
        return self._max_bytes // 8

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used."""
        try:
            self._writer.open()
        except (OSError, sqlite3.Error) as error:
            raise cannot_use(SCHEMA.flag, self._path, error) from error

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._writer.close()

    def put(self, record: Record) -> None:
        """Keep a response; it need not be waited for. If it cannot be kept, the log says so."""
        now_s = self._wall_s()

        def write() -> None:
            database = self._opened()
            try:
                self._write(database, record, now_s)
                self._failure = ""
            except _FAILURES as error:
                _undo(database)
                if not self._failure:
                    _log.error("Responses are not kept: %s cannot be written: %s.", self._path, error)
                self._failure = str(error)

        self._writer.put(write)

    async def why_not(self) -> str:
        """Why no response can be kept now; "": it can, as far as is known. After a failure it is tried anew."""
        if not self._failure:
            return ""

        def write() -> None:
            database = self._opened()
            try:
                database.execute(f"PRAGMA user_version={SCHEMA.mark[1]}")
                database.commit()
                self._failure = ""
            except _FAILURES as error:
                _undo(database)
                self._failure = str(error)

        await self._writer.do(write)
        return self._failure

    async def settle(self, longest_s: float) -> None:
        """Wait until what was put before is in the file, at most so long."""
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._do(lambda database: None)

    async def get(self, owner: str, identifier: str) -> Record | None:
        return await self._do(lambda database: self._read(database, owner, identifier))

    async def chain(self, owner: str, identifier: str, most_bytes: int) -> list[Record]:
        """A response and all that it continues, the oldest first; it ends early where one is not there any more or
        where there are more than MAX_CHAIN or `most_bytes`: the first one's `previous` is then not ""."""

        def collect(database: sqlite3.Connection) -> list[Record]:
            found: list[Record] = []
            wanted, size_bytes = identifier, 0
            while wanted and len(found) < MAX_CHAIN and size_bytes <= most_bytes:
                record = self._read(database, owner, wanted)
                if record is None:
                    break
                found.append(record)
                size_bytes += record.size_bytes
                wanted = record.previous
            return found[::-1]

        return await self._do(collect)

    async def delete(self, owner: str, identifier: str) -> bool:
        """Whether there was one to delete."""

        def remove(database: sqlite3.Connection) -> bool:
            is_there = self._read(database, owner, identifier) is not None
            database.execute("DELETE FROM response WHERE id = ? AND owner = ?", (identifier, owner))
            self._commit(database)
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return is_there

        return await self._do(remove)

    async def _do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """The result of a job, in its turn. Raises Unavailable."""

        def work() -> T:
            database = self._opened()
            try:
                return job(database)
            except _FAILURES as error:
                _undo(database)
                raise Unavailable(f"The store of responses cannot be read: {error}.") from error

        return await self._writer.do(work)

    # ---- in the thread ----

    def _begin(self) -> None:
        self._database = open_database(self._path, SCHEMA, busy_s=_BUSY_S, isolation_level="IMMEDIATE")
        self._drop_old()

    def _end(self) -> None:
        self._opened().close()

    def _opened(self) -> sqlite3.Connection:
        assert self._database is not None
        return self._database

    def _read(self, database: sqlite3.Connection, owner: str, identifier: str) -> Record | None:
        oldest_s = self._wall_s() - self._kept_s
        row = database.execute(
            "SELECT id, owner, previous, body, input FROM response WHERE id = ? AND owner = ? AND created_s > ?",
            (identifier, owner, oldest_s),
        ).fetchone()
        return None if row is None else Record(*row)

    def _write(self, database: sqlite3.Connection, record: Record, now_s: float) -> None:
        database.execute(
            "INSERT OR REPLACE INTO response VALUES (?, ?, ?, ?, ?, ?, ?)",
            (record.id, record.owner, now_s, record.previous, record.size_bytes, record.body, record.input),
        )
        database.execute("DELETE FROM response WHERE created_s <= ?", (now_s - self._kept_s,))
        make_room(database, "response", "id", "size_bytes", self._max_bytes)
        self._commit(database)

    def _drop_old(self) -> None:
        database = self._opened()
        try:
            database.execute("DELETE FROM response WHERE created_s <= ?", (self._wall_s() - self._kept_s,))
            make_room(database, "response", "id", "size_bytes", self._max_bytes)
            self._commit(database)
        except _FAILURES as error:
            _undo(database)
            _log.warning("Old responses could not be deleted from %s: %s.", self._path, error)

    def _commit(self, database: sqlite3.Connection) -> None:
        database.commit()
        database.execute("PRAGMA incremental_vacuum").fetchall()


def _undo(database: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # where there is nothing to undo, or the disk fails there too
        database.rollback()
