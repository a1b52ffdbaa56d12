"""Who may call, as a running server knows it: what it does when its file changes, breaks, goes or is another."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tokenmill.cli.state import open_access, require_keys
from tokenmill.control.tenants.access import Access
from tokenmill.control.tenants.keys import digest_of
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.errors import ConfigError
from tokenmill.core.tenant import ADMIN, ANYONE


@contextmanager
def opened(path: Path, *api_keys: str) -> Iterator[Access]:
    access = Access(api_keys, str(path))
    access.open()
    with closing(access):
        yield access


def until(condition: Callable[[], bool], longest_s: float = 5.0) -> None:
    end_s = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def whose(access: Access, key: str) -> str:
    found = access.find(digest_of(key))
    return "" if found is None else found.tenant.id


def test_a_file_that_cannot_be_read_leaves_keys_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once; a server that starts on it does not: it would open to all."""
    path = tmp_path / "tenants.db"
    store = TenantStore(str(path))
    key = store.create_key("a", "t")[1]
    with opened(path) as access:
        newer = "UPDATE tenant SET settings = '{\"of_a_later_version\":1}'"
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(newer)
        until(lambda: "stay as they were" in caplog.text)
        assert whose(access, key) == "t" and access.asks
        with pytest.raises(ConfigError, match="of_a_later_version"):
            Access((), str(path)).open()
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("UPDATE tenant SET settings = '{}'")
        store.revoke_keys("a")
        until(lambda: whose(access, key) == "")
    assert caplog.text.count("stay as they were") == 1
    store.close()


def test_a_file_that_goes_or_is_replaced_opens_nothing(tmp_path: Path) -> None:
    """Without it keys stay; another one's keys are known soon, and where it has none, none is good."""
    path, other = tmp_path / "tenants.db", tmp_path / "other.db"
    store = TenantStore(str(path))
    key = store.create_key("a", "t")[1]
    store.close()
    with opened(path) as access:
        for ending in ("", "-wal", "-shm"):
            if os.path.exists(f"{path}{ending}"):
                os.remove(f"{path}{ending}")
        asyncio.run(access.look_again())
        assert whose(access, key) == "t"
        TenantStore(str(other)).close()
        os.replace(other, path)
        until(lambda: whose(access, key) == "")
        assert access.asks
        store = TenantStore(str(path))
        new = store.create_key("b", "u")[1]
        store.close()
        asyncio.run(access.look_again())
        assert whose(access, new) == "u"


def test_a_key_ends_when_it_expires(tmp_path: Path) -> None:
    """At the moment, whether or not anybody looks at the file."""
    now_s = [1_800_000_000.0]
    store = TenantStore(str(tmp_path / "tenants.db"), lambda: now_s[0])
    key = store.create_key("a", "t", expires_s=now_s[0] + 10)[1]
    store.close()
    access = Access((), str(tmp_path / "tenants.db"), lambda: now_s[0])
    access.open()
    with closing(access):
        now_s[0] += 9.9
        assert whose(access, key) == "t"
        now_s[0] += 0.2
        assert whose(access, key) == "" and access.asks


def test_keys_of_the_command_line_are_tenants_of_their_own(tmp_path: Path) -> None:
    """Known by their digests: not by their order, and with salts that nobody else can make."""
    access, other = Access(("one", "two")), Access(("two", "one"))
    found = [access.find(digest_of(key)) for key in ("one", "two")]
    again = [other.find(digest_of(key)) for key in ("one", "two")]
    for mine, same in zip(found, again, strict=True):
        assert mine is not None and same is not None
        assert (mine.tenant, mine.owner) == (same.tenant, same.owner) and ADMIN not in mine.scopes
        assert mine.tenant.id.startswith("key-") and mine.owner.startswith(mine.tenant.id[4:])
        assert mine.tenant.salt and mine.owner not in mine.tenant.salt
        assert access.tenant_of(mine.owner) == mine.tenant
    assert len({each.tenant.salt for each in found if each is not None}) == 2
    assert access.tenant_of("") is ANYONE and access.tenant_of("gone") is None
    assert access.asks and not Access().asks


def test_where_keys_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A chosen file must serve; the default one may be missing where none can be made, but not be unreadable."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "state"))
    assert not open_access("off", ()).has_store and not (tmp_path / "state").exists()
    with closing(open_access(None, ())) as access:
        assert access.has_store and (tmp_path / "state" / "control.db").stat().st_mode & 0o777 == 0o600
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ConfigError, match="--tenants"):
        open_access(str(blocked / "t.db"), ())
    monkeypatch.setenv("TOKENMILL_STATE", str(blocked))
    assert not open_access(None, ()).has_store and "no keys given out" in caplog.text
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tenants.db").write_text("no database at all, and so long that it cannot be one" * 100)
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "odd"))
    with pytest.raises(ConfigError, match="--tenants"):
        open_access(None, ())


def test_an_address_that_others_reach_needs_keys(tmp_path: Path) -> None:
    """Of flags or of the store, or something else that asks who is there."""
    with closing(open_access(str(tmp_path / "tenants.db"), ())) as access:
        require_keys("127.0.0.1", access, is_guarded=False)
        require_keys("::1", access, is_guarded=False)
        for host in ("0.0.0.0", "", "::"):
            with pytest.raises(ConfigError, match="--insecure"):
                require_keys(host, access, is_guarded=False)
            require_keys(host, access, is_guarded=True)
            require_keys(host, Access(("key",)), is_guarded=False)
        store = TenantStore(str(tmp_path / "tenants.db"))
        store.create_key("a", "t")
        store.close()
        asyncio.run(access.look_again())
        require_keys("0.0.0.0", access, is_guarded=False)


def test_no_damage_opens_a_server_or_is_a_bug(tmp_path: Path) -> None:
    """Whatever is written over a file, and wherever it is cut off: the file is refused, with its name and a remedy, or
    keys are asked for."""
    path = tmp_path / "tenants.db"
    store = TenantStore(str(path))
    for number in range(40):
        store.create_key(f"k{number}", f"t{number}")
    store.close()
    whole, num_refused = path.read_bytes(), 0
    for seed in range(300):
        rng, data = random.Random(seed), bytearray(whole)
        for _ in range(rng.choice([1, 3, 40])):
            at = rng.randrange(rng.choice([100, len(data)]))
            data[at : at + rng.choice([1, 4, 100, 4096])] = rng.randbytes(rng.choice([1, 4, 100, 4096]))
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            with opened(path) as access:
                assert access.asks, seed
        except ConfigError as error:
            assert f"--tenants {path}" in error.message, (seed, error.message)
            num_refused += 1
    assert num_refused > 150
