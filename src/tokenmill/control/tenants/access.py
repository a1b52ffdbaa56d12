"""Who may call: keys given out by the store, and those of --api-key, each as a credential.

A key is looked up in memory, by its digest, so that a call costs the same whatever the keys and however many. The
memory is read anew by a thread after the file has changed, of which it asks twice a second, and at once for a key that
is not known: calls with wrong keys wait for one such question together, so that a flood of them costs no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ...core.errors import ConfigError, TokenmillError, Unavailable
from ...core.tenant import ADAPTERS, ADMIN, ANYONE, OPERATOR, Tenant
from ...core.terms import Terms
from ...state.control import CONTROL, KEYS
from ...state.database import Damaged, cannot_use, open_checked
from ...state.writer import BackgroundWriter
from .keys import KEY_OF_FLAGS, digest_of
from .quotas import Quotas
from .store import TenantStore

LOOK_S = 0.5
"""A key that is revoked in one server is refused by all of the same file after this long at most."""

_AGAIN_S = 0.05
_ADMIN_SCOPES = frozenset((ADMIN, OPERATOR, ADAPTERS))
_FLAG_SCOPES = frozenset((ADAPTERS,))
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Credential:
    """What a key opens. client: who takes turns; owner: for whom things are kept; key: its id; expires_s: 0: never."""

    tenant: Tenant
    scopes: frozenset[str]
    client: str
    owner: str
    key: str = ""
    expires_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Known:
    """What a store says. tenants: by id; is_used: it has, or had, a key; deleted: ids of tenants that are."""

    credentials: Mapping[bytes, Credential]
    tenants: Mapping[str, Tenant]
    is_used: bool
    deleted: frozenset[str] = frozenset()


EMPTY = Known({}, {}, False)


def read_known(store: TenantStore, now_s: float) -> Known:
    """Raises what cannot be read."""
    records = {record.id: record for record in store.tenants()}
    tenants = {
        name: Tenant(
            name, record.settings.name or name, record.settings.terms(name), store.salt(record), record.settings.limits
        )
        for name, record in records.items()
    }
    keys = {key.id: key for key in store.all_keys()}
    credentials = {
        digest: Credential(
            tenants[key.tenant],
            _ADMIN_SCOPES if key.is_admin else frozenset(),
            f"tenant {key.tenant}",
            key.tenant,
            key.id,
            key.expires_s,
        )
        for digest, name in store.digests().items()
        if (key := keys.get(name)) is not None and key.tenant in tenants and key.is_live(now_s)
    }
    return Known(credentials, tenants, bool(keys), store.deleted())


class Access:
    """`open` it before use, `close` it after.

    api_keys  those of the command line: each a tenant of its own
    path      of the store; "": there is none

    quotas: what tenants have used of their limits; None without a store.
    """

    def __init__(self, api_keys: tuple[str, ...] = (), path: str = "", wall_s: Callable[[], float] = time.time) -> None:
        self._given = {digest_of(key): _of_flag(number, digest_of(key)) for number, key in enumerate(api_keys)}
        self._given_tenants = {each.owner: each.tenant for each in self._given.values()}
        self._path = path
        self._wall_s = wall_s
        self._known = EMPTY
        self.on_change: Callable[[Known, Known], None] | None = None
        """Told by the thread what was known, and what is."""
        self._store: TenantStore | None = None
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._writer = BackgroundWriter("tenants", begin=self._begin, end=self._end)
        self._next_look: asyncio.Task[None] | None = None
        self._has_failed = False
        self.quotas = Quotas(path, wall_s) if path else None

    def open(self) -> None:
        """Raises ConfigError where the store cannot be used."""
        if self._path:
            self._writer.open()
            self._writer.every(LOOK_S, self._look)
        if self.quotas is not None:
            self.quotas.open()

    def close(self) -> None:
        self._writer.close()
        if self.quotas is not None:
            self.quotas.close()

    @property
    def has_store(self) -> bool:
        return bool(self._path)

    @property
    def asks(self) -> bool:
        """Whether calls need a key: there is one, or the store had one."""
        return bool(self._given) or self._known.is_used

    @property
    def deleted(self) -> frozenset[str]:
        """Ids of tenants that have been deleted."""
        return self._known.deleted

    def find(self, digest: bytes) -> Credential | None:
        given = self._given.get(digest)
        if given is not None:
            return given
        found = self._known.credentials.get(digest)
        if found is None:
            return None
        now_s = self._wall_s()
        if 0 < found.expires_s <= now_s:
            return None
        if self.quotas is not None:
            self.quotas.note_used(found.key, now_s)
        return found

    def tenant_of(self, owner: str) -> Tenant | None:
        """Of whom things are kept; None: of a tenant that is gone."""
        return self._known.tenants.get(owner) or self._given_tenants.get(owner) or (None if owner else ANYONE)

    async def look_again(self) -> None:
        """What was in the store when this was called is known when it returns."""
        if not self._path:
            return
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_soon(), name="tenants")
        await asyncio.shield(self._next_look)

    async def _look_soon(self) -> None:
        try:
            await asyncio.sleep(_AGAIN_S)
        finally:
            self._next_look = None  # who comes from here on needs a further look
        with contextlib.suppress(Unavailable):
            await self._writer.do(self._look)

    async def do(self, job: Callable[[TenantStore], T]) -> T:
        """Work on the store; what it changes is known when this returns. Raises what the job raises."""

        def work() -> T:
            assert self._store is not None
            store, before = self._store, self._store.num_changes
            try:
                return job(store)
            finally:
                if store.num_changes != before:
                    self._read()

        return await self._writer.do(work)

    # ---- in the thread ----

    def _begin(self) -> None:
        self._store = TenantStore(self._path, self._wall_s)
        try:
            self._seen = self._state()
            self._known = read_known(self._store, self._wall_s())
        except Unavailable as error:
            raise cannot_use(CONTROL.flag, self._path, Damaged(error.message.rstrip("."))) from error
        except TokenmillError as error:
            raise ConfigError(f"--tenants {self._path} cannot be used: {error.message}", param="tenants") from error

    def _state(self) -> tuple[int, int, int]:
        """Another one after the file has been changed by others, or replaced."""
        assert self._store is not None
        try:
            found = os.stat(self._path)
            inode, changed_ns = found.st_ino, found.st_mtime_ns
        except OSError as error:  # what was known stays so as long as there is nothing else to know
            inode, changed_ns = self._seen[:2]
            self._warn(f"{self._path} cannot be found: {error.strerror}.")
        return inode, changed_ns, self._store.version()

    def _look(self) -> None:
        try:
            state = self._state()
        except TokenmillError as error:
            self._warn(error.message)
            return
        inode, changed_ns, version = self._seen
        if state[0] != inode:
            self._reopen()
        elif state[1] != changed_ns and (why := self._damage()):  # which our connection may not come upon
            self._seen = state
            self._warn(why)
            return
        elif state[2] == version:  # counts and sums are in the file too
            self._seen = state
            return
        self._read()

    def _damage(self) -> str:
        try:
            open_checked(self._path, CONTROL, busy_s=LOOK_S, tables=KEYS).close()
        except (sqlite3.Error, OSError) as error:
            return cannot_use(CONTROL.flag, self._path, error).message
        return ""

    def _reopen(self) -> None:
        assert self._store is not None
        try:
            store = TenantStore(self._path, self._wall_s)
        except ConfigError as error:
            self._warn(error.message)
            return
        self._store.close()
        self._store = store

    def _read(self) -> None:
        assert self._store is not None
        try:
            state = self._state()
            known = read_known(self._store, self._wall_s())
        except TokenmillError as error:
            self._warn(error.message)
            return
        # A store that had keys asks for one for ever, also where it has been replaced by an empty one.
        before = self._known
        self._known = replace(known, is_used=known.is_used or self._known.is_used)
        self._seen, self._has_failed = state, False
        if self.on_change is not None:
            self.on_change(before, self._known)

    def _warn(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.error("Keys and tenants stay as they were: %s", why)

    def _end(self) -> None:
        if self._store is not None:
            self._store.close()


def _of_flag(number: int, digest: bytes) -> Credential:
    """A key of the command line: no admin, with a salt that nobody knows who does not know the key."""
    name = KEY_OF_FLAGS + digest.hex()[:12]
    salt = hashlib.blake2b(b"salt", key=digest, digest_size=16).hexdigest()
    tenant = Tenant(name, name, Terms(tenant=name), salt)
    return Credential(tenant, _FLAG_SCOPES, f"key {number}", digest.hex(), name)
