"""Blocks on their way into host memory from a tier below it.

    a look in shared tiers  ->  a slot  ->  LoadFrom  ->  a block of host memory
                            <-  the next tier, where that one has it not after all  <-

Whoever wants a block that is on its way waits for it: nothing is loaded twice. A tier that has it not, or a checksum
that is not the one noted, counts as a miss of that tier. Slots are given in the order in which blocks were wanted; one
that nobody waits for (`Promote`) does without if there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ...core.tiers import DISK, HOST, NO_PLACE, REMOTE, BlockFacts, LoadFrom, TierKey
from .contents import Contents
from .events import Outbox
from .lookup import SharedLookups
from .replacement import MOST_SUM, TierBlock


class Waiter(Protocol):
    """A Fetch, or a Store that is to reach a tier beyond host memory. nth: as it was given to `bring`."""

    def arrived(self, nth: int, block: TierBlock, now: float) -> None: ...

    def missed(self, nth: int, now: float) -> None: ...


class Arrival:
    """waiters: with the place each gave, and whether it may come from near tiers only. tried: tiers that have it not.
    source: the block on disk, which is held while it is read; sum: that it has to have, NO_PLACE where that is not
    known. offset: of its slot. tier: that it comes from; HOST: a client writes it, "": that is being found out.
    is_ahead: it was wanted ahead of a fetch."""

    __slots__ = ("facts", "is_ahead", "is_over", "offset", "source", "sum", "tier", "tried", "waiters")

    def __init__(self, facts: BlockFacts) -> None:
        self.facts = facts
        self.waiters: list[tuple[Waiter, int, bool]] = []
        self.tried: tuple[str, ...] = ()
        self.tier = ""
        self.source: TierBlock | None = None
        self.sum = NO_PLACE
        self.offset = NO_PLACE
        self.is_ahead = False
        self.is_over = False


class Arrivals:
    """ahead_bytes: of those under way that were wanted ahead of a fetch."""

    def __init__(self, contents: Contents, shared_lookups: SharedLookups, outbox: Outbox) -> None:
        self.ahead_bytes = 0
        self._contents = contents
        self._shared_lookups = shared_lookups
        self._outbox = outbox
        self._coming: dict[TierKey, Arrival] = {}
        self._line: deque[Arrival] = deque()  # for a slot
        self._ready: dict[str, list[tuple[Arrival, int]]] = {}  # by tier, with the place there: for the next jobs
        self._loading: dict[int, tuple[list[Arrival], float]] = {}

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def num_loading(self) -> int:
        return sum(len(arrivals) for arrivals, _ in self._loading.values())

    def under_way(self) -> list[Arrival]:
        """Those that have a slot."""
        loading = [arrival for arrivals, _ in self._loading.values() for arrival in arrivals]
        return loading + [arrival for ready in self._ready.values() for arrival, _ in ready]

    def is_coming(self, block: TierKey) -> bool:
        return block in self._coming

    def bring(self, facts: BlockFacts, waiter: Waiter | None, nth: int, is_near: bool, now: float) -> None:
        """Have a block that is not in host memory there; `facts` as far as they are known. The waiter is told once,
        maybe at once."""
        arrival = self._coming.get(facts.block)
        if arrival is not None:
            if waiter is not None and is_near and arrival.tier not in (HOST, DISK):
                waiter.missed(nth, now)
            elif waiter is not None:
                arrival.waiters.append((waiter, nth, is_near))
            return
        arrival = self._coming[facts.block] = Arrival(facts)
        if waiter is not None:
            arrival.waiters.append((waiter, nth, is_near))
        else:
            arrival.is_ahead = True
            self.ahead_bytes += self._contents.kinds[facts.block[0]].num_bytes
        self._route(arrival, now)

    def expect(self, facts: BlockFacts) -> Arrival:
        """A client writes it: `appeared`, or `given_up`."""
        arrival = self._coming[facts.block] = Arrival(facts)
        arrival.tier = HOST
        return arrival

    def given_up(self, arrival: Arrival, now: float) -> None:
        if not arrival.is_over:
            arrival.tier = ""
            if arrival.waiters:
                self._route(arrival, now)
            else:
                self._end(arrival)

    def looked(self, tier: str, block: TierKey, now: float) -> None:
        arrival = self._coming.get(block)
        if arrival is not None and not arrival.tier:
            self._route(arrival, now)

    def stop(self, block: TierKey, now: float) -> None:
        """It is wrong where it comes from, or nobody may have it."""
        arrival = self._coming.get(block)
        if arrival is not None:
            self._miss(arrival, now)

    def appeared(self, arrival: Arrival, block: TierBlock, now: float) -> None:
        self._end(arrival)
        for waiter, nth, _ in arrival.waiters:
            waiter.arrived(nth, block, now)

    def step(self, now: float) -> None:
        """Give slots, and have them filled."""
        contents, line = self._contents, self._line
        while line:
            arrival = line[0]
            if not arrival.is_over:
                offset = contents.take_slot(arrival.facts.block[0], now, bool(arrival.waiters))
                if offset is None and arrival.waiters:
                    break
                if offset is None:
                    contents.host.counts["promotes_refused"] += 1
                    self._end(arrival)
                else:
                    arrival.offset = offset
                    self._start(arrival, now)
            line.popleft()
        ready, self._ready = self._ready, {}
        for tier, arrivals in ready.items():
            for job in self._cut(arrivals):
                self._load(tier, job, now)

    def ended(self, job: LoadFrom, result: Sequence[int], error: str, now: float) -> None:
        arrivals, started_s = self._loading.pop(job.number, ([], 0.0))
        contents, counts = self._contents, self._contents.counts[job.tier]
        sums = result if not error and len(result) == len(arrivals) else [NO_PLACE] * len(arrivals)
        counts["load_ms"] += round(1000 * (now - started_s))
        counts["load_errors"] += bool(error)
        lost: list[TierKey] = []
        for arrival, sum in zip(arrivals, sums, strict=True):
            if arrival.source is not None:
                contents.release_on_disk(arrival.source, now)
                arrival.source = None
            if arrival.is_over:
                contents.slots.give(arrival.offset)
            elif 0 <= sum <= MOST_SUM and arrival.sum in (NO_PLACE, sum):
                counts["loads"] += 1
                counts["hits"] += bool(arrival.waiters)
                counts["load_bytes"] += contents.kinds[arrival.facts.block[0]].num_bytes
                self._end(arrival)
                block = contents.arrive(arrival.facts, arrival.offset, sum, now)
                block.origin = job.tier
                block.is_shared |= job.tier == REMOTE
                for waiter, nth, _ in arrival.waiters:
                    waiter.arrived(nth, block, now)
                contents.settled(block, now)
            else:
                counts["load_misses"] += 1
                counts["corrupt"] += sum != NO_PLACE
                if not error or job.tier != DISK:
                    lost.append(arrival.facts.block)
                self._try_next(arrival, now)
        contents.lose(job.tier, lost, now)
        for arrival in arrivals:
            if not arrival.is_over and arrival.offset == NO_PLACE:
                self._route(arrival, now)

    def _try_next(self, arrival: Arrival, now: float) -> None:
        self._contents.slots.give(arrival.offset)
        arrival.offset = NO_PLACE
        arrival.tried += (arrival.tier,)
        arrival.tier = ""

    def _route(self, arrival: Arrival, now: float) -> None:
        """On to the nearest tier that may have it and has not been tried; where that is not known, look."""
        contents, block = self._contents, arrival.facts.block
        unknown: list[str] = []
        for tier in contents.config.tiers:
            if tier in arrival.tried:
                continue
            if tier == DISK:
                if contents.disk is not None and contents.disk.find(block) is not None:
                    self._queue(arrival, tier)
                    return
                continue
            if not unknown and not self._dismiss_near(arrival, now):
                return
            place = contents.remembered.find(tier, block, now)
            if place is None:
                unknown.append(tier)
            elif place != NO_PLACE and not unknown:
                self._queue(arrival, tier)
                return
        if not unknown:
            self._miss(arrival, now)
        for tier in unknown:
            self._shared_lookups.look(tier, block, self)

    def _dismiss_near(self, arrival: Arrival, now: float) -> bool:
        """Those who would have it from near tiers only get it no more. Whether it is still wanted."""
        near = [waiter for waiter in arrival.waiters if waiter[2]]
        if near:
            arrival.waiters = [waiter for waiter in arrival.waiters if not waiter[2]]
            if not arrival.waiters:
                self._end(arrival)
            for waiter, nth, _ in near:
                waiter.missed(nth, now)
        return not arrival.is_over

    def _queue(self, arrival: Arrival, tier: str) -> None:
        arrival.tier = tier
        self._line.append(arrival)

    def _start(self, arrival: Arrival, now: float) -> None:
        """It has a slot; what has been given up meanwhile goes on to the next tier."""
        contents, block = self._contents, arrival.facts.block
        place: int | None = NO_PLACE
        if arrival.tier == DISK:
            found = contents.disk.find(block) if contents.disk is not None else None
            if contents.disk is not None and found is not None:
                contents.disk.hold(found)
                arrival.source, arrival.facts, arrival.sum = found, found.facts, found.sum
                place = found.place
        else:
            arrival.sum = NO_PLACE
            place = contents.remembered.find(arrival.tier, block, now)
        if place is None or place == NO_PLACE:
            self._try_next(arrival, now)
            self._route(arrival, now)
        else:
            self._ready.setdefault(arrival.tier, []).append((arrival, place))

    def _cut(self, arrivals: list[tuple[Arrival, int]]) -> list[list[tuple[Arrival, int]]]:
        jobs: list[list[tuple[Arrival, int]]] = []
        room = 0
        for arrival in arrivals:
            size = self._contents.kinds[arrival[0].facts.block[0]].num_bytes
            if not jobs or room < size:
                jobs.append([])
                room = self._contents.config.job_bytes
            jobs[-1].append(arrival)
            room -= size
        return jobs

    def _load(self, tier: str, arrivals: list[tuple[Arrival, int]], now: float) -> None:
        blocks = tuple((arrival.facts.block, place, arrival.offset) for arrival, place in arrivals)
        number = self._outbox.ask(lambda number: LoadFrom(number, tier, blocks))
        self._loading[number] = [arrival for arrival, _ in arrivals], now

    def _miss(self, arrival: Arrival, now: float) -> None:
        self._end(arrival)
        for waiter, nth, _ in arrival.waiters:
            waiter.missed(nth, now)

    def _end(self, arrival: Arrival) -> None:
        arrival.is_over = True
        if arrival.is_ahead:
            self.ahead_bytes -= self._contents.kinds[arrival.facts.block[0]].num_bytes
        del self._coming[arrival.facts.block]
