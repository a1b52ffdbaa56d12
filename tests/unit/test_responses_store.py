"""The store of responses: bounded in bytes and age, private, each owner's own, shared by processes, and told of."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from clocks import ManualClock
from tokenmill.api.responses.history import MAX_CHAIN, Record
from tokenmill.core.errors import Unavailable
from tokenmill.server import response_store as responses_store
from tokenmill.server.response_store import ResponseStore
from tokenmill.state.file import StateFile


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[ResponseStore]:
    opened = ResponseStore(str(tmp_path / "private" / "r.db"), max_bytes=1000, kept_s=60, wall_s=clock)
    opened.open()
    yield opened
    opened.close()


def record(name: str, owner: str = "me", previous: str = "", size_bytes: int = 100) -> Record:
    return Record(name, owner, previous, b"x" * (size_bytes - 2), b"[]")


def held(store: ResponseStore, names: list[str], owner: str = "me") -> list[str]:
    async def look() -> list[str]:
        return [name for name in names if await store.get(owner, name) is not None]

    return asyncio.run(look())


def test_what_is_put_can_be_got_at_once(store: ResponseStore) -> None:
    store.put(record("a"))
    assert asyncio.run(store.get("me", "a")) == record("a")
    assert asyncio.run(store.get("you", "a")) is None


def test_the_oldest_go_when_there_is_too_much(store: ResponseStore, clock: ManualClock) -> None:
    """Never more bytes than told, after each write."""
    names = [f"r{number}" for number in range(30)]
    for name in names:
        clock.now_s += 0.5
        store.put(record(name))
        kept = held(store, names[: names.index(name) + 1])
        assert len(kept) <= 10 and kept == names[: names.index(name) + 1][-len(kept) :]
    assert len(held(store, names)) >= 9


def test_a_response_is_gone_when_its_time_is_over(store: ResponseStore, clock: ManualClock, tmp_path: Path) -> None:
    """To readers at once, and in the file with the next write."""
    store.put(Record("a", "me", "", b"old words", b"[]"))
    clock.now_s += 61
    assert held(store, ["a"]) == []
    store.put(record("b"))
    store.close()
    assert not any(b"old words" in path.read_bytes() for path in (tmp_path / "private").iterdir())


def test_a_deleted_response_leaves_nothing(store: ResponseStore, tmp_path: Path) -> None:
    """Not in any of the files, while the store goes on."""
    store.put(Record("a", "me", "", b"words " * 10, b"[]"))
    store.put(record("b"))
    assert not asyncio.run(store.delete("you", "a"))
    assert asyncio.run(store.delete("me", "a")) and not asyncio.run(store.delete("me", "a"))
    assert not any(b"words" in path.read_bytes() for path in (tmp_path / "private").iterdir())
    assert held(store, ["a", "b"]) == ["b"]


def test_a_deletion_does_not_wait_for_who_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a server keeps waits for one thread; what the journal still holds goes when nobody reads it."""
    monkeypatch.setattr(responses_store, "_SWEEP_S", 0.02)
    store = ResponseStore(StateFile(str(tmp_path / "r.db"), busy_s=60.0))
    store.open()
    store.put(Record("a", "me", "", b"words " * 10, b"[]"))
    assert held(store, ["a"])
    with closing(sqlite3.connect(tmp_path / "r.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT key FROM kept").fetchall()
        assert asyncio.run(asyncio.wait_for(store.delete("me", "a"), 20.0))
        assert any(b"words" in path.read_bytes() for path in tmp_path.iterdir())
    until_s = time.monotonic() + 60.0
    while any(b"words" in path.read_bytes() for path in tmp_path.iterdir()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    store.close()


def test_only_the_user_can_read_the_files(store: ResponseStore, tmp_path: Path) -> None:
    """Whatever the umask, and those that SQLite makes beside the first too."""
    store.put(record("a"))
    held(store, ["a"])
    files = [*(tmp_path / "private").iterdir()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700


def test_chains_are_put_together_and_bounded(store: ResponseStore) -> None:
    store.put(record("a"))
    store.put(record("b", previous="a"))
    store.put(record("c", previous="b"))
    assert [each.id for each in asyncio.run(store.chain("me", "c", 1000))] == ["a", "b", "c"]
    assert [each.id for each in asyncio.run(store.chain("me", "c", 150))] == ["b", "c"]
    assert asyncio.run(store.chain("you", "c", 1000)) == []
    asyncio.run(store.delete("me", "a"))
    assert [each.id for each in asyncio.run(store.chain("me", "c", 1000))] == ["b", "c"]


def test_a_chain_that_never_ends_is_cut(store: ResponseStore) -> None:
    store.put(record("a", previous="a"))
    assert len(asyncio.run(store.chain("me", "a", 10**9))) == MAX_CHAIN


def test_several_servers_share_a_file(store: ResponseStore, tmp_path: Path, clock: ManualClock) -> None:
    """Each finds what the other keeps, and after a restart it is there."""
    other = ResponseStore(str(tmp_path / "private" / "r.db"), max_bytes=1000, kept_s=60, wall_s=clock)
    other.open()
    store.put(record("a"))
    assert held(store, ["a"]) and held(other, ["a"])
    other.put(record("b"))
    other.close()
    store.close()
    store.open()
    assert held(store, ["a", "b"]) == ["a", "b"]


def test_what_a_dead_process_ran_has_failed_at_once(store: ResponseStore, tmp_path: Path, clock: ManualClock) -> None:
    """Where its name tells that it has ended; else once its lease is over. What it ended is as it was."""
    path, dead = str(tmp_path / "private" / "r.db"), {"one"}

    def opened(process: str) -> ResponseStore:
        made = ResponseStore(path, wall_s=clock, process=process, has_ended=lambda name: name in dead)
        made.open()
        return made

    body = b'{"status":"queued"}'
    one, two, other = opened("one"), opened("two"), opened("other")
    for name, runs_in in (("a", one), ("b", two)):
        runs_in.put(Record(name, "me", "", body, b"[]", server=runs_in.name))
    one.put(record("ended"))

    def seen(name: str, by: ResponseStore) -> Record | None:
        asyncio.run(one.settle(20))
        asyncio.run(two.settle(20))
        return asyncio.run(by.get("me", name))

    found = seen("a", other)
    assert found is not None and b'"failed"' in found.body and found.server == ""
    assert seen("b", other) == Record("b", "me", "", body, b"[]", server=two.name)
    assert seen("a", one) == Record("a", "me", "", body, b"[]", server=one.name), "it knows better"
    assert seen("ended", other) == record("ended")
    clock.now_s += responses_store.LEASE_S + 1
    found = seen("b", other)
    assert found is not None and b'"failed"' in found.body
    for each in (one, two, other):
        each.close()


def test_a_disk_that_fails_is_told_of_once(
    store: ResponseStore, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Answers are not held up; who asks for what could not be kept does not find it."""
    held(store, [])
    database = sqlite3.connect(tmp_path / "private" / "r.db")
    database.execute("DROP TABLE kept")
    database.commit()
    database.close()
    store.put(record("a"))
    store.put(record("b"))
    with pytest.raises(Unavailable):
        asyncio.run(store.get("me", "a"))
    assert [each.getMessage()[:22] for each in caplog.records] == ["Responses are not kept"]


def test_a_job_that_fails_ends_no_other(store: ResponseStore) -> None:
    """Whatever fails, its caller is told, and the next one is served."""

    def fail(database: sqlite3.Connection) -> None:
        raise MemoryError

    with pytest.raises(Unavailable):
        asyncio.run(asyncio.wait_for(store._do(fail), 30))
    store.put(record("a"))
    assert held(store, ["a"]) == ["a"]


def test_what_is_old_goes_where_others_only_read(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading puts no deletion off."""
    monkeypatch.setattr(responses_store, "_SWEEP_S", 0.2)
    store = ResponseStore(str(tmp_path / "r.db"), kept_s=60, wall_s=clock)
    store.open()
    store.put(record("a"))
    assert held(store, ["a"])
    clock.now_s += 61
    until = time.monotonic() + 20
    count = "SELECT COUNT(*) FROM kept"
    while asyncio.run(store._do(lambda database: database.execute(count).fetchone())) != (0,):
        assert time.monotonic() < until
        time.sleep(0.01)
    store.close()


def test_a_closed_store_says_so(store: ResponseStore) -> None:
    store.close()
    with pytest.raises(Unavailable):
        asyncio.run(store.get("me", "a"))
    assert os.path.exists(store._file.path)
