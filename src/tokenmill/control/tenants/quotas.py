"""Limits of tenants, as calls meet them: taken when a call enters, put right when its last request has ended.

A tenant without limits costs nothing here. For one with limits a thread asks the file that front ends share, while the
event loop goes on. A call counts with the tokens of its prompt and, as it enters, with at most RESERVED_OUTPUT of each
answer; when it ends, with what it was.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...cluster.events import Ended
from ...core.errors import InvalidRequest, RateLimited, Unavailable
from ...core.request import Request
from ...core.tenant import NO_LIMITS, RateLimits, Tenant
from ...state.database import is_damage
from ...state.writer import BackgroundWriter
from ..observe.observers import Observer
from .quota_file import LEASE_S, QuotaFile, Verdict, duration_text

RESERVED_OUTPUT = 1024
"""Most tokens of an answer that are taken before it is there."""

_NOTE_S = 30.0
_MEMORY = 0.2  # of a new duration in the mean
_OPEN = (0.0, NO_LIMITS, Verdict("", 0.0, {}))
_log = logging.getLogger(__name__)
T = TypeVar("T")
_WORDS = {"requests": "requests a minute", "tokens": "tokens a minute", "concurrent": "open requests"}


@dataclass(slots=True)
class _Charge:
    """A call that was let in. num_tokens: taken for it; open: its requests that have not ended; counted: what they
    came to."""

    tenant: str
    limits: RateLimits
    num_tokens: int
    num_prompt: int
    begun_s: float
    open: set[str] = field(default_factory=set)
    counted: int = 0
    has_run: bool = False


class Quotas(Observer):
    """An Observer. `open` it before use, `close` it after. path: of the control file."""

    def __init__(self, path: str, wall_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall_s = wall_s
        self._writer = BackgroundWriter("quotas", begin=self._begin, end=self._end)
        self._file: QuotaFile | None = None
        self._held = Counter[str]()
        self._charges: dict[str, _Charge] = {}
        self._closed_until: dict[str, tuple[float, RateLimits, Verdict]] = {}
        self._num_open: Counter[str] = Counter()
        self._mean_s: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._noted_s = 0.0
        self._has_failed = False

    def open(self) -> None:
        self._writer.open()
        self._writer.every(LEASE_S / 5, self._each_period)

    def close(self) -> None:
        self._writer.close()

    def note_used(self, key: str, now_s: float) -> None:
        self._used[key] = now_s

    async def used(self) -> dict[str, float]:
        """When each key was last used, by its id."""
        return await self._writer.do(self._read_used)

    def check(self, tenant: Tenant) -> None:
        """Refuse at once what can be known to be refused, before it costs anything. Raises RateLimited."""
        if tenant.limits == NO_LIMITS:
            return
        if 0 < tenant.limits.max_concurrent <= self._num_open[tenant.id]:
            self._refuse(tenant, Verdict("concurrent", 0.0, {}))
        until_s, limits, verdict = self._closed_until.get(tenant.id, _OPEN)
        wait_s = until_s - self._wall_s()
        if wait_s > 0 and limits == tenant.limits:
            self._refuse(tenant, verdict._replace(wait_s=wait_s))

    async def take(self, tenant: Tenant, requests: Sequence[Request], param: str = "prompt") -> dict[str, str]:
        """Let a call in; what its answer's headers say of the limits. Raises RateLimited, and InvalidRequest naming
        `param` for a prompt that is larger than all of a minute."""
        limits = tenant.limits
        if limits == NO_LIMITS:
            return {}
        num_prompt = sum({id(each.prompt_tokens): len(each.prompt_tokens) for each in requests}.values())
        if 0 < limits.tokens_per_minute < num_prompt:
            raise InvalidRequest(
                f"The prompt has {num_prompt} tokens; the tenant may use {limits.tokens_per_minute} a minute.",
                param=param,
            )
        num_tokens = num_prompt + sum(
            min(each.max_tokens, RESERVED_OUTPUT) for each in requests if each.pooling is None
        )
        now_s = self._wall_s()
        charge = _Charge(tenant.id, limits, num_tokens, num_prompt, now_s, {each.id for each in requests})
        taking = asyncio.ensure_future(self._writer.do(lambda: self._take(charge)))
        try:
            verdict = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda done: self._undo(charge, done))
            raise
        if verdict.refused_by:
            self._refuse(tenant, verdict)
        self._num_open[tenant.id] += 1
        for request in requests:
            self._charges[request.id] = charge
        return headers_of(verdict)

    def drop(self, requests: Sequence[Request]) -> None:
        """A call that was let in and has not come to the engine: nothing of it counts."""
        self._end_all(requests, None)

    def settle(self, requests: Sequence[Request], num_output: int) -> None:
        """A call that the engine knows by other requests is over."""
        self._end_all(requests, num_output)

    # ---- as an Observer ----

    def ended(self, ended: Ended) -> None:
        charge = self._charges.pop(ended.request.id, None)
        if charge is None:
            return
        if ended.output is not None:
            charge.has_run = True
            charge.counted += 0 if ended.request.pooling is not None else ended.output.num_output
        charge.open.discard(ended.request.id)
        if not charge.open:
            self._end_call(charge)

    # ---- inside ----

    def _end_all(self, requests: Sequence[Request], num_output: int | None) -> None:
        found = [charge for each in requests if (charge := self._charges.pop(each.id, None)) is not None]
        if found:
            found[0].has_run, found[0].counted = num_output is not None, num_output or 0
            self._end_call(found[0])

    def _refuse(self, tenant: Tenant, verdict: Verdict) -> None:
        limits, by = tenant.limits, verdict.refused_by
        wait_s = verdict.wait_s
        if by == "concurrent":  # calls end one after the other
            wait_s = self._mean_s.get(tenant.id, 1.0) / limits.max_concurrent
        elif by == "requests":
            self._closed_until[tenant.id] = (self._wall_s() + wait_s, limits, verdict)
        most = {"requests": limits[0], "tokens": limits[1], "concurrent": limits[2]}[by]
        raise RateLimited(
            f"The tenant may have {most} {_WORDS[by]}; retry in {max(1, math.ceil(wait_s))} s.",
            retry_after_s=wait_s,
            limit=by,
            headers=headers_of(verdict),
        )

    def _end_call(self, charge: _Charge) -> None:
        self._num_open[charge.tenant] -= 1
        if not self._num_open[charge.tenant]:
            del self._num_open[charge.tenant]
        self._give_back(charge)

    def _undo(self, charge: _Charge, done: asyncio.Future[Verdict]) -> None:
        """Of a call whose client left while it was being let in."""
        if not done.cancelled() and done.exception() is None and not done.result().refused_by:
            self._give_back(charge)

    def _give_back(self, charge: _Charge) -> None:
        now_s = self._wall_s()
        num_used = charge.num_prompt + charge.counted if charge.has_run else 0
        if charge.has_run:
            mean_s, took_s = self._mean_s.get(charge.tenant), now_s - charge.begun_s
            self._mean_s[charge.tenant] = took_s if mean_s is None else mean_s + _MEMORY * (took_s - mean_s)
        self._writer.put(lambda: self._put_back(charge, charge.num_tokens - num_used, now_s))

    # ---- in the thread ----

    def _open(self, *, in_memory: bool = False) -> QuotaFile:
        """Raises what the file raises."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._file = QuotaFile(self._path, self._held, in_memory=in_memory)
        return self._file

    def _begin(self) -> None:
        self._guarded(lambda file: None)

    def _take(self, charge: _Charge) -> Verdict:
        def take(file: QuotaFile) -> Verdict:
            return file.take(charge.tenant, charge.limits, charge.num_tokens, self._wall_s())

        try:
            return self._do(take)
        except (OSError, sqlite3.Error) as error:
            self._fail(error)
            raise Unavailable(f"The limits of tenants cannot be read: {error}.") from error

    def _do(self, job: Callable[[QuotaFile], T]) -> T:
        """Where the file is damaged nobody is refused for that: this process counts by itself, until there is another
        file."""
        try:
            result = job(self._open() if self._file is None or self._file.is_replaced else self._file)
        except (OSError, sqlite3.Error) as error:
            if not is_damage(error):
                raise
            _log.error("%s is damaged: %s. Each front end counts limits of tenants by itself.", self._path, error)
            result = job(self._open(in_memory=True))
        self._has_failed = False
        return result

    def _put_back(self, charge: _Charge, num_tokens: int, now_s: float) -> None:
        num_requests = 0 if charge.has_run else 1
        self._guarded(lambda file: file.give_back(charge.tenant, charge.limits, num_tokens, now_s, num_requests))

    def _read_used(self) -> dict[str, float]:
        found: dict[str, float] = {}
        self._guarded(lambda file: found.update(file.used()))
        return found | self._used

    def _each_period(self) -> None:
        now_s = self._wall_s()
        if self._file is not None:
            self._guarded(lambda file: file.renew(now_s))
        if self._used and not 0 <= now_s - self._noted_s < _NOTE_S:
            self._note(now_s)

    def _note(self, now_s: float) -> None:
        used, self._used = self._used, {}
        self._noted_s = now_s
        self._guarded(lambda file: file.note_used(dict(used).items()))

    def _end(self) -> None:
        if self._used:
            self._note(self._wall_s())
        if self._file is not None:
            self._file.close()

    def _guarded(self, job: Callable[[QuotaFile], object]) -> None:
        try:
            self._do(job)
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.error(
                "What tenants use cannot be written to %s: %s. Those with limits are refused.", self._path, error
            )


def headers_of(verdict: Verdict) -> dict[str, str]:
    """OpenAI's x-ratelimit-*."""
    headers: dict[str, str] = {}
    for kind, each in verdict.standings.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(each.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(each.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = duration_text(each.reset_s)
    return headers
