"""Answers of calls with an Idempotency-Key, in SQLite, for a day and no larger than told.

A key is its owner's, and is kept as a digest. Of the call itself there is a digest only. The file is its user's alone
(mode 0600), what is deleted is overwritten, and several servers of that user may share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable

import msgspec

from ...core.errors import Unavailable
from ...core.units import MiB
from ...state.database import Schema, cannot_use, make_room, open_database
from ...state.writer import BackgroundWriter
from .tape import Taped

KEPT_S = 24 * 3600
MAX_BYTES = 256 * MiB
_SWEEP_S = 600.0
_BUSY_S = 5.0
_TABLE = """
CREATE TABLE IF NOT EXISTS answer (
    key BLOB PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, digest BLOB NOT NULL, status INTEGER NOT NULL,
    headers BLOB NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answer_age ON answer (created_s, size);
CREATE INDEX IF NOT EXISTS answer_owner ON answer (owner, created_s, size);
"""
SCHEMA = Schema(
    "--idempotency-store",
    (0x746D494B, 1),
    _TABLE,
    ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "secure_delete=ON", "synchronous=NORMAL"),
)
_PUT = "INSERT OR REPLACE INTO answer VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_BEGUN, _LOST = 0, -1
"""In place of a status: the call is under way, or ended with its process; it was carried out, its answer not kept."""
_NO_HEADERS = msgspec.msgpack.encode(())
_FAILURES = (sqlite3.Error, OSError, msgspec.MsgspecError)
_log = logging.getLogger(__name__)


class AnswerStore:
    """`open` it before use, `close` it after. path: of the file, whose folder is made."""

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
        self._has_failed = False
        self._lost: set[bytes] = set()  # calls of which not even that could be written
        self._writer = BackgroundWriter(
            "answer-store", begin=self._begin, each_period=self._sweep, period_s=_SWEEP_S, end=self._end
        )

    @property
    def max_answer_bytes(self) -> int:
        """A longer answer is not kept."""
        return self._max_bytes // 8

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used."""
        try:
            self._writer.open()
        except _FAILURES as error:
            raise cannot_use(SCHEMA.flag, self._path, error) from error

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._writer.close()

    def put(self, owner: str, key: str, answer: Taped) -> None:
        """Whoever asks after this gets it; it need not be waited for."""
        now_s = self._wall_s()
        size = len(answer.body) + sum(len(name) + len(value) for name, value in answer.headers)
        row = (
            _name(owner, key), owner, now_s, answer.digest, answer.status, msgspec.msgpack.encode(answer.headers),
            answer.body, size,
        )  # fmt: skip

        def write() -> None:
            assert self._database is not None
            try:
                self._database.execute(_PUT, row)
                self._make_room(now_s)
                self._has_failed = False
            except _FAILURES as error:
                self._fail(error)
                self._lose(row[0])

        self._writer.put(write)

    async def claim(self, owner: str, key: str) -> Taped | None:
        """The kept answer. None: there is none, and it is in the file that the call has begun: where nothing can be
        written no answer would be kept, and a repeat be computed and billed again. Raises Unavailable, also for a call
        whose answer could not be kept."""
        name = _name(owner, key)

        def read() -> Taped | None:
            database, now_s = self._database, self._wall_s()
            assert database is not None
            row = database.execute(
                "SELECT digest, status, headers, body FROM answer WHERE key = ? AND created_s > ?",
                (name, now_s - self._kept_s),
            ).fetchone()
            if name in self._lost or (row is not None and row[1] == _LOST):
                raise Unavailable(
                    "The call with this Idempotency-Key was carried out, but its answer could not be kept; it is not "
                    "carried out again. Send a new key if it shall be."
                )
            if row is None or row[1] == _BEGUN:
                database.execute(_PUT, (name, owner, now_s, b"", _BEGUN, _NO_HEADERS, b"", 0))
                database.commit()
                return None
            headers = msgspec.msgpack.decode(row[2], type=tuple[tuple[bytes, bytes], ...])
            return Taped(row[0], row[1], headers, row[3])

        try:
            return await self._writer.do(read)
        except _FAILURES as error:
            self._writer.put(self._undo)
            raise Unavailable(
                f"The store of answers cannot be used: {error}. Calls with an Idempotency-Key are refused while "
                "their answers cannot be kept."
            ) from error

    def release(self, owner: str, key: str) -> None:
        """A call that was claimed has failed: its repeat is carried out."""
        name = _name(owner, key)

        def write() -> None:
            assert self._database is not None
            try:
                self._database.execute("DELETE FROM answer WHERE key = ? AND status = ?", (name, _BEGUN))
                self._database.commit()
            except _FAILURES as error:
                self._fail(error)

        self._writer.put(write)

    # ---- in the thread ----

    def _begin(self) -> None:
        self._database = open_database(self._path, SCHEMA, busy_s=_BUSY_S, isolation_level="IMMEDIATE")

    def _sweep(self) -> None:
        try:
            self._make_room(self._wall_s())
        except _FAILURES as error:
            self._fail(error)

    def _make_room(self, now_s: float) -> None:
        """What is too old goes, then the oldest of the owner that has the most."""
        database = self._database
        assert database is not None
        database.execute("DELETE FROM answer WHERE created_s <= ?", (now_s - self._kept_s,))
        make_room(database, "answer", "key", "size", self._max_bytes)
        database.commit()
        database.execute("PRAGMA incremental_vacuum").fetchall()

    def _lose(self, name: bytes) -> None:
        """An answer could not be kept. To say so takes a few bytes, which may find room where it did not."""
        assert self._database is not None
        try:
            self._database.execute("UPDATE answer SET status = ? WHERE key = ?", (_LOST, name))
            self._database.commit()
        except _FAILURES:
            self._undo()
            self._lost.add(name)

    def _undo(self) -> None:
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            self._database.rollback()

    def _fail(self, error: Exception) -> None:
        self._undo()
        if not self._has_failed:
            self._has_failed = True
            _log.error("Answers are not kept: %s cannot be written: %s.", self._path, error)

    def _end(self) -> None:
        assert self._database is not None
        self._database.close()


def _name(owner: str, key: str) -> bytes:
    return hashlib.sha256(f"{len(owner)} {owner} {key}".encode()).digest()
