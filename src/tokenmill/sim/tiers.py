"""Virtual tiers: where a simulated KV store keeps blocks below host memory, slow and unreliable by seed.

    arena of one KV store  <->  VirtualTier  <->  Medium, which outlives the store and may have several

An arena is a dict: what lies at an offset, whatever that is. A slot that is being filled holds garbage until its bytes
are in, and one that is written while it is saved is found out. All that goes to or from a medium shares one link: jobs
queue, each takes its latency and then its bytes' time. A device with a queue of a certain depth has no more than so
many blocks under way at once, each for its latency; what comes over a network takes the time of its way as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from ..core.tiers import NO_PLACE, BlockFacts, DropFrom, LoadFrom, LookIn, SaveTo, TierEntry, TierKey

GARBAGE: Any = (-9, ())


class Pace(NamedTuple):
    """latency_s of each job, and bytes_s of the link after it; `slow_rate` of all jobs take `slow_s` more.
    write_bytes_s: where writing is not as fast as reading; queue_depth: most blocks under way at once, each for
    latency_s; 0: any number."""

    latency_s: float = 0.0001
    bytes_s: float = 1e9
    slow_rate: float = 0.0
    slow_s: float = 1.0
    write_bytes_s: float = 0.0
    queue_depth: int = 0


USUAL = Pace()


class TierFaults(NamedTuple):
    """Shares, of jobs or of blocks.

    fail     jobs that fail for all their blocks
    refuse   blocks that are not saved
    lose     blocks that are gone when they are wanted
    spoil    blocks whose bytes are others when they are loaded, under the checksum they were saved with
    swap     blocks in whose place another's bytes and checksum are loaded
    """

    fail: float = 0.0
    refuse: float = 0.0
    lose: float = 0.0
    spoil: float = 0.0
    swap: float = 0.0


NO_FAULTS = TierFaults()

Way = Callable[[int, bool], Awaitable[None]]
"""Takes so many bytes over a network, to the medium (True) or from it."""


class Kept(NamedTuple):
    facts: BlockFacts
    content: Any
    sum: int


@dataclass(eq=False, slots=True)
class Medium:
    """What holds the blocks of a tier: it survives whoever uses it. `is_shared`: others write to it, so that nobody is
    told what it has kept, and all look; else its blocks are one store's. num_bytes: room, block_bytes: of each KV
    group; what has no room is not kept. slowness: how many times as long as its pace all takes now; spoil: share of the
    blocks that are loaded now whose bytes are others."""

    num_bytes: int
    block_bytes: Sequence[int]
    is_shared: bool = False
    pace: Pace = USUAL
    kept: dict[int, Kept] = field(default_factory=dict)
    used_bytes: int = 0
    _places: dict[TierKey, int] = field(default_factory=dict)
    _next_place: int = 0
    slowness: float = 1.0
    spoil: float = 0.0
    _free_s: float = 0.0
    _under_way: list[float] = field(default_factory=list)

    def place_of(self, block: TierKey) -> int:
        return self._places.get(block, NO_PLACE)

    def put(self, facts: BlockFacts, content: Any, sum: int) -> int:
        """Its place; the same bytes may be put again, and then are there once."""
        known = self.place_of(facts.block)
        if known != NO_PLACE:
            if not self.is_shared:
                self.kept[known] = Kept(facts, content, sum)
            return known
        size = self.block_bytes[facts.block[0]]
        if self.used_bytes + size > self.num_bytes:
            return NO_PLACE
        place, self._next_place = self._next_place, self._next_place + 1
        self.kept[place], self._places[facts.block] = Kept(facts, content, sum), place
        self.used_bytes += size
        return place

    def drop(self, block: TierKey, place: int) -> None:
        if self._places.get(block) == place:
            del self._places[block], self.kept[place]
            self.used_bytes -= self.block_bytes[block[0]]

    def clear(self) -> None:
        for place, kept in list(self.kept.items()):
            self.drop(kept.facts.block, place)

    def reserve_s(
        self, now: float, num_bytes: int, rng: random.Random, *, num_blocks: int = 1, is_write: bool = False
    ) -> float:
        """Seconds until so many bytes have gone over the link, those before them included."""
        pace = self.pace
        byte_s = self.slowness / (pace.write_bytes_s if is_write and pace.write_bytes_s else pace.bytes_s)
        slow_s = pace.slow_s if rng.random() < pace.slow_rate else 0.0
        if not pace.queue_depth:
            self._free_s = max(now, self._free_s) + num_bytes * byte_s
            return self._free_s - now + pace.latency_s * self.slowness + slow_s
        end_s = now
        for _ in range(max(1, num_blocks)):
            begin_s = heappop(self._under_way) if len(self._under_way) >= pace.queue_depth else now
            self._free_s = max(begin_s, now, self._free_s) + num_bytes * byte_s / max(1, num_blocks)
            end_s = self._free_s + pace.latency_s * self.slowness
            heappush(self._under_way, end_s)
        return end_s - now + slow_s


class VirtualTier:
    """A core.tiers.Tier between an arena and a medium. `spoilt`: what becomes of bytes that go wrong; `way`:
    between the arena's host and a medium elsewhere. After `crash` every call fails, those under way included, and their
    blocks are kept or not as it happens; a new tier on the same medium is what a restart opens."""

    def __init__(
        self,
        medium: Medium,
        arena: MutableMapping[int, Any],
        rng: random.Random,
        faults: TierFaults = NO_FAULTS,
        spoilt: Callable[[Any, random.Random], Any] = lambda content, rng: GARBAGE,
        way: Way | None = None,
    ) -> None:
        self.medium = medium
        self.faults = faults
        self.num_spoilt = 0
        self.num_lost = 0
        self._arena = arena
        self._rng = rng
        self._spoilt = spoilt
        self._way = way
        self._is_over = False
        self._saving: dict[int, SaveTo] = {}
        self._num_saves = 0

    async def open(self) -> Sequence[TierEntry]:
        await self._take_time(0)
        if self.medium.is_shared:
            return ()
        return [TierEntry(kept.facts, place, kept.sum) for place, kept in self.medium.kept.items()]

    async def look(self, job: LookIn) -> Sequence[int]:
        await self._take_time(0)
        self._maybe_fail()
        return [self.medium.place_of(block) for block in job.wanted]

    async def load(self, job: LoadFrom) -> Sequence[int]:
        for _, _, offset in job.blocks:
            self._arena[offset] = GARBAGE
        sizes = [self.medium.block_bytes[block[0]] for block, _, _ in job.blocks]
        await self._take_time(sum(sizes), len(sizes))
        self._maybe_fail()
        return [self._load(block, place, offset) for block, place, offset in job.blocks]

    async def save(self, job: SaveTo) -> Sequence[int]:
        contents = [self._arena[offset] for _, offset, _ in job.blocks]
        number, self._num_saves = self._num_saves, self._num_saves + 1
        self._saving[number] = job
        try:
            sizes = [self.medium.block_bytes[facts.block[0]] for facts, _, _ in job.blocks]
            await self._take_time(sum(sizes), len(sizes), is_write=True)
            for content, (facts, offset, _) in zip(contents, job.blocks, strict=True):
                assert self._arena.get(offset) == content, f"slot {offset} of {facts} was written while it was saved"
        finally:
            self._saving.pop(number, None)
        self._maybe_fail()
        return [
            NO_PLACE if self._is_hit(self.faults.refuse) else self.medium.put(facts, content, sum)
            for content, (facts, _, sum) in zip(contents, job.blocks, strict=True)
        ]

    async def drop(self, job: DropFrom) -> None:
        await self._take_time(0)
        self._maybe_fail()
        for block, place in job.blocks:
            self.medium.drop(block, place)

    async def close(self) -> None:
        self._is_over = True

    def crash(self) -> None:
        """At once, in the middle of whatever is under way."""
        self._is_over = True
        for job in self._saving.values():
            for facts, offset, sum in job.blocks:
                if self._is_hit(0.5):
                    self.medium.put(facts, self._arena[offset], sum)
        self._saving.clear()

    def _load(self, block: TierKey, place: int, offset: int) -> int:
        medium, faults = self.medium, self.faults
        kept = medium.kept.get(place)
        if kept is None or kept.facts.block != block or self._is_hit(faults.lose):
            self.num_lost += 1
            return NO_PLACE
        content = kept.content
        if self._is_hit(max(faults.spoil, medium.spoil)):
            self.num_spoilt += 1
            content = self._spoilt(content, self._rng)
        elif len(medium.kept) > 1 and self._is_hit(faults.swap):
            others = [other for other in medium.kept if other != place]
            self.num_spoilt += 1
            kept = medium.kept[self._rng.choice(others)]
            content = kept.content
        self._arena[offset] = content
        return kept.sum

    async def _take_time(self, num_bytes: int, num_blocks: int = 1, *, is_write: bool = False) -> None:
        self._stop_if_over()
        if self._way is not None and num_bytes and is_write:
            await self._way(num_bytes, True)
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self.medium.reserve_s(now, num_bytes, self._rng, num_blocks=num_blocks, is_write=is_write))
        if self._way is not None and num_bytes and not is_write:
            await self._way(num_bytes, False)
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if self._is_over:
            raise OSError("the tier has gone")

    def _maybe_fail(self) -> None:
        if self._is_hit(self.faults.fail):
            raise OSError("the tier does not answer")

    def _is_hit(self, rate: float) -> bool:
        return rate > 0 and self._rng.random() < rate
