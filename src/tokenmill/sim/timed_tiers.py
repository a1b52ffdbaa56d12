"""A worker's end of a simulated KV store where only time counts: blocks have no content, and copies between host memory
and pools take their bytes, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from ..core.effects import FetchBlocks, FindBlocks, Job, NoteStepCosts, PinBlocks, PromoteBlocks, SaveBlocks
from ..core.errors import EngineFailed
from ..core.tiers import (
    NO_PLACE,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Granted,
    Join,
    Leased,
    NoteCosts,
    Pin,
    Promote,
    Store,
    Stored,
    ToStore,
    Written,
)
from ..kv.tiers.shell import TierLink
from .tier_store import ToyMachine
from .tiers import GARBAGE, Way


class TimedTiers:
    """copy_bytes_s: of copies between host memory and the worker's pools. way: of these copies, where they share links
    with others. num_fetched, num_bad: blocks that came from the store, whole and with other bytes than it had."""

    def __init__(self, machine: ToyMachine, name: str, copy_bytes_s: float, way: Way | None = None) -> None:
        self.num_fetched = 0
        self.num_bad = 0
        self._machine = machine
        self._name = name
        self._byte_s = 1 / copy_bytes_s
        self._way = way
        self._free_s = 0.0
        self._link: TierLink | None = None
        self._heard: dict[int, asyncio.Queue[FromStore]] = {}
        self._next_number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, job: Job) -> str:
        match job:
            case FindBlocks(wanted=wanted):
                number, heard = await self._ask(lambda number: Find(number, wanted))
                found = await heard.get()
                del self._heard[number]
                assert isinstance(found, Found), found
                return found.digits
            case FetchBlocks():
                return await self._fetch(job)
            case SaveBlocks():
                return await self._save(job)
            case PromoteBlocks(wanted):
                await self._joined().say(Promote(wanted))
            case PinBlocks(wanted, seconds, owner):
                await self._joined().say(Pin(wanted, seconds, owner))
            case NoteStepCosts(token_s, position_s):
                await self._joined().say(NoteCosts(token_s, position_s))
        return ""

    def leave(self) -> None:
        """The worker has gone, in the middle of whatever it did."""
        if self._link is not None:
            self._link.close()

    async def _fetch(self, job: FetchBlocks) -> str:
        wanted = tuple(move[:2] for move in job.moves)
        number, heard = await self._ask(lambda number: Fetch(number, wanted))
        taken: set[int] = set()
        bad: set[int] = set()
        while True:
            message = await heard.get()
            assert isinstance(message, Leased), message
            await self._copy(sum(self._size(wanted[lease.nth][0]) for lease in message.leases), is_save=False)
            arena = self._machine.arena
            bad |= {lease.nth for lease in message.leases if arena.get(lease.offset) is GARBAGE}
            taken |= {lease.nth for lease in message.leases} - bad
            if message.is_last:
                break
        del self._heard[number]
        await self._joined().say(Fetched(number, tuple(sorted(bad))))
        self.num_fetched += len(taken)
        self.num_bad += len(bad)
        return "" if len(taken) == len(wanted) else "".join("01"[nth in taken] for nth in range(len(wanted)))

    async def _save(self, job: SaveBlocks) -> str:
        number, heard = await self._ask(lambda number: Store(number, job.facts, job.is_shared))
        message = await heard.get()
        if isinstance(message, Granted):
            granted = [
                (facts.block[0], offset)
                for facts, offset in zip(job.facts, message.offsets, strict=True)
                if offset != NO_PLACE
            ]
            await self._copy(sum(self._size(group) for group, _ in granted), is_save=True)
            for _, offset in granted:
                self._machine.arena[offset] = ()
            sums = tuple(NO_PLACE if offset == NO_PLACE else 1 for offset in message.offsets)
            await self._joined().say(Written(number, sums))
            while not isinstance(message, Stored):
                message = await heard.get()
        del self._heard[number]
        assert isinstance(message, Stored), message
        if job.is_shared and not message.is_kept:
            raise EngineFailed("The blocks are nowhere where others find them.")
        return ""

    def _size(self, group: int) -> int:
        return self._machine.config.block_bytes[group]

    async def _copy(self, num_bytes: int, *, is_save: bool) -> None:
        if self._way is not None:
            await self._way(num_bytes, is_save)
            return
        now = asyncio.get_running_loop().time()
        self._free_s = max(now, self._free_s) + num_bytes * self._byte_s
        await asyncio.sleep(self._free_s - now)

    async def _ask(self, make: Callable[[int], ToStore]) -> tuple[int, asyncio.Queue[FromStore]]:
        number, self._next_number = self._next_number, self._next_number + 1
        heard = self._heard[number] = asyncio.Queue[FromStore]()
        await self._joined().say(make(number))
        return number, heard

    def _joined(self) -> TierLink:
        if self._link is None:
            link = self._machine.connect()
            assert link is not None, "its store lives as long as the run"
            self._link = link
            task = asyncio.get_running_loop().create_task(self._read(link), name=f"kv link of {self._name}")
            self._tasks.add(task)
            config = self._machine.config
            saying = link.say(Join(config.numerics_id, config.block_bytes, self._name, self._name))
            with suppress(StopIteration):
                saying.send(None)
        return self._link

    async def _read(self, link: TierLink) -> None:
        with suppress(EOFError):
            while True:
                message = await link.hear()
                heard = self._heard.get(getattr(message, "number", -1))
                if heard is not None:
                    heard.put_nowait(message)
