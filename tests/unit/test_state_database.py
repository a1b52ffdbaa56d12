"""SQLite files of a server: opened by several at once, their user's alone, and no other program's."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tokenmill.state import database
from tokenmill.state.database import Damaged, Schema, cannot_use, open_checked, open_database, schema_of

SCHEMA = Schema("--tenants", (7, 1), "CREATE TABLE IF NOT EXISTS t (a);", ("journal_mode=WAL", "synchronous=OFF"))


def test_a_new_file_is_never_seen_without_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its name when it is whole; where another process was quicker, that one's is taken."""
    path = str(tmp_path / "new.db")
    link, seen = os.link, []

    def racing(source: str, target: str) -> None:
        seen.append(os.path.lexists(target))
        if len(seen) == 1:
            other = open_database(path, SCHEMA, busy_s=1.0)
            other.execute("INSERT INTO t VALUES ('theirs')")
            other.close()
        link(source, target)

    monkeypatch.setattr(database.os, "link", racing)
    mine = open_database(path, SCHEMA, busy_s=5.0)
    assert seen == [False, False] and mine.execute("SELECT a FROM t").fetchall() == [("theirs",)]
    assert mine.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    mine.close()
    assert [each.name for each in tmp_path.iterdir()] == ["new.db"]


def test_what_a_killed_process_left_beside_is_removed_later(tmp_path: Path) -> None:
    """Not what another one makes just now, nor what only looks like it."""
    old = ["a.db.0123abcd.new", "a.db.0123abcd.new-wal", "a.db.before.0123abcd.new"]
    others = ["a.db.89abcdef.new", "a.db.new", "xa.db.0123abcd.new", "a.db.damaged-20000101T000000-0123.new"]
    for name in (*old, *others):
        (tmp_path / name).touch()
        if name != others[0]:
            os.utime(tmp_path / name, (1.0, 1.0))
    open_database(str(tmp_path / "a.db"), SCHEMA, busy_s=1.0).close()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["a.db", *others])


def test_looking_at_the_mark_of_a_file_makes_none(tmp_path: Path) -> None:
    (tmp_path / "a.db").symlink_to(tmp_path / "nowhere.db")
    assert schema_of(str(tmp_path / "a.db"), [SCHEMA], 1.0) is SCHEMA
    assert not (tmp_path / "nowhere.db").exists()


def test_a_file_that_stays_locked_is_refused_in_time(tmp_path: Path) -> None:
    """After busy_s, with SQLite's own word for it, which is not that of damage."""
    path = str(tmp_path / "a.db")
    open_database(path, SCHEMA, busy_s=1.0).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        open_database(path, SCHEMA, busy_s=0.02)
    other.close()


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "a.db")

    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(database.os, "link", refuse)
    with pytest.raises(OSError, match="its file system has no hard links") as caught:
        open_database(path, SCHEMA, busy_s=1.0)
    assert "cannot be used" in str(cannot_use("--tenants", path, caught.value)) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", range(7))
def test_setting_aside_can_end_anywhere_and_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A file is found with its own journal, or is found damaged: never the old one without what its journal held, and
    never the new one with the journal of the old."""
    folder = tmp_path / "state"
    path, wal = folder / "a.db", folder / "a.db-wal"

    def found(name: str) -> list[str] | None:
        copy = Path(shutil.copytree(folder, tmp_path / name)) / path.name  # a look at it writes to it
        try:
            with contextlib.closing(open_checked(str(copy), SCHEMA, busy_s=1.0)) as there:
                return [text for (text,) in there.execute("SELECT a FROM t")]
        except Damaged:
            return None

    with contextlib.closing(open_database(str(path), SCHEMA, busy_s=1.0)) as old:
        old.execute("INSERT INTO t VALUES ('first')")
        old.execute("PRAGMA wal_checkpoint")
        old.execute("INSERT INTO t VALUES ('second')")
        files = {each: each.read_bytes() for each in (path, wal)}
    for each, data in files.items():
        each.write_bytes(data)
    new = folder / "new.db"
    with contextlib.closing(open_database(str(new), SCHEMA, busy_s=1.0)) as database_:
        database_.execute("INSERT INTO t VALUES ('restored')")
    num_steps = 0

    def failing(does: Callable[..., None], *names: str) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == step + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        does(*names)

    with monkeypatch.context() as patched:
        for name, does in (("link", os.link), ("rename", os.rename), ("replace", os.replace), ("unlink", os.unlink)):
            patched.setattr(database.os, name, partial(failing, does))
        with contextlib.suppress(OSError):
            database.set_aside(str(path), str(new))
    has_ended = num_steps > step
    assert has_ended == (step < 5), "each step has failed once"
    in_between = found("between")
    assert in_between in ([None, ["first", "second"]] if has_ended else [["restored"]])
    if has_ended:
        database.set_aside(str(path), str(new))
        assert found("after") == ["restored"]
    assert set(files.values()) <= {each.read_bytes() for each in folder.glob("a.db.damaged-*")}


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def overwritten(data: bytes) -> bytes:
    return data[:4096] + b"\xa5" * (len(data) - 4096)


DAMAGES = {
    "0 bytes": lambda data: b"",
    "garbage": lambda data: b"\xff\xfe garbage\n" * 1000,
    "text": lambda data: b"tm-key-of-somebody\n",
    "truncated": truncated,
    "overwritten": overwritten,
    "half a header": lambda data: data[:50],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    """Whatever has become of it, with a remedy; a file that was removed is none, and is made."""
    path = tmp_path / "a.db"
    made = open_database(str(path), SCHEMA, busy_s=1.0)
    made.executemany("INSERT INTO t VALUES (?)", [("x" * 900,) for _ in range(100)])
    made.close()
    path.write_bytes(data := DAMAGES[damage](path.read_bytes()))
    with pytest.raises(Damaged) as caught:
        open_database(str(path), SCHEMA, busy_s=1.0)
    assert path.read_bytes() == data
    told = cannot_use(SCHEMA.flag, path, caught.value).message
    assert f"--tenants {path} is damaged: " in told and f"tokenmill state repair --tenants {path}" in told
    path.unlink()
    open_database(str(path), SCHEMA, busy_s=1.0).close()


def test_a_file_without_its_tables_is_damaged(tmp_path: Path) -> None:
    """An empty database is as good as 0 bytes: what was in it is gone."""
    path = str(tmp_path / "a.db")
    open_database(path, SCHEMA, busy_s=1.0).close()
    with contextlib.closing(sqlite3.connect(path)) as emptied:
        emptied.execute("DROP TABLE t")
    with pytest.raises(Damaged, match="no table t"):
        open_database(path, SCHEMA, busy_s=1.0)
    os.unlink(path)
    with contextlib.closing(sqlite3.connect(path)) as foreign:
        foreign.execute("VACUUM")
    with pytest.raises(Damaged):
        open_database(path, SCHEMA, busy_s=1.0)


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
    mine = open_database(path, SCHEMA, busy_s=1.0)
    further = open_database(path, SCHEMA, busy_s=1.0)
    found = subprocess.run([sys.executable, "-c", _OTHER, path], capture_output=True, text=True, check=True)
    assert found.stdout == "locked\n"
    further.close()
    mine.close()


def test_a_file_is_its_users_alone_and_no_other_programs(tmp_path: Path) -> None:
    """Its folder is made, its mode set, and one with another mark is left as it is."""
    path = tmp_path / "folder" / "own.db"
    open_database(str(path), SCHEMA, busy_s=1.0).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for mark in ((7, 0), (8, 1)):
        with pytest.raises(sqlite3.DatabaseError, match="another program, or to another version"):
            open_database(str(path), SCHEMA._replace(mark=mark), busy_s=1.0)
    open_database(str(path), SCHEMA, busy_s=1.0).close()


def test_a_file_of_an_earlier_version_is_migrated_in_steps(tmp_path: Path) -> None:
    """Each step once and in order, from whatever version on; a step that fails leaves the file as it was."""
    path = str(tmp_path / "a.db")
    with contextlib.closing(open_database(path, SCHEMA, busy_s=1.0)) as first:
        first.execute("INSERT INTO t VALUES ('kept')")
    second = SCHEMA._replace(
        mark=(7, 2), tables="CREATE TABLE IF NOT EXISTS t (a, b);", migrations=("ALTER TABLE t ADD COLUMN b;",)
    )
    third = second._replace(
        mark=(7, 3),
        tables="CREATE TABLE IF NOT EXISTS u (a, b);",
        migrations=(*second.migrations, "ALTER TABLE t RENAME TO u; UPDATE u SET b = a;"),
    )
    failing = third._replace(migrations=(*second.migrations, "ALTER TABLE t RENAME TO u; UPDATE missing SET b = a;"))
    with pytest.raises(sqlite3.OperationalError, match="missing"):
        open_database(path, failing, busy_s=1.0)
    with contextlib.closing(open_database(path, SCHEMA, busy_s=1.0)) as as_it_was:
        assert as_it_was.execute("SELECT * FROM t").fetchall() == [("kept",)]
    for schema in (second, third, third):
        open_database(path, schema, busy_s=1.0).close()
    with contextlib.closing(open_checked(path, third, busy_s=1.0)) as last:
        assert last.execute("SELECT a, b FROM u").fetchall() == [("kept", "kept")]
    with pytest.raises(sqlite3.DatabaseError, match="another version"):
        open_database(path, second, busy_s=1.0)
