"""SQLite files of a server: their user's alone, in WAL mode, opened by several processes at once."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Sequence
from typing import Literal

_AGAIN_S = 0.005
_ROOM = 0.95
"""What is left of the bytes after making room, so that not every write has to."""


def open_database(
    path: str,
    tables: str,
    *,
    busy_s: float,
    settings: Sequence[str] = (),
    mark: tuple[int, int] | None = None,
    isolation_level: Literal["IMMEDIATE"] | None = None,
) -> sqlite3.Connection:
    """The file at `path` with these tables, which is made (mode 0600) with its folder where it is not there.

    busy_s           how long a statement waits for other connections
    settings         pragmas, "name=value"; those of the journal are in force with all that follow
    mark             (application id, version) by which the file is known as one's own
    isolation_level  "IMMEDIATE": changes begin a transaction; None: the code begins all of them

    Raises sqlite3.Error and OSError, also for a file with tables and another mark.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o700)
    # A file that is there is not opened and closed here: that would end the locks of this process's connections to it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(path, timeout=busy_s, isolation_level=isolation_level)
    try:
        if mark is not None:
            _check_own(database, mark)
        os.chmod(path, 0o600)
        for setting in settings:
            if setting == "journal_mode=WAL":
                _use_wal(database, busy_s)
            else:
                database.execute(f"PRAGMA {setting}")
        marks = "" if mark is None else f"PRAGMA application_id={mark[0]}; PRAGMA user_version={mark[1]};"
        database.executescript(f"BEGIN IMMEDIATE; {tables} {marks} COMMIT;")
    except BaseException:
        database.close()
        raise
    return database


def make_room(database: sqlite3.Connection, table: str, key: str, size: str, most: int) -> None:
    """Where the rows of `table` are larger than `most` bytes together, the oldest go, of the owner that has the most.
    key, size: columns; others are owner and created_s. The caller commits."""
    (held,) = database.execute(f"SELECT COALESCE(SUM({size}), 0) FROM {table}").fetchone()
    if held <= most:
        return
    while held > most * _ROOM:
        (owner,) = database.execute(
            f"SELECT owner FROM {table} GROUP BY owner ORDER BY SUM({size}) DESC, owner LIMIT 1"
        ).fetchone()
        oldest, freed = database.execute(
            f"SELECT {key}, {size} FROM {table} WHERE owner = ? ORDER BY created_s, {key} LIMIT 1", (owner,)
        ).fetchone()
        database.execute(f"DELETE FROM {table} WHERE {key} = ?", (oldest,))
        held -= freed


def _check_own(database: sqlite3.Connection, mark: tuple[int, int]) -> None:
    (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if tables and (application, version) != mark:
        raise sqlite3.DatabaseError("it belongs to another program, or to another version of this one")


def _use_wal(database: sqlite3.Connection, busy_s: float) -> None:
    """Of two connections that turn a new file to WAL at once one is refused without having waited, whatever its
    timeout is: SQLite calls no busy handler for a read transaction that is to become a write transaction."""
    until_s = time.monotonic() + busy_s
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until_s:
                raise
        time.sleep(_AGAIN_S)
