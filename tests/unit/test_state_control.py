"""The control file: what earlier versions kept is in it, and nothing that happens to one part takes the others."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tokenmill.cli.main import main
from tokenmill.cli.state import tenants_file, usage_file
from tokenmill.control.tenants.access import read_known
from tokenmill.control.tenants.keys import digest_of
from tokenmill.control.tenants.quota_file import QuotaFile
from tokenmill.control.tenants.store import TenantStore
from tokenmill.control.usage.ledger import Ledger
from tokenmill.core.errors import ConfigError, Unavailable
from tokenmill.core.tenant import RateLimits
from tokenmill.state.control import CONTROL, OLD_LIMITS, OLD_TENANTS, OLD_USAGE, recover
from tokenmill.state.database import open_checked, open_database
from tokenmill.state.migration import OldFormat

NOW_S = 1e9
ROW = (60, 0, "t", "key", "m", 1, 2, 0, 3)


def old_files(folder: Path) -> str:
    """Files as earlier versions wrote them, with something in each: the key that opens them."""
    (folder / "usage").mkdir()
    key = "tm-old"

    def rows(old: OldFormat, *given: tuple[str, tuple[object, ...]]) -> None:
        with closing(open_database(str(folder / old.name), old.schema, busy_s=1.0)) as database:
            for table, values in given:
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    made = ("key", ("key_1", digest_of(key), "t", "a", "tm-...", 0, NOW_S, 0.0, 0.0, ""))
    rows(OLD_TENANTS, ("tenant", ("t", NOW_S, 0.0, "{}")), made)
    rows(OLD_LIMITS, ("used", ("key_1", NOW_S)))
    rows(OLD_USAGE, ("usage", ROW), ("folded", ("gone.journal", 7)))
    return key


def opens(path: str, key: str) -> str:
    """Whose a key is, with the salt of the tenant."""
    with closing(TenantStore(path)) as store:
        found = read_known(store, NOW_S).credentials.get(digest_of(key))
    return "" if found is None else f"{found.tenant.id} {found.tenant.salt}"


def sums(path: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT * FROM usage").fetchall()


def test_what_earlier_versions_kept_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys open what they opened, with the salts that they had; the old files stay, byte for byte."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    key = old_files(tmp_path)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.db")}
    with closing(sqlite3.connect(tmp_path / OLD_TENANTS.name)) as database:
        (secret,) = database.execute("SELECT value FROM secret").fetchone()
    path = tenants_file(None)
    assert path == usage_file(None) == str(tmp_path / "control.db")
    assert opens(path, key).startswith("t ") and sums(path) == [ROW]
    with closing(TenantStore(path)) as store:
        assert store._secret == secret and store.used() == {"key_1": NOW_S}
        store.revoke_keys("a")
    assert {each: each.read_bytes() for each in whole} == whole
    tenants_file(None)
    assert opens(path, key) == "", "a key that was revoked since does not come back"


def test_old_files_never_take_the_place_of_what_is_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a repair that does not know which have been read: keys made since stay, a revoked one stays so."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    key = old_files(tmp_path)
    path = tenants_file(None)
    usage_file(None)
    with closing(TenantStore(path)) as store:
        store.revoke_keys("a")
        newer = store.create_key("b", "t")[1]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE usage SET calls = 5")
    spoil(Path(path), "imported")
    assert main(["state", "repair"]) == 0
    tenants_file(None)
    assert opens(path, key) == "" and opens(path, newer) and sums(usage_file(None))[0][5] == 5


def test_a_flag_that_names_the_default_file_reads_old_ones_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys made in it are there beside the old ones, also without the flag."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    key = old_files(tmp_path)
    path = tenants_file(str(tmp_path / "control.db"))
    with closing(TenantStore(path)) as store:
        newer = store.create_key("b", "t")[1]
    assert tenants_file(None) == path and opens(path, key) == opens(path, newer) != ""


def test_old_files_that_appear_later_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of old keys makes none of them good."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    path = tenants_file(None)
    key = old_files(tmp_path)
    assert tenants_file(None) == path and opens(path, key) == ""


def test_a_file_that_a_flag_names_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read by default too, if it has the name of old, and so asks for keys there."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    key = old_files(tmp_path)
    named = str(tmp_path / OLD_TENANTS.name)
    assert tenants_file(named) == named and (found := opens(named, key)).startswith("t ")
    open_checked(f"{named}.before", OLD_TENANTS.schema, busy_s=1.0).close()
    assert usage_file(str(tmp_path / "usage")) == "" and sums(str(tmp_path / "usage" / "usage.db")) == [ROW]
    assert opens(tenants_file(None), key) == found and sums(usage_file(None)) == [ROW]


@pytest.mark.parametrize(("name", "flag", "find"), [
    (OLD_TENANTS.name, "--tenants", tenants_file), (OLD_USAGE.name, "--usage-dir", usage_file)
])  # fmt: skip
@pytest.mark.parametrize("is_named", [False, True])
def test_a_damaged_old_file_stops_the_start_and_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flag: str, find: Callable[[str | None], str],
    is_named: bool,
) -> None:  # fmt: skip
    """Nothing is read of it; the repair takes the backup of then, whether or not it is told which file. The new file,
    which is there already and has not read it, is not taken for all."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    key = old_files(tmp_path)
    assert main(["state", "backup"]) == 0
    (tmp_path / name).write_bytes(b"garbage" * 999)
    with pytest.raises(ConfigError, match=f"{flag} .*{name} is damaged"):
        find(None)
    assert (tmp_path / "control.db").exists() and main(["state", "check"]) == 1
    named = [flag, str(tmp_path / name if flag == "--tenants" else tmp_path / "usage")] if is_named else []
    assert main(["state", "repair", *named]) == 0 and main(["state", "check"]) == 0
    assert opens(tenants_file(None), key) and sums(usage_file(None)) == [ROW]


def test_a_change_of_a_key_is_told_from_a_count(tmp_path: Path) -> None:
    """Whoever has all keys in memory reads them again for the one and not for the other."""
    path = str(tmp_path / "control.db")
    with closing(TenantStore(path)) as store, closing(TenantStore(path)) as other, closing(QuotaFile(path)) as counts:
        store.create_key("a", "t")
        seen = store.version()
        counts.take("t", RateLimits(9, 9, 9), 1, NOW_S)
        counts.note_used([("key", NOW_S)])
        assert store.version() == seen
        other.revoke_keys("a")
        assert store.version() != seen


def spoil(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (number,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with open(path, "rb+") as file:
        file.seek((number - 1) * size)
        file.write(b"\xa5" * size)


def filled(path: Path) -> str:
    with closing(TenantStore(str(path))) as store:
        key = store.create_key("a", "t")[1]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", ROW)
    return key


@pytest.mark.parametrize("table", ["usage", "once", "bucket", "lease", "used", "imported"])
def test_damage_in_one_part_is_mended_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """Keys are the newest, not those of a backup; sums come from it, or are begun anew."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    path = tmp_path / "control.db"
    key = filled(path)
    assert main(["state", "backup"]) == 0
    with closing(TenantStore(str(path))) as store:
        newer = store.create_key("b", "t")[1]
    spoil(path, table)
    with pytest.raises(ConfigError, match=r"(?s)is damaged.*state repair"):
        TenantStore(str(path))
    assert main(["state", "repair"]) == 0 and main(["state", "check"]) == 0
    assert opens(str(path), key) == opens(str(path), newer) != "" and sums(str(path)) == [ROW]


def test_keys_that_are_damaged_come_from_the_backup_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums stay the newest."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    path = tmp_path / "control.db"
    key = filled(path)
    good = path.read_bytes()
    spoil(path, "key")
    damaged = path.read_bytes()
    assert main(["state", "repair"]) == 1 and path.read_bytes() == damaged
    assert sorted(each.name for each in tmp_path.iterdir()) == ["control.db"]
    path.write_bytes(good)
    assert main(["state", "backup"]) == 0
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE usage SET calls = 5")
    spoil(path, "key")
    assert main(["state", "repair"]) == 0 and "revoke them anew" in capsys.readouterr().out
    assert opens(str(path), key) and sums(str(path))[0][5] == 5


def test_a_new_file_is_taken_from_where_it_is_whole(tmp_path: Path) -> None:
    """Group by group; one that nobody has whole is empty, and none of the others."""
    path, backup = tmp_path / "control.db", tmp_path / "backup"
    key = filled(path)
    for table in ("usage", "lease"):
        spoil(path, table)
    with closing(open_database(str(backup), CONTROL, busy_s=1.0)) as database:
        database.execute("INSERT INTO used VALUES ('key', 1.0)")
    spoil(backup, "usage")
    new, origins = recover(str(path), str(backup))
    assert origins == {"keys": str(path), "limits": str(backup), "imported": str(path)}
    assert opens(new, key) and sums(new) == []
    with closing(QuotaFile(new)) as counts:
        assert counts.used() == {"key": 1.0}


def test_on_a_full_disk_keys_are_read_and_nothing_is_half_written(tmp_path: Path) -> None:
    """Neither a key nor a count nor a sum; with room again all go on."""
    path, folder = str(tmp_path / "control.db"), tmp_path / "journals"
    folder.mkdir()
    with (
        closing(TenantStore(path)) as store,
        closing(QuotaFile(path)) as counts,
        closing(Ledger(folder, path)) as sums_,
    ):
        key = store.create_key("a", "t")[1]
        connections = (store._database, counts._database, sums_._database)
        for each in connections:
            each.execute("CREATE TEMP TABLE filler (x)")
            each.execute("PRAGMA max_page_count=1").fetchall()
        limits = RateLimits(9, 0, 0)
        with pytest.raises(Unavailable, match="full"):
            for number in range(1000):
                store.create_key(f"k{number}", f"t{number}")
        with pytest.raises(sqlite3.Error, match="full"):
            for number in range(10_000):
                counts.take(f"t{number}", limits, 0, NOW_S)
        assert digest_of(key) in read_known(store, NOW_S).credentials
        for each in connections:
            each.execute("PRAGMA max_page_count=100000").fetchall()
        held = Counter(counts.held)
        counts.take("new", limits, 0, NOW_S)
        assert counts.held == held + Counter(["new"]) and store.create_key("after", "t")[1]
    open_checked(path, CONTROL, busy_s=1.0).close()


_WRITER = """
import sys
from tokenmill.control.tenants.quota_file import QuotaFile
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.tenant import RateLimits

store, counts = TenantStore(sys.argv[1]), QuotaFile(sys.argv[1])
for number in range(100000):
    counts.take("t", RateLimits(10 ** 6, 0, 0), 0, 1e9)
    print(store.create_key(f"{sys.argv[2]} {number}", "t")[1], flush=True)
"""


def test_a_kill_loses_no_key_that_was_given_out(tmp_path: Path) -> None:
    """Of a process that writes all the time, at any moment, beside another one that counts."""
    path = str(tmp_path / "control.db")
    given: list[str] = []
    with closing(QuotaFile(path)) as counts:
        counts._database.execute("PRAGMA busy_timeout=60000")  # the other one leaves no time between
        for run in (1, 7, 20):
            command = [sys.executable, "-c", _WRITER, path, f"run {run}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for _ in range(run):
                    given.append(process.stdout.readline().strip())
                    counts.take("t", RateLimits(10**6, 0, 0), 0, NOW_S)
                os.kill(process.pid, signal.SIGKILL)
    open_checked(path, CONTROL, busy_s=1.0).close()
    with closing(TenantStore(path)) as store:
        assert {digest_of(key) for key in given} <= read_known(store, NOW_S).credentials.keys()
