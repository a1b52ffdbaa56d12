"""SQLite files of a server: opened by several at once, their user's alone, and no other program's."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.server import database
from tokenmill.server.database import open_database

WAL = ("journal_mode=WAL", "synchronous=OFF")
TABLE = "CREATE TABLE IF NOT EXISTS t (a);"


def test_a_new_file_that_another_is_filling_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself refuses to change the journal's mode then, without waiting."""
    path = str(tmp_path / "new.db")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waited = []

    def end(seconds: float) -> None:
        if not waited:
            other.execute("COMMIT")
        waited.append(seconds)

    monkeypatch.setattr(database.time, "sleep", end)
    mine = open_database(path, TABLE, busy_s=5.0, settings=WAL)
    assert len(waited) == 1 and mine.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    mine.close()
    other.close()


def test_a_file_that_stays_locked_is_refused_in_time(tmp_path: Path) -> None:
    """After busy_s, with SQLite's own word for it."""
    path = str(tmp_path / "new.db")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        open_database(path, TABLE, busy_s=0.02, settings=WAL)
    other.close()


_OTHER = """
import fcntl, sys
with open(sys.argv[1], "rb+") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except OSError:
        print("locked")
"""


def test_a_second_connection_takes_no_lock_from_the_first(tmp_path: Path) -> None:
    """Whoever opens and closes a file ends all POSIX locks that its process has on it: others would think that nobody
    uses the file."""
    path = str(tmp_path / "a.db")
    mine = open_database(path, TABLE, busy_s=1.0, settings=WAL)
    further = open_database(path, TABLE, busy_s=1.0, settings=WAL)
    found = subprocess.run([sys.executable, "-c", _OTHER, path], capture_output=True, text=True, check=True)
    assert found.stdout == "locked\n"
    further.close()
    mine.close()


def test_a_file_is_its_users_alone_and_no_other_programs(tmp_path: Path) -> None:
    """Its folder is made, its mode set, and one with another mark is left as it is."""
    path = tmp_path / "folder" / "own.db"
    open_database(str(path), TABLE, busy_s=1.0, settings=WAL, mark=(7, 1)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for mark in ((7, 2), (8, 1)):
        with pytest.raises(sqlite3.DatabaseError, match="another program, or to another version"):
            open_database(str(path), TABLE, busy_s=1.0, settings=WAL, mark=mark)
    open_database(str(path), TABLE, busy_s=1.0, settings=WAL, mark=(7, 1)).close()
