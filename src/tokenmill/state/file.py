"""A file of a process: one connection, which one thread uses, for all in the process that keep things in the file."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from .database import Schema, open_database, transaction
from .kept import KEPT
from .migration import OldFormat, convert, import_once
from .writer import BackgroundWriter

FAILURES = (sqlite3.Error, OSError, MemoryError)
_log = logging.getLogger(__name__)


class StateFile:
    """Each user opens it before use and closes it after; the first opens and the last closes the file.

    path        of the file, whose folder is made
    reads_old   whether it reads, once, what earlier versions kept in files of their own in the same folder
    busy_s      how long a job waits for other processes
    """

    def __init__(self, path: str, schema: Schema = KEPT, *, reads_old: bool = False, busy_s: float = 5.0) -> None:
        self.path = path
        self._schema = schema
        self._reads_old = reads_old
        self._busy_s = busy_s
        self._database: sqlite3.Connection | None = None
        self._writer = BackgroundWriter(Path(path).name, begin=self._begin, end=self._end)
        self._num_users = 0
        self._failing: set[str] = set()
        self.put = self._writer.put
        self.do = self._writer.do
        self.ask = self._writer.ask
        self.every = self._writer.every

    def open(self, old: OldFormat | None = None) -> None:
        """old: what the file may be still, or read. Raises ConfigError, sqlite3.Error and OSError."""
        if not self._num_users:
            if old is not None:
                convert(self.path, self._schema, old, self._busy_s)
            self._writer.open()
        self._num_users += 1
        if old is None or not self._reads_old:
            return
        try:
            self._writer.ask(lambda: import_once(self.database, self._schema, old, Path(self.path).parent / old.name))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """What was put is in the file when this returns."""
        if not self._num_users:
            return
        self._num_users -= 1
        if self._num_users:
            self._writer.ask(lambda: None)
        else:
            self._writer.close()

    # ---- in the thread ----

    @property
    def database(self) -> sqlite3.Connection:
        assert self._database is not None
        return self._database

    def attempt(self, job: Callable[[sqlite3.Connection], None], otherwise: str) -> str:
        """Do a job as one transaction. Where that fails nothing of it is done, and the log says `otherwise`, once
        until it succeeds: why it failed; "": it did not."""
        try:
            with transaction(self.database):
                job(self.database)
        except FAILURES as error:
            if otherwise not in self._failing:
                self._failing.add(otherwise)
                _log.error("%s: %s cannot be written: %s.", otherwise, self.path, error)
            return str(error) or type(error).__name__
        self._failing.discard(otherwise)
        return ""

    def shrink(self) -> None:
        """Give the room of what was deleted back."""
        with contextlib.suppress(*FAILURES):  # it stays, and is used for what comes
            self.database.execute("PRAGMA incremental_vacuum").fetchall()

    def clear_journal(self) -> None:
        """Have the journal hold nothing of what was deleted. Another process that reads is not waited for: it stays
        until this is done again."""
        with contextlib.suppress(*FAILURES):
            self.database.execute("PRAGMA busy_timeout=0")
            try:
                self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self.database.execute(f"PRAGMA busy_timeout={round(self._busy_s * 1000)}")

    def _begin(self) -> None:
        self._database = open_database(self.path, self._schema, busy_s=self._busy_s)

    def _end(self) -> None:
        self.database.close()
