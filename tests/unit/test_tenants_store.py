"""Tenants and keys in their file: what is kept, what is refused, and who else sees it when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenmill.control.tenants.access import read_known
from tokenmill.control.tenants.keys import digest_of
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.errors import ConfigError, NotFound, TokenmillError
from tokenmill.core.tenant import ADMIN


class Wall:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def store(tmp_path: Path, wall: Wall) -> Iterator[TenantStore]:
    made = TenantStore(str(tmp_path / "state" / "tenants.db"), wall)
    yield made
    made.close()


def opens(store: TenantStore, key: str, now_s: float) -> str:
    """Whose credential a key is, or ""."""
    found = read_known(store, now_s).credentials.get(digest_of(key))
    return "" if found is None else found.tenant.id


def test_a_key_is_256_bits_of_which_only_the_digest_is_kept(store: TenantStore, wall: Wall) -> None:
    """Neither the file nor what is written ahead of it has the key; file and folder are the user's alone."""
    keys = [store.create_key(f"k{number}", "t")[1] for number in range(50)]
    assert all(key.startswith("tm-") and len(key) == 3 + 43 for key in keys) and len(set(keys)) == 50
    folder = Path(store.path).parent
    kept = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not any(key.encode() in kept or key[3:].encode() in kept for key in keys)
    assert digest_of(keys[0]) in kept
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert opens(store, keys[7], wall()) == "t" and opens(store, keys[7] + "x", wall()) == ""


def test_a_rotated_key_ends_at_once_or_after_the_overlap(store: TenantStore, wall: Wall) -> None:
    """The new one has the old one's name, tenant, scope and end."""
    old, first = store.create_key("a", "t", is_admin=True, expires_s=wall.now_s + 1000)
    new, second = store.rotate_key("a", 60.0)
    assert (new.name, new.tenant, new.is_admin, new.expires_s) == ("a", "t", True, old.expires_s)
    assert opens(store, first, wall.now_s) == opens(store, second, wall.now_s) == "t"
    assert opens(store, first, wall.now_s + 61) == "" and opens(store, second, wall.now_s + 61) == "t"
    third = store.rotate_key(new.id)[1]
    assert opens(store, second, wall.now_s) == "" and opens(store, third, wall.now_s) == "t"
    with pytest.raises(ConfigError, match="not in use"):
        store.rotate_key(new.id)
    assert opens(store, third, wall.now_s + 1001) == ""
    assert [len(store.revoke_keys("a")), opens(store, third, wall.now_s)] == [2, ""]
    with pytest.raises(NotFound):
        store.revoke_keys("a")


def test_an_id_is_never_used_again(store: TenantStore, wall: Wall) -> None:
    """Whoever came after a deleted tenant would find what it kept."""
    key = store.create_key("a", "t")[1]
    assert store.delete_tenant("t") == 1 and opens(store, key, wall()) == ""
    for again in (lambda: store.create_tenant("t", TenantSettings()), lambda: store.create_key("b", "t")):
        with pytest.raises(ConfigError, match="not used again"):
            again()
    assert store.tenants() == []
    assert store.deleted() == read_known(store, wall()).deleted == {"t"}
    with pytest.raises(NotFound):
        store.delete_tenant("t")
    assert read_known(store, wall()).is_used, "a server that had keys does not open to all"


def test_salts_differ_but_within_a_cache_group(store: TenantStore, tmp_path: Path) -> None:
    """Another file gives other salts: nobody can know one."""
    for name, group in (("a", ""), ("b", ""), ("c", "g"), ("d", "g"), ("g", "")):
        store.create_tenant(name, TenantSettings(cache_group=group))
    salts = {tenant.id: store.salt(tenant) for tenant in store.tenants()}
    assert salts["c"] == salts["d"] and len(set(salts.values())) == 4
    other = TenantStore(str(tmp_path / "other.db"))
    assert other.salt(store.tenant("a")) != salts["a"]
    other.close()


def test_a_tenants_salt_and_the_clients_make_one_that_no_other_pair_makes(store: TenantStore) -> None:
    store.create_tenant("a", TenantSettings())
    tenant = next(iter(read_known(_with_key(store), 0.0).tenants.values()))
    salts = {tenant.salt_with(given) for given in ("", "a", "aa", tenant.salt)}
    assert len(salts) == 4 and tenant.salt not in salts


def _with_key(store: TenantStore) -> TenantStore:
    store.create_key("k", "a")
    return store


BAD: list[tuple[str, Callable[[TenantStore], object]]] = [
    ("tenant must be", lambda store: store.create_tenant("a b", TenantSettings())),
    ("tenant must be", lambda store: store.create_tenant("", TenantSettings())),
    ("tenant must be", lambda store: store.create_tenant("x" * 64, TenantSettings())),
    ("tenant must be", lambda store: store.create_tenant("key-1", TenantSettings())),
    ("name must be", lambda store: store.create_key("a\n", "t")),
    ("name must be", lambda store: store.create_key("a" * 101, "t")),
    ("future", lambda store: store.create_key("a", "t", expires_s=5.0)),
    ("already", lambda store: [store.create_key("a", "t"), store.create_key("a", "u")]),
    ("already", lambda store: [store.create_key("a", "t"), store.create_tenant("t", TenantSettings())]),
    ("tenants set", lambda store: [store.create_key("a", "t"), store.create_key("b", "t", settings=TenantSettings())]),
    ("no tenant", lambda store: store.change_tenant("nobody", {})),
    ("weight must be positive", lambda store: [store.create_key("a", "t"), store.change_tenant("t", {"weight": 0})]),
    ("Did you mean 'weight'", lambda store: [store.create_key("a", "t"), store.change_tenant("t", {"wieght": 1})]),
    ("kv_share", lambda store: TenantSettings(kv_share=1.5)),
    ("requests-per-minute", lambda store: TenantSettings(requests_per_minute=-1)),
    ("requests_per_minute must be int", lambda store: TenantSettings.from_fields({"requests_per_minute": 1.5})),
    ("priority-class", lambda store: TenantSettings(priority_class=3)),
    ("cache_group", lambda store: TenantSettings(cache_group="a b")),
    ("ttft-ms", lambda store: TenantSettings(ttft_ms=float("nan"))),
]  # fmt: skip


@pytest.mark.parametrize(("told", "call"), BAD)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(
    told: str, call: Callable[[TenantStore], object], store: TenantStore
) -> None:
    """The message says what may be."""
    with pytest.raises(TokenmillError, match=told):
        call(store)
    store.create_tenant("after", TenantSettings())  # no transaction is left open


def test_settings_survive_the_file_and_only_what_is_unusual_is_kept(store: TenantStore) -> None:
    """A default that changes later reaches tenants that never chose."""
    store.create_key("a", "t", settings=TenantSettings(tokens_per_minute=5, weight=2, name="Team A"))
    store.change_tenant("t", {"priority_class": 0, "weight": 1.0, "tokens_per_minute": 7.0})
    settings = store.tenant("t").settings
    assert settings.changes() == {"tokens_per_minute": 7, "priority_class": 0, "name": "Team A"}
    assert settings.terms("t")[:2] == ("t", 0) and settings.limits == (0, 7, 0)
    admin = read_known(store, 0.0)
    assert [each.scopes for each in admin.credentials.values()] == [frozenset()] and ADMIN not in str(admin)
