"""The resume file: streamed calls under way with the outputs that came of them, and the answers of those that ended.

One thread writes. What a step gave to all streams is one transaction; nobody waits for it, because a lost end is
computed again to the same bits. SQLite in WAL mode without a flush for each transaction: what is written outlives the
process at once, and a loss of power some time later. One process has the file at a time. The file is its user's alone
(mode 0600), and what is deleted is overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...core.errors import Unavailable
from ...core.events import Output
from ...state.database import Schema, cannot_use, make_room, open_database
from ...state.writer import BackgroundWriter
from .record import KeptAnswer, KeptCall, Unfinished, decode_call, decode_headers, decode_loaded, decode_output, encode

ADAPTER, MODEL = "adapter", "model"
"""Kinds of what is loaded while the server runs."""

_SWEEP_S = 60.0
_BUSY_S = 2.0
_TABLES = """
CREATE TABLE IF NOT EXISTS call (key INTEGER PRIMARY KEY, created_s REAL NOT NULL, call BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS output (
    call INTEGER NOT NULL REFERENCES call (key) ON DELETE CASCADE, number INTEGER NOT NULL, output BLOB NOT NULL,
    PRIMARY KEY (call, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answer (
    key INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, created_s REAL NOT NULL,
    status INTEGER NOT NULL, headers BLOB NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS loaded (
    kind TEXT NOT NULL, name TEXT NOT NULL, what BLOB NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answer_id ON answer (owner, id);
CREATE INDEX IF NOT EXISTS answer_name ON answer (owner, name);
CREATE INDEX IF NOT EXISTS answer_age ON answer (created_s, size);
CREATE INDEX IF NOT EXISTS answer_owner ON answer (owner, created_s, size);
"""
_SETTINGS = (
    "locking_mode=EXCLUSIVE", "auto_vacuum=INCREMENTAL", "journal_mode=WAL", "secure_delete=ON", "synchronous=NORMAL",
    "foreign_keys=ON",
)  # fmt: skip
SCHEMA = Schema("--resume-file", (0x746D5246, 1), _TABLES, _SETTINGS)
_FAILURES = (sqlite3.Error, OSError, msgspec.MsgspecError)
_log = logging.getLogger(__name__)


class ResumeStore:
    """`open` it before use, `close` it after. path: of the file, whose folder is made. max_bytes: of all answers.
    kept_s: how long answers are kept, and how old a call may be that is taken up again."""

    def __init__(self, path: str, *, max_bytes: int, kept_s: float, wall_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._wall_s = wall_s
        self._database: sqlite3.Connection | None = None
        self._has_failed = False
        self._last_key = 0
        self._loaded: list[tuple[str, str, dict[str, Any]]] = []
        self._num_outputs: dict[int, int] = {}  # in the file, of calls whose outputs go there
        self._writer = BackgroundWriter(
            "resume-file", begin=self._begin, each_period=self._sweep, period_s=_SWEEP_S, end=self._end
        )

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used, or another process uses it."""
        try:
            self._writer.open()
        except _FAILURES as error:
            is_held = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            why = OSError("another server has it. Each needs a file of its own") if is_held else error
            raise cannot_use(SCHEMA.flag, self._path, why) from error

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._writer.close()

    def loaded(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """What earlier processes had kept of this kind, by name."""
        return [(name, what) for found, name, what in self._loaded if found == kind]

    async def keep_loaded(self, kind: str, name: str, what: dict[str, Any] | None) -> None:
        """Have the next process load it again; None: not any more."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM loaded WHERE kind = ? AND name = ?", (kind, name))
            if what is not None:
                database.execute("INSERT INTO loaded VALUES (?, ?, ?)", (kind, name, encode(what)))

        await self._writer.do(lambda: self._write(write))

    def new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    async def begin(self, key: int, call: KeptCall) -> bool:
        """Whether the call is in the file; where that cannot be written the log tells, once."""
        created_s = self._wall_s()

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR REPLACE INTO call VALUES (?, ?, ?)", (key, created_s, encode(call)))

        def job() -> bool:
            if self._write(write):
                self._num_outputs[key] = 0
                return True
            return False

        return await self._writer.do(job)

    def add(self, outputs: Sequence[tuple[int, Output]]) -> None:
        """Outputs of calls, by their keys, as one transaction. Where it fails, these calls get no more: what is in the
        file of a call is always its beginning."""

        def job() -> None:
            known = [(key, output) for key, output in outputs if key in self._num_outputs]

            def write(database: sqlite3.Connection) -> None:
                rows = []
                for key, output in known:
                    self._num_outputs[key] += 1
                    rows.append((key, self._num_outputs[key], encode(output)))
                database.executemany("INSERT INTO output VALUES (?, ?, ?)", rows)

            if not self._write(write):
                for key, _ in known:
                    self._num_outputs.pop(key, None)

        self._writer.put(job)

    async def end(self, key: int, call: KeptCall, answer: KeptAnswer) -> None:
        """Keep the answer in place of the call."""
        now_s = self._wall_s()
        size = len(answer.body) + sum(len(name) + len(value) for name, value in answer.headers)
        row = (
            key, call.owner, call.id, call.request_id, now_s, answer.status, encode(answer.headers), answer.body, size,
        )  # fmt: skip

        def write(database: sqlite3.Connection) -> None:
            self._delete(database, key)
            database.execute("INSERT OR REPLACE INTO answer VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._make_room(database, now_s)

        await self._writer.do(lambda: self._write(write))

    def drop(self, key: int) -> None:
        """Nothing of the call is wanted any more."""
        self._put(lambda database: self._delete(database, key))

    async def find(self, owner: str, name: str) -> KeptAnswer | None:
        """The latest answer with this id, or whose call had this X-Request-Id. Raises Unavailable."""

        def read() -> KeptAnswer | None:
            assert self._database is not None
            row = self._database.execute(
                "SELECT status, headers, body FROM answer WHERE owner = ? AND (id = ? OR name = ?) AND created_s > ? "
                "ORDER BY key DESC LIMIT 1",
                (owner, name, name, self._wall_s() - self._kept_s),
            ).fetchone()
            return None if row is None else KeptAnswer(row[0], decode_headers(row[1]), row[2])

        try:
            return await self._writer.do(read)
        except _FAILURES as error:
            raise Unavailable(f"The resume file cannot be read: {error}.") from error

    async def unfinished(self) -> list[Unfinished]:
        """The calls that an earlier process left, in their order; those that are too old or cannot be read are
        dropped. Raises Unavailable."""
        try:
            return await self._writer.do(self._read_unfinished)
        except _FAILURES as error:
            raise Unavailable(f"The resume file cannot be read: {error}.") from error

    # ---- in the thread ----

    def _begin(self) -> None:
        database = open_database(self._path, SCHEMA, busy_s=_BUSY_S, isolation_level="IMMEDIATE")
        self._database = database
        (most,) = database.execute(
            "SELECT MAX(COALESCE((SELECT MAX(key) FROM call), 0), COALESCE((SELECT MAX(key) FROM answer), 0))"
        ).fetchone()
        self._last_key = most
        rows = database.execute("SELECT kind, name, what FROM loaded ORDER BY kind, name").fetchall()
        self._loaded = [(kind, name, decode_loaded(what)) for kind, name, what in rows]

    def _read_unfinished(self) -> list[Unfinished]:
        database = self._database
        assert database is not None
        database.execute("DELETE FROM call WHERE created_s <= ?", (self._wall_s() - self._kept_s,))
        found = []
        for key, body in database.execute("SELECT key, call FROM call ORDER BY key").fetchall():
            rows = database.execute("SELECT number, output FROM output WHERE call = ? ORDER BY number", (key,))
            try:
                call = decode_call(body)
                outputs = [(number, decode_output(output)) for number, output in rows.fetchall()]
            except msgspec.MsgspecError as error:
                _log.warning("A call in %s cannot be read and is dropped: %s.", self._path, error)
                self._delete(database, key)
                continue
            self._num_outputs[key] = outputs[-1][0] if outputs else 0
            found.append(Unfinished(key, call, [output for _, output in outputs]))
        database.commit()
        return found

    def _delete(self, database: sqlite3.Connection, key: int) -> None:
        self._num_outputs.pop(key, None)
        database.execute("DELETE FROM call WHERE key = ?", (key,))

    def _sweep(self) -> None:
        self._write(lambda database: self._make_room(database, self._wall_s()))

    def _make_room(self, database: sqlite3.Connection, now_s: float) -> None:
        """Answers that are too old go, then the oldest of the owner that has the most."""
        database.execute("DELETE FROM answer WHERE created_s <= ?", (now_s - self._kept_s,))
        make_room(database, "answer", "key", "size", self._max_bytes)

    def _put(self, write: Callable[[sqlite3.Connection], None]) -> None:
        def job() -> None:
            self._write(write)

        self._writer.put(job)

    def _write(self, write: Callable[[sqlite3.Connection], None]) -> bool:
        database = self._database
        assert database is not None
        try:
            write(database)
            database.commit()
        except _FAILURES as error:
            with contextlib.suppress(sqlite3.Error):
                database.rollback()
            if not self._has_failed:
                self._has_failed = True
                _log.error("Streams cannot be resumed: %s cannot be written: %s.", self._path, error)
            return False
        return True

    def _end(self) -> None:
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("PRAGMA incremental_vacuum").fetchall()
        self._database.close()
