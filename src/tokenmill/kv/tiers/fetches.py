"""Fetches: blocks are leased to clients as they come.

    waits   its client, or all together, hold as much of host memory as they may
    begun   what is in host memory is leased; the rest comes, or is missing
    told    all has been said; the leases last until the client has said Fetched, or has gone

One that is more than a client may ever hold gets as much as that; the rest is missing. Whatever has not come in time is
missing, so that nobody waits for a tier, or for another client, for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...core.tiers import HOST, Fetch, Fetched, Lease, Leased, TierKey
from .arrivals import Arrivals
from .contents import Contents
from .deadlines import Deadlines
from .events import Outbox
from .replacement import TierBlock
from .saves import Touches

MOST_FETCHES = 4096
"""Of a client at once."""


class Fetching:
    """num_bytes: that it may hold; is_begun: they count as held. leases: places in `wanted` with their blocks, which
    are held. coming: places that are waited for. ready, missing: to be told."""

    __slots__ = (
        "_fetches",
        "client",
        "coming",
        "is_begun",
        "is_over",
        "leases",
        "message",
        "missing",
        "num_bytes",
        "ready",
    )

    def __init__(self, fetches: Fetches, client: int, message: Fetch) -> None:
        self._fetches = fetches
        self.client = client
        self.message = message
        self.is_begun = False
        self.is_over = False
        self.num_bytes = 0
        self.leases: dict[int, TierBlock] = {}
        self.coming: dict[int, None] = {}
        self.ready: list[Lease] = []
        self.missing: list[int] = []

    @property
    def is_told(self) -> bool:
        """Everything has been said, or is about to be."""
        return not self.coming

    def arrived(self, nth: int, block: TierBlock, now: float) -> None:
        if nth in self.coming:
            del self.coming[nth]
            self._fetches.lease(self, nth, block)

    def missed(self, nth: int, now: float) -> None:
        if nth in self.coming:
            del self.coming[nth]
            self._fetches.miss(self, nth)


class Fetches:
    """leased_bytes: that fetches which have begun may hold."""

    def __init__(self, contents: Contents, arrivals: Arrivals, touches: Touches, outbox: Outbox) -> None:
        self.leased_bytes = 0
        self._contents = contents
        self._arrivals = arrivals
        self._touches = touches
        self._outbox = outbox
        self._fetches: dict[int, dict[int, Fetching]] = {}
        self._client_leased: dict[int, int] = {}
        self._waiting: dict[int, deque[Fetching]] = {}  # by client, in turn
        self._deadlines: Deadlines[Fetching] = Deadlines(lambda one: one.is_over or one.is_told)
        self._to_tell: dict[Fetching, None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._fetches.values()))

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def next_s(self) -> float | None:
        """When the next has waited long enough."""
        return self._deadlines.next_s

    def leases(self) -> list[TierBlock]:
        return [block for all_ in self._fetches.values() for one in all_.values() for block in one.leases.values()]

    def fetch(self, client: int, message: Fetch, now: float) -> None:
        mine = self._fetches.setdefault(client, {})
        if message.number in mine:
            return
        fetching = Fetching(self, client, message)
        if len(mine) >= MOST_FETCHES:
            self._outbox.say(client, Leased(message.number, (), tuple(range(len(message.wanted))), True))
            return
        mine[message.number] = fetching
        self._want(fetching, range(len(message.wanted)))
        self._to_tell[fetching] = None
        self._deadlines.add(now + self._contents.config.fetch_timeout_s, fetching)
        self._waiting.setdefault(client, deque()).append(fetching)

    def fetched(self, client: int, message: Fetched, now: float) -> tuple[TierKey, ...]:
        """The blocks that were wrong."""
        mine = self._fetches.get(client, {})
        fetching = mine.pop(message.number, None)
        if fetching is None:
            return ()
        if not mine:
            del self._fetches[client]
        good = [fetching.leases[nth] for nth in sorted(fetching.leases.keys() - set(message.bad))]
        counts = self._contents.host.counts
        counts["loads"] += len(good)
        for block in reversed(good):
            counts["load_bytes"] += block.num_bytes
            self._touches.use(block.block, now)
        self._touches.use_before([(block.block, block.parent) for block in good], now)
        wanted = fetching.message.wanted
        self._end(fetching, now)
        return tuple(wanted[nth] for nth in message.bad if 0 <= nth < len(wanted))

    def gone(self, client: int, now: float) -> None:
        for fetching in self._fetches.pop(client, {}).values():
            self._end(fetching, now)
        self._waiting.pop(client, None)

    def lapse(self, now: float) -> None:
        """What has not come in time is missing."""
        for fetching in self._deadlines.due(now):
            self._contents.counts[HOST]["fetch_timeouts"] += 1
            for nth in list(fetching.coming):
                fetching.missed(nth, now)

    def step(self, now: float) -> None:
        """Begin those whose turn has come: of each client in its order, clients in turn."""
        while begun := [client for client in list(self._waiting) if self._begin_first(client, now)]:
            for client in begun:
                if (rest := self._waiting.pop(client, None)) is not None:
                    self._waiting[client] = rest

    def flush(self) -> None:
        """Say what has come since the last time."""
        told, self._to_tell = self._to_tell, {}
        for fetching in told:
            if fetching.is_over:
                continue
            leases, missing = tuple(fetching.ready), tuple(sorted(fetching.missing))
            fetching.ready, fetching.missing = [], []
            if leases or missing or fetching.is_told:
                message = Leased(fetching.message.number, leases, missing, fetching.is_told)
                self._outbox.say(fetching.client, message)

    def lease(self, fetching: Fetching, nth: int, block: TierBlock) -> None:
        host = self._contents.host
        host.hold(block)
        host.owners[block.owner].num_hits += 1
        fetching.leases[nth] = block
        fetching.ready.append(Lease(nth, block.place, block.sum))
        self._to_tell[fetching] = None

    def miss(self, fetching: Fetching, nth: int) -> None:
        fetching.missing.append(nth)
        self._contents.counts[HOST]["missing"] += 1
        self._to_tell[fetching] = None

    @property
    def _client_bytes(self) -> int:
        return self._contents.share_bytes(self._contents.config.client_share)

    def _want(self, fetching: Fetching, places: Iterable[int]) -> None:
        """Of these blocks as many as a client may hold, now that host memory is as large as it is."""
        contents, wanted, most = self._contents, fetching.message.wanted, self._client_bytes
        fetching.num_bytes, fetching.coming = 0, {}
        for nth in places:
            size = contents.kinds[wanted[nth][0]].num_bytes if contents.is_valid(wanted[nth]) else 0
            if not size or fetching.num_bytes + size > most:
                self.miss(fetching, nth)
            else:
                fetching.num_bytes += size
                fetching.coming[nth] = None

    def _begin_first(self, client: int, now: float) -> bool:
        waiting = self._waiting[client]
        while waiting and (waiting[0].is_over or waiting[0].is_told):
            waiting.popleft()
        if not waiting:
            del self._waiting[client]
            return False
        most, mine = self._client_bytes, self._client_leased.get(client, 0)
        if waiting[0].num_bytes > most:
            self._want(waiting[0], list(waiting[0].coming))
        size = waiting[0].num_bytes
        all_bytes = self._contents.share_bytes(self._contents.config.lease_share)
        if mine + size > most or self.leased_bytes + size > all_bytes:
            return False
        fetching = waiting.popleft()
        fetching.is_begun = True
        self._client_leased[client] = mine + size
        self.leased_bytes += size
        self._begin(fetching, now)
        return True

    def _begin(self, fetching: Fetching, now: float) -> None:
        contents, arrivals = self._contents, self._arrivals
        is_near = fetching.message.is_near
        num_wanted, num_hits = len(fetching.coming), 0
        for nth, found in contents.follow(fetching.message.wanted):
            if nth not in fetching.coming:
                continue
            if isinstance(found, TierBlock):
                num_hits += 1
                fetching.arrived(nth, found, now)
            else:
                arrivals.bring(found, fetching, nth, is_near, now)
        contents.host.counts["hits"] += num_hits
        contents.host.counts["misses"] += num_wanted - num_hits

    def _end(self, fetching: Fetching, now: float) -> None:
        fetching.is_over = True
        for block in fetching.leases.values():
            self._contents.release(block, now)
        fetching.leases, fetching.coming = {}, {}
        fetching.message = Fetch(fetching.message.number, ())  # its keys need not stay until its time is over
        if fetching.is_begun:
            self.leased_bytes -= fetching.num_bytes
            left = self._client_leased[fetching.client] - fetching.num_bytes
            self._client_leased[fetching.client] = left
            if not left:
                del self._client_leased[fetching.client]
