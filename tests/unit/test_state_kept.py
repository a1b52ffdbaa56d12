"""What is kept for a time, whatever it is: bounded, each owner's own, whole through kills and full disks, shared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.state.database import Damaged, Schema, open_checked, open_database, transaction
from tokenmill.state.file import StateFile
from tokenmill.state.kept import KEPT, Kind, Row, old_format
from tokenmill.state.migration import OldFormat

A, B = Kind("a", 1000), Kind("b")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StateFile]:
    opened = StateFile(str(tmp_path / "private" / "kept.db"))
    opened.open()
    yield opened
    opened.close()


def put(file: StateFile, kind: Kind, owner: str, key: str, size: int = 100, until_s: float = 60.0) -> None:
    def write(database: sqlite3.Connection) -> None:
        kind.put(database, owner, key, b"x" * size, until_s, size)
        kind.make_room(database, 0.0)

    def job() -> None:
        assert not file.attempt(write, "Nothing is kept")

    file.ask(job)


def keys(file: StateFile, kind: Kind, owner: str) -> list[object]:
    return asyncio.run(file.do(lambda: [key for _, key, _ in kind.rows(file.database, owner)]))


def test_a_kind_is_bounded_and_the_owner_with_the_most_makes_room(file: StateFile) -> None:
    """What expires first goes; nobody else's does, and no other kind's; what never expires stays."""
    put(file, B, "many", "b")
    put(file, A, "few", "first", until_s=1.0)
    put(file, A, "many", "for ever", size=0, until_s=0.0)
    for number in range(30):
        put(file, A, "many", f"{number:02}", until_s=2.0 + number)
        (size_bytes,) = asyncio.run(
            file.do(lambda: file.database.execute("SELECT SUM(size_bytes) FROM kept WHERE kind = 'a'").fetchone())
        )
        assert size_bytes <= 1000
    assert keys(file, A, "few") == ["first"] and keys(file, B, "many") == ["b"]
    left = keys(file, A, "many")
    assert left[-1] == "for ever" and left[:-1] == [f"{number:02}" for number in range(30)][-len(left) + 1 :]
    assert len(left) >= 8


def test_a_kind_of_no_bytes_keeps_nothing_and_one_without_a_bound_all(file: StateFile) -> None:
    none = Kind("none", 0)
    for kind in (none, B):
        put(file, kind, "me", "a", size=2000)
    assert keys(file, none, "me") == [] and keys(file, B, "me") == ["a"]


def test_what_is_deleted_is_overwritten_whatever_sqlite_was_built_for(file: StateFile) -> None:
    def look() -> None:
        assert file.database.execute("PRAGMA secure_delete").fetchone() == (1,)

    assert "secure_delete=ON" in KEPT.settings
    file.ask(look)


def test_what_has_expired_is_found_by_nobody_and_overwritten(file: StateFile, tmp_path: Path) -> None:
    """Also where its page stays in use."""
    put(file, A, "me", "a", until_s=5.0)
    file.ask(lambda: file.attempt(lambda database: A.put(database, "me", "b", b"stays", 0.0), ""))

    def look(now_s: float) -> bytes | None:
        return asyncio.run(file.do(lambda: A.get(file.database, "me", "a", now_s)))

    assert look(4.0) == b"x" * 100 and look(5.0) is None
    file.ask(lambda: file.attempt(lambda database: A.make_room(database, 5.0), ""))
    file.close()
    assert not any(b"x" * 50 in path.read_bytes() for path in (tmp_path / "private").iterdir())


def test_on_a_full_disk_nothing_is_half_written(file: StateFile, caplog: pytest.LogCaptureFixture) -> None:
    """The log tells once; what was there can be read; with room again all goes on."""
    put(file, A, "me", "before")

    def limit(pages: int) -> None:
        file.database.execute(f"PRAGMA max_page_count={pages}").fetchall()

    def write(database: sqlite3.Connection) -> None:
        B.put(database, "me", "small", b"", 0.0)
        B.put(database, "me", "large", b"x" * 100_000, 0.0)

    def fail() -> None:
        for _ in range(3):
            assert "full" in file.attempt(write, "Nothing is kept")

    file.ask(lambda: limit(1))
    file.ask(fail)
    assert keys(file, B, "me") == [] and keys(file, A, "me") == ["before"]
    assert [each.getMessage() for each in caplog.records] == [
        f"Nothing is kept: {file.path} cannot be written: database or disk is full."
    ]
    file.ask(lambda: limit(1 << 30))
    file.ask(lambda: file.attempt(write, "Nothing is kept"))
    assert keys(file, B, "me") == ["large", "small"]


_WRITER = """
import sys
from tokenmill.state.file import StateFile
from tokenmill.state.kept import Kind

file, kind = StateFile(sys.argv[1]), Kind("pair")
file.open()

def write(number):
    def both(database):
        kind.put(database, "left", number, b"x" * 5000, 0.0)
        kind.put(database, "right", number, b"x" * 5000, 0.0)
    assert not file.attempt(both, "")
    print(number, flush=True)

for number in range(100000):
    file.put(lambda number=number: write(number))
file.close()
"""


def test_a_kill_loses_nothing_that_was_written_and_leaves_nothing_half(tmp_path: Path) -> None:
    """Of a process that writes all the time, at any moment, beside another one that writes too."""
    path = str(tmp_path / "kept.db")
    told = 0
    file = StateFile(path)
    file.open()
    for count in (1, 7, 40):
        with subprocess.Popen([sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for number in range(count):
                told = max(told, int(process.stdout.readline()))
                put(file, A, "me", f"{number}")
            os.kill(process.pid, signal.SIGKILL)
        pairs = [keys(file, Kind("pair"), side) for side in ("left", "right")]
        assert pairs[0] == pairs[1] == list(range(len(pairs[0]))) and len(pairs[0]) > told
    file.close()
    open_checked(path, KEPT, busy_s=1.0).close()


def test_users_of_a_file_share_it_and_the_last_one_closes_it(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "kept.db"))
    file.open()
    file.open()
    put(file, A, "me", "a")
    file.close()
    assert keys(file, A, "me") == ["a"]
    file.close()
    file.close()
    assert [each.name for each in tmp_path.iterdir()] == ["kept.db"]


OLD = Schema("--old", (9, 1), "CREATE TABLE IF NOT EXISTS old (name, words);", ("journal_mode=WAL",))


def old(name: str = "old.db", fails: bool = False) -> OldFormat:
    def rows(database: sqlite3.Connection) -> Iterator[Row]:
        for key, words in database.execute("SELECT name, words FROM old"):
            yield Row("a", "me", key, 0.0, len(words), words)
        if fails:
            raise sqlite3.OperationalError("database or disk is full")

    return old_format(name, OLD, rows)


def old_file(path: Path, *names: str) -> None:
    with closing(open_database(str(path), OLD, busy_s=1.0)) as database, transaction(database):
        database.executemany("INSERT INTO old VALUES (?, ?)", [(name, b"words") for name in names])


def test_a_file_reads_old_those_of_before(tmp_path: Path) -> None:
    """Each whole or not at all, once, when its user first opens the file; they stay as they were."""
    for name in ("one", "two"):
        old_file(tmp_path / f"{name}.db", name)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    path = str(tmp_path / "kept.db")
    file = StateFile(path, reads_old=True)
    with pytest.raises(ConfigError, match=r"--old .*two.db cannot be used: database or disk is full"):
        file.open(old("two.db", fails=True))
    for _ in range(2):
        file = StateFile(path, reads_old=True)
        file.open(old("one.db"))
        file.open(old("none.db"))
        assert keys(file, A, "me") == ["one"]
        file.close()
        file.close()
        old_file(tmp_path / "one.db", "too late")
    (tmp_path / "one.db").write_bytes(whole[tmp_path / "one.db"])
    assert {each: each.read_bytes() for each in whole} == whole
    file.open(old("two.db"))
    assert keys(file, A, "me") == ["one", "two"]
    file.close()


def test_a_value_of_before_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    """Also where the bytes of the file are whole."""

    def rows(database: sqlite3.Connection) -> Iterator[Row]:
        for _, words in database.execute("SELECT name, words FROM old"):
            yield Row("a", "me", msgspec.msgpack.decode(words, type=str), 0.0, 0, words)

    old_file(tmp_path / "old.db", "one")
    damaged = old_format("old.db", OLD, rows)
    with pytest.raises(ConfigError, match=r"--old .*old.db is damaged: "):
        StateFile(str(tmp_path / "kept.db"), reads_old=True).open(damaged)
    with pytest.raises(Damaged):
        StateFile(str(tmp_path / "old.db")).open(damaged)


_OPENER = """
import sys
from test_state_kept import old
from tokenmill.state.file import StateFile

file = StateFile(sys.argv[1], reads_old=sys.argv[2] == "taken over", busy_s=60.0)
print("ready", flush=True)
sys.stdin.read()
file.open(old())
file.close()
"""


@pytest.mark.parametrize("how", ["converted", "taken over"])
def test_of_processes_that_find_a_file_of_before_at_once_all_start(tmp_path: Path, how: str) -> None:
    """One does it, and the copy beside is of before."""
    old_file(tmp_path / "old.db", *(f"{number:05}" for number in range(20_000)))
    path = str(tmp_path / ("old.db" if how == "converted" else "kept.db"))
    command = [sys.executable, "-c", _OPENER, path, how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait() for process in processes] == [0] * len(processes)
    file = StateFile(path)
    file.open()
    assert len(keys(file, A, "me")) == 20_000
    file.close()
    left = ["old.db", "old.db.before"] if how == "converted" else ["kept.db", "old.db"]
    assert sorted(each.name for each in tmp_path.iterdir()) == left
    open_checked(str(tmp_path / ("old.db.before" if how == "converted" else "old.db")), OLD, busy_s=1.0).close()


def test_a_file_that_was_named_is_converted_and_left_beside(tmp_path: Path) -> None:
    """As one transaction: where that fails, the file is what it was, and it can be done again."""
    path = tmp_path / "named.db"
    old_file(path, "one")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        StateFile(str(path)).open(old(fails=True))
    with closing(open_checked(str(path), OLD, busy_s=1.0)) as database:
        assert database.execute("SELECT name FROM old").fetchall() == [("one",)]
    for _ in range(2):
        file = StateFile(str(path))
        file.open(old())
        assert keys(file, A, "me") == ["one"]
        file.close()
    with closing(open_checked(f"{path}.before", OLD, busy_s=1.0)) as database:
        assert database.execute("SELECT name FROM old").fetchall() == [("one",)]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("kept",)]
