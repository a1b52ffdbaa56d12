"""What tenants have used of their limits, in the control file, which the front ends of a machine share.

    bucket  what is left of a tenant's requests and tokens of a minute
    lease   how many calls of a tenant each front end holds, until when that counts
    used    when a key was last used, about

A front end that dies stops renewing its leases, so that its calls count no longer than LEASE_S. Counts may be lost:
buckets are full then. They belong to one thread.

A bucket holds what one minute allows and refills evenly. What a call uses is taken when it enters, as far as it can be
known then, and put right when it ends; a bucket that was overdrawn lets nobody in until it has refilled. A call may
take more than a bucket holds: it waits for a full one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ...core.tenant import RateLimits
from ...state.control import CONTROL
from ...state.database import is_replaced, open_database, open_in_memory, transaction

MINUTE_S = 60.0
_NEARLY = 1e-6
"""Of a limit: what is missing only because a clock's seconds are rounded is there."""


class Bucket(NamedTuple):
    """level: what is left, below 0: owed; at_s: when that was so."""

    level: float
    at_s: float

    def at(self, now_s: float, limit: int) -> Bucket:
        """As it is now, under this limit. A clock that was set back refills nothing."""
        grown = self.level + max(0.0, now_s - self.at_s) * limit / MINUTE_S
        return Bucket(min(float(limit), grown), now_s)

    def wait_s(self, amount: float, limit: int) -> float:
        """Until so much is there, if nobody else takes any; 0: it is there."""
        missing = min(amount, limit) - self.level
        return missing * MINUTE_S / limit if missing > _NEARLY * limit else 0.0

    def less(self, amount: float) -> Bucket:
        return Bucket(self.level - amount, self.at_s)


class Standing(NamedTuple):
    """Of a limit, for headers: how much of it is left, and seconds until it is whole again."""

    limit: int
    remaining: int
    reset_s: float


def standing(bucket: Bucket, limit: int) -> Standing:
    return Standing(limit, max(0, int(bucket.level + _NEARLY * limit)), bucket.wait_s(limit, limit))


def duration_text(seconds: float) -> str:
    """As OpenAI writes them: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


LEASE_S = 10.0
_BUSY_S = 2.0
_FULL = Bucket(float("inf"), 0.0)


class Verdict(NamedTuple):
    """refused_by: "requests", "tokens" or "concurrent", "" for a call that is let in. wait_s: until it may be, as far
    as the file knows. standings: by kind."""

    refused_by: str
    wait_s: float
    standings: Mapping[str, Standing]


class QuotaFile:
    """Raises sqlite3.Error and OSError, here and everywhere. held: calls that this front end holds, by tenant.
    in_memory: counts are this process's own, since the file is damaged."""

    def __init__(self, path: str, held: Counter[str] | None = None, *, in_memory: bool = False) -> None:
        self._holder = secrets.token_hex(8)
        self.held: Counter[str] = Counter() if held is None else held
        self._database = open_in_memory(CONTROL) if in_memory else open_database(path, CONTROL, busy_s=_BUSY_S)
        self._path, self._inode = path, os.stat(path).st_ino

    @property
    def is_replaced(self) -> bool:
        """Whether there is another file now."""
        return is_replaced(self._path, self._inode)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("DELETE FROM lease WHERE holder = ?", (self._holder,))
        self._database.close()

    def take(self, tenant: str, limits: RateLimits, num_tokens: int, now_s: float) -> Verdict:
        """Let a call in, or not."""
        wanted = {"requests": (1, limits.requests_per_minute), "tokens": (num_tokens, limits.tokens_per_minute)}
        wanted = {kind: each for kind, each in wanted.items() if each[1]}
        with transaction(self._database):
            buckets = {kind: self._bucket(tenant, kind).at(now_s, limit) for kind, (_, limit) in wanted.items()}
            refused_by, wait_s = "", 0.0
            for kind, (amount, limit) in wanted.items():
                if (until_s := buckets[kind].wait_s(amount, limit)) > wait_s:
                    refused_by, wait_s = kind, until_s
            is_full = limits.max_concurrent and self._num_calls(tenant, now_s) >= limits.max_concurrent
            if is_full and not refused_by:
                refused_by = "concurrent"
            if not refused_by:
                buckets = {kind: bucket.less(wanted[kind][0]) for kind, bucket in buckets.items()}
                self._write(tenant, buckets)
                self._hold(tenant, 1, now_s)
        return Verdict(refused_by, wait_s, {kind: standing(each, wanted[kind][1]) for kind, each in buckets.items()})

    def give_back(self, tenant: str, limits: RateLimits, num_tokens: int, now_s: float, num_requests: int = 0) -> None:
        """A call is over. num_tokens: that it did not use of those taken, negative for more than these; num_requests:
        1 for one that was never begun."""
        with transaction(self._database):
            for kind, amount, limit in (
                ("requests", num_requests, limits.requests_per_minute),
                ("tokens", num_tokens, limits.tokens_per_minute),
            ):
                if limit and amount:
                    bucket = self._bucket(tenant, kind).at(now_s, limit).less(-amount)
                    self._write(tenant, {kind: bucket.at(now_s, limit)})
            self._hold(tenant, -1, now_s)

    def renew(self, now_s: float) -> None:
        """What this front end holds counts on."""
        if self.held:
            with transaction(self._database):
                for tenant in self.held:
                    self._lease(tenant, now_s)

    def note_used(self, used: Iterable[tuple[str, float]]) -> None:
        with transaction(self._database):
            self._database.executemany(
                "INSERT INTO used VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET at_s = MAX(at_s, excluded.at_s)", used
            )

    def used(self) -> dict[str, float]:
        """When each key was last used, by its id."""
        return dict(self._database.execute("SELECT key, at_s FROM used"))

    # ---- inside a transaction ----

    def _bucket(self, tenant: str, kind: str) -> Bucket:
        row = self._database.execute(
            "SELECT level, at_s FROM bucket WHERE tenant = ? AND kind = ?", (tenant, kind)
        ).fetchone()
        return _FULL if row is None else Bucket(*row)

    def _write(self, tenant: str, buckets: Mapping[str, Bucket]) -> None:
        self._database.executemany(
            "INSERT OR REPLACE INTO bucket VALUES (?, ?, ?, ?)",
            [(tenant, kind, *each) for kind, each in buckets.items()],
        )

    def _num_calls(self, tenant: str, now_s: float) -> int:
        """Of this front end as it knows them, of others as they have told."""
        (others,) = self._database.execute(
            "SELECT COALESCE(SUM(num_calls), 0) FROM lease WHERE tenant = ? AND holder != ? AND expires_s > ?",
            (tenant, self._holder, now_s),
        ).fetchone()
        return int(others) + self.held[tenant]

    def _hold(self, tenant: str, change: int, now_s: float) -> None:
        self.held[tenant] += change
        self._lease(tenant, now_s)
        if not self.held[tenant]:
            del self.held[tenant]

    def _lease(self, tenant: str, now_s: float) -> None:
        num_calls = self.held[tenant]
        if num_calls:
            self._database.execute(
                "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?)", (tenant, self._holder, num_calls, now_s + LEASE_S)
            )
            self._database.execute("DELETE FROM lease WHERE tenant = ? AND expires_s <= ?", (tenant, now_s))
        else:
            self._database.execute("DELETE FROM lease WHERE tenant = ? AND holder = ?", (tenant, self._holder))
