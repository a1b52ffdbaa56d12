"""Tenants and their keys in the control file, which several servers and the command line use at once.

Nothing is ever forgotten: a deleted tenant's id is not given out again, because what it kept would become a stranger's.
Whether keys are asked for depends on there having been one: a server does not open to all when its last key expires.
The file is its user's alone (mode 0600) and has digests of keys, no keys. Salts come from a secret of the file.

A store belongs to one thread. Each call is one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ...core.errors import ConfigError, NotFound, Unavailable
from ...state.control import CONTROL
from ...state.database import cannot_use, open_database, transaction
from .keys import KeyRecord, TenantRecord, check_key_name, check_tenant_id, digest_of, hint_of, new_key
from .settings import TenantSettings

_BUSY_S = 5.0
_KEY = "id, tenant, name, hint, is_admin, created_s, expires_s, revoked_s, replaced_by"
_TENANT = "id, created_s, settings, deleted_s"


class TenantStore:
    """`path`: of the file, whose folder is made. Raises ConfigError where it cannot be used. wall_s: seconds since the
    epoch."""

    def __init__(self, path: str, wall_s: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall_s = wall_s
        try:
            self._database = open_database(path, CONTROL, busy_s=_BUSY_S)
            self._database.execute("PRAGMA synchronous=FULL")
            (self._secret,) = self._database.execute("SELECT value FROM secret").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise cannot_use(CONTROL.flag, path, error) from error

    def close(self) -> None:
        self._database.close()

    def version(self) -> int:
        """Another number after tenants or keys have been changed, by whomever."""
        with self._reading():
            row = self._database.execute("SELECT number FROM keys_version").fetchone()
        return 0 if row is None else int(row[0])

    @property
    def num_changes(self) -> int:
        """Another number after this connection has changed the file."""
        return self._database.total_changes

    # ---- tenants ----

    def tenants(self) -> list[TenantRecord]:
        """Those that have not been deleted, the oldest first."""
        with self._reading():
            rows = self._database.execute(f"SELECT {_TENANT} FROM tenant WHERE deleted_s = 0 ORDER BY created_s, id")
            return [_tenant(*row) for row in rows]

    def deleted(self) -> frozenset[str]:
        """Ids of those that have been deleted."""
        with self._reading():
            return frozenset(name for (name,) in self._database.execute("SELECT id FROM tenant WHERE deleted_s > 0"))

    def tenant(self, identifier: str) -> TenantRecord:
        """Raises NotFound."""
        with self._reading():
            return self._tenant(identifier)

    def create_tenant(self, identifier: str, settings: TenantSettings) -> TenantRecord:
        """Raises ConfigError where there is one, or was."""
        check_tenant_id(identifier)
        with self._writing() as now_s:
            return self._create_tenant(identifier, settings, now_s)

    def change_tenant(self, identifier: str, changes: dict[str, Any]) -> TenantRecord:
        """Raises NotFound, and ConfigError naming the setting."""
        with self._writing():
            found = self._tenant(identifier)
            settings = TenantSettings.from_fields(changes, found.settings)
            self._database.execute("UPDATE tenant SET settings = ? WHERE id = ?", (_written(settings), identifier))
            return TenantRecord(found.id, found.created_s, settings)

    def delete_tenant(self, identifier: str) -> int:
        """Its keys are revoked; returns how many. Raises NotFound."""
        with self._writing() as now_s:
            self._tenant(identifier)
            self._database.execute("UPDATE tenant SET deleted_s = ? WHERE id = ?", (now_s, identifier))
            return self._database.execute(
                "UPDATE key SET revoked_s = ? WHERE tenant = ? AND revoked_s = 0", (now_s, identifier)
            ).rowcount

    # ---- keys ----

    def all_keys(self, tenant: str | None = None) -> list[KeyRecord]:
        """All there have been, the oldest first."""
        with self._reading():
            return self._keys("WHERE ? IN ('', tenant)", tenant or "")

    def create_key(
        self,
        name: str,
        tenant: str,
        *,
        is_admin: bool = False,
        expires_s: float = 0.0,
        settings: TenantSettings | None = None,
    ) -> tuple[KeyRecord, str]:
        """(the record, the key, which nobody can show again). The tenant is made if it is not there, with `settings`;
        where these are given it must not be there. Raises ConfigError."""
        check_key_name(name)
        check_tenant_id(tenant)
        with self._writing() as now_s:
            if 0 < expires_s <= now_s:
                raise ConfigError("expires_at must be in the future.", param="expires_at")
            is_there = self._database.execute(
                "SELECT COUNT(*) FROM tenant WHERE id = ? AND deleted_s = 0", (tenant,)
            ).fetchone()[0]
            if settings is not None and is_there:
                raise ConfigError(
                    f"The tenant {tenant} is there already; change it with: tokenmill tenants set {tenant}",
                    param="tenant",
                )
            if not is_there:
                self._create_tenant(tenant, settings or TenantSettings(), now_s)
            if any(each.name == name and each.is_live(now_s) for each in self._keys("WHERE replaced_by = ''")):
                raise ConfigError(
                    f"There is a key named {name!r} already: `tokenmill keys rotate {name}` gives it anew, "
                    f"`tokenmill keys revoke {name}` takes it back.",
                    param="name",
                )
            return self._create_key(name, tenant, is_admin, expires_s, now_s)

    def rotate_key(self, reference: str, overlap_s: float = 0.0) -> tuple[KeyRecord, str]:
        """(the new key's record, the new key): another of the same name, tenant and scope. The old one ends `overlap_s`
        from now. Raises NotFound, and ConfigError for one that is not live."""
        with self._writing() as now_s:
            old = self._named(reference, now_s)[-1]
            if not old.is_live(now_s) or old.replaced_by:
                raise ConfigError(f"The key {old.id} is not in use any more; it cannot be rotated.", param="key")
            made = self._create_key(old.name, old.tenant, old.is_admin, old.expires_s, now_s)
            ends_s = now_s + overlap_s
            self._database.execute(
                "UPDATE key SET replaced_by = ?, expires_s = ?, revoked_s = ? WHERE id = ?",
                (made[0].id, min(ends_s, old.expires_s or ends_s), 0.0 if overlap_s else now_s, old.id),
            )
            return made

    def revoke_keys(self, reference: str) -> list[KeyRecord]:
        """The key of this id, or all live ones of this name. Raises NotFound."""
        with self._writing() as now_s:
            found = self._named(reference, now_s)
            for key in found:
                self._database.execute("UPDATE key SET revoked_s = ? WHERE id = ? AND revoked_s = 0", (now_s, key.id))
            return [self._keys("WHERE id = ?", key.id)[0] for key in found]

    def digests(self) -> dict[bytes, str]:
        """The ids of keys, by digest."""
        with self._reading():
            return {bytes(digest): key for digest, key in self._database.execute("SELECT digest, id FROM key")}

    def used(self) -> dict[str, float]:
        """When each key was last used, by its id, as far as front ends have told."""
        with self._reading():
            return dict(self._database.execute("SELECT key, at_s FROM used"))

    # ---- salts ----

    def salt(self, tenant: TenantRecord) -> str:
        """Equal for tenants of one cache group, and for no others; nobody who does not read the file can know it."""
        group = tenant.settings.cache_group
        whose = f"group {group}" if group else f"tenant {tenant.id}"
        return hashlib.blake2b(whose.encode(), key=self._secret, digest_size=16).hexdigest()

    # ---- inside a transaction ----

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise Unavailable(f"The tenants cannot be read from {self.path}: {error}.") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[float]:
        """What is written in the block is written as a whole, or not at all. Gives the time."""
        try:
            with transaction(self._database):
                yield self._wall_s()
        except sqlite3.Error as error:
            raise Unavailable(f"The tenants cannot be written to {self.path}: {error}.") from error

    def _tenant(self, identifier: str) -> TenantRecord:
        row = self._database.execute(
            f"SELECT {_TENANT} FROM tenant WHERE id = ? AND deleted_s = 0", (identifier,)
        ).fetchone()
        if row is None:
            raise NotFound(f"There is no tenant {identifier[:100]!r}.", param="tenant")
        return _tenant(*row)

    def _create_tenant(self, identifier: str, settings: TenantSettings, now_s: float) -> TenantRecord:
        found = self._database.execute("SELECT deleted_s FROM tenant WHERE id = ?", (identifier,)).fetchone()
        if found is not None:
            raise ConfigError(
                f"There was a tenant {identifier}, and ids are not used again; choose another."
                if found[0]
                else f"There is a tenant {identifier} already.",
                param="tenant",
            )
        self._database.execute(
            "INSERT INTO tenant (id, created_s, settings) VALUES (?, ?, ?)", (identifier, now_s, _written(settings))
        )
        return TenantRecord(identifier, now_s, settings)

    def _create_key(
        self, name: str, tenant: str, is_admin: bool, expires_s: float, now_s: float
    ) -> tuple[KeyRecord, str]:
        key = new_key()
        record = KeyRecord(f"key_{secrets.token_hex(8)}", tenant, name, hint_of(key), is_admin, now_s, expires_s)
        self._database.execute(
            "INSERT INTO key (id, digest, tenant, name, hint, is_admin, created_s, expires_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (record.id, digest_of(key), tenant, name, record.hint, is_admin, now_s, expires_s),
        )
        return record, key

    def _keys(self, where: str, *values: str) -> list[KeyRecord]:
        rows = self._database.execute(f"SELECT {_KEY} FROM key {where} ORDER BY created_s, id", values)
        return [KeyRecord(row[0], row[1], row[2], row[3], bool(row[4]), *row[5:]) for row in rows]

    def _named(self, reference: str, now_s: float) -> list[KeyRecord]:
        """The key of this id, else the live ones of this name, the one in use last. Raises NotFound."""
        found = self._keys("WHERE id = ?", reference)
        if not found:
            live = [each for each in self._keys("WHERE name = ?", reference) if each.is_live(now_s)]
            found = sorted(live, key=lambda each: not each.replaced_by)
        if not found:
            raise NotFound(f"There is no key {reference[:100]!r} in use.", param="key")
        return found


def _tenant(identifier: str, created_s: float, settings: str, deleted_s: float) -> TenantRecord:
    return TenantRecord(identifier, created_s, TenantSettings.from_fields(msgspec.json.decode(settings)), deleted_s)


def _written(settings: TenantSettings) -> str:
    return msgspec.json.encode(settings.changes()).decode()
