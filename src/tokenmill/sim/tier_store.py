"""A machine's KV store over virtual tiers, and a toy worker's end of it.

The manager and the shell are the real ones; host memory is a dict of what lies at each offset. What the worker's end
does is what the real one does (`kv.transfer.client`, `kv.connector.worker.tiers`): it copies out of leased slots and
compares sums, it fills granted slots and makes them, it goes on without a store that has gone and joins the next. A
store that crashes takes its host memory with it; media live on.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

from ..core.block import BlockMove
from ..core.effects import DropBlocks, FetchBlocks, FindBlocks, NoteStepCosts, PinBlocks, PromoteBlocks, SaveBlocks
from ..core.errors import EngineFailed
from ..core.ports import Clock
from ..core.tiers import (
    NO_PLACE,
    Drop,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Granted,
    Join,
    Joined,
    Leased,
    NoteCosts,
    Pin,
    Promote,
    Store,
    Stored,
    TierEvents,
    TierKey,
    ToStore,
    WatchTiers,
    Written,
)
from ..kv.tiers.config import TierConfig
from ..kv.tiers.manager import TierManager
from ..kv.tiers.shell import TierLink, TierShell
from .store import KVJob, Pool, Slots
from .tiers import GARBAGE, NO_FAULTS, Medium, TierFaults, VirtualTier, Way

STORE_S = 300.0
"""A store that takes longer to keep blocks has not kept them."""


def sum_of(block: TierKey, content: Any) -> int:
    """The toy's `kv.transfer.checksum.block_sum`."""
    return int.from_bytes(blake2b(repr((block, content)).encode(), digest_size=8).digest()) >> 1


class ToyMachine:
    """What workers of one machine share. `is_up`: the store can be joined. num_spoilt: blocks that went wrong in a
    tier, of all its lives. faults: by tier; those that are not named have none. ways: to the media of tiers that are
    elsewhere."""

    def __init__(
        self,
        config: TierConfig,
        media: Mapping[str, Medium],
        clock: Clock,
        rng: random.Random,
        faults: Mapping[str, TierFaults] = MappingProxyType({}),
        ways: Mapping[str, Way] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.media = media
        self.is_up = False
        self._clock = clock
        self._rng = rng
        self._faults = faults
        self._ways = ways
        self._tiers: dict[str, VirtualTier] = {}
        self._past: list[VirtualTier] = []
        self.arena: dict[int, Any] = {}
        self.shell: TierShell | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_spoilt(self) -> int:
        return sum(tier.num_spoilt for tier in (*self._tiers.values(), *self._past))

    def start(self) -> None:
        self.arena = {}
        faults, ways = self._faults, self._ways
        self._tiers = {
            name: VirtualTier(medium, self.arena, self._rng, faults.get(name, NO_FAULTS), way=ways.get(name))
            for name, medium in self.media.items()
        }
        manager = TierManager(self.config)
        self.shell = TierShell(manager, self._tiers, self._clock, lambda offset, num_bytes: None)
        self._task = asyncio.get_running_loop().create_task(self.shell.run(), name="kv store")
        self.is_up = True

    def crash(self) -> None:
        """At once; whoever is connected hears the end."""
        assert self._task is not None
        self.is_up = False
        for tier in self._tiers.values():
            tier.crash()
            self._past.append(tier)
        self._tiers = {}
        self._task.cancel()

    def check(self) -> None:
        """Assert that the store lives if it should."""
        if self.is_up:
            assert self._task is not None and not self._task.done(), self._task

    def connect(self) -> TierLink | None:
        return self.shell.connect() if self.is_up and self.shell is not None else None


@dataclass(slots=True, eq=False)
class ToyTiers:
    """A worker's end. `check` as in `store.ToyStore`. spoil: share of blocks that go wrong as they are copied out of
    host memory."""

    machine: ToyMachine
    name: str
    pools: Sequence[Pool]
    block_size: int
    check: Callable[[bool, str], None]
    rng: random.Random
    spoil: float = 0.0
    num_fetched: int = 0
    num_bad: int = 0
    num_saved: int = 0
    _link: TierLink | None = None
    _reader: asyncio.Task[None] | None = None
    _heard: dict[int, asyncio.Queue[FromStore | None]] = field(default_factory=dict)
    _next_number: int = 0
    is_over: bool = False

    def leave(self) -> None:
        """The worker has gone, in the middle of whatever it did."""
        self.is_over = True
        if self._link is not None:
            self._link.close()

    async def run(self, job: KVJob) -> str:
        match job:
            case FindBlocks():
                return await self.find(job)
            case FetchBlocks():
                return await self.fetch(job)
            case SaveBlocks():
                return await self.save(job)
            case _:
                return self.tell(job)

    async def find(self, job: FindBlocks) -> str:
        with suppress(EOFError, TimeoutError):
            async with asyncio.timeout(job.within_s or None):
                number, heard = await self._ask(lambda number: Find(number, job.wanted))
                try:
                    found = await self._hear(heard)
                finally:
                    del self._heard[number]
                assert isinstance(found, Found), found
                return found.digits
        return "0" * len(job.wanted)

    async def fetch(self, job: FetchBlocks) -> str:
        taken: set[int] = set()
        for group, _, block in job.moves:
            pool = self.pools[group]
            self.check(block not in pool.moving and block not in pool.sending, f"block {block} is moved twice at once")
            pool.moving[block] = True
            slots = self._slots(block)
            pool.positions[slots] = pool.tokens[slots] = array("q", [-9]) * self.block_size
        try:
            with suppress(EOFError, TimeoutError):
                async with asyncio.timeout(job.within_s or None):
                    await self._fetch(job.moves, taken)
        finally:
            for group, _, block in job.moves:
                del self.pools[group].moving[block]
        self.num_fetched += len(taken)
        return "" if len(taken) == len(job.moves) else "".join("01"[i in taken] for i in range(len(job.moves)))

    async def _fetch(self, moves: Sequence[BlockMove], taken: set[int]) -> None:
        wanted = tuple(move[:2] for move in moves)
        number, heard = await self._ask(lambda number: Fetch(number, wanted))
        bad: list[int] = []
        arena = self.machine.arena
        try:
            while True:
                message = await self._hear(heard)
                assert isinstance(message, Leased), message
                for nth, offset, sum in message.leases:
                    await asyncio.sleep(self.rng.choice([0.0, 0.00001, 0.0005]))
                    content = GARBAGE if self.rng.random() < self.spoil else arena.get(offset, GARBAGE)
                    if sum_of(wanted[nth], content) != sum:
                        bad.append(nth)
                        continue
                    group, _, block = moves[nth]
                    slots = self._slots(block)
                    first, tokens = content
                    self.pools[group].positions[slots] = array("q", range(first, first + self.block_size))
                    self.pools[group].tokens[slots] = array("q", tokens)
                    taken.add(nth)
                if message.is_last:
                    return
        finally:
            del self._heard[number]
            self.num_bad += len(bad)
            self._tell(Fetched(number, tuple(bad)))

    async def save(self, job: SaveBlocks) -> str:
        assert len(job.facts) == len(job.moves), job
        for (group, key, _), facts in zip(job.moves, job.facts, strict=True):
            self.check(facts.block == (group, key), f"{facts} of another block than {key!r}")
        for group, _, block in job.moves:
            sending = self.pools[group].sending
            self.check(block not in self.pools[group].moving, f"block {block} is saved before it is in")
            sending[block] = sending.get(block, 0) + 1
        before = [self._content(group, block) for group, _, block in job.moves]
        try:
            async with asyncio.timeout(STORE_S):
                is_kept = await self._save(job, before)
        except (EOFError, TimeoutError) as error:
            raise EngineFailed("The store has gone.") from error
        finally:
            for group, _, block in job.moves:
                sending = self.pools[group].sending
                sending[block] -= 1
                if not sending[block]:
                    del sending[block]
        if job.is_shared and not is_kept:
            raise EngineFailed("The blocks are nowhere where others find them.")
        return ""

    async def _save(self, job: SaveBlocks, before: Sequence[Slots]) -> bool:
        number, heard = await self._ask(lambda number: Store(number, job.facts, job.is_shared))
        arena = self.machine.arena
        try:
            message = await self._hear(heard)
            if isinstance(message, Stored):
                return message.is_kept
            assert isinstance(message, Granted), message
            sums = []
            for offset, (group, key, block), content in zip(message.offsets, job.moves, before, strict=True):
                if offset == NO_PLACE:
                    sums.append(NO_PLACE)
                    continue
                await asyncio.sleep(self.rng.choice([0.0, 0.00001, 0.0005]))
                if self.is_over:
                    raise EOFError
                self.check(self._content(group, block) == content, f"block {block} was written while it was copied")
                arena[offset] = content
                sums.append(sum_of((group, key), content))
                self.num_saved += 1
            self._tell(Written(number, tuple(sums)))
            message = await self._hear(heard)
            assert isinstance(message, Stored), message
            return message.is_kept
        finally:
            del self._heard[number]

    def tell(self, job: PromoteBlocks | DropBlocks | PinBlocks | NoteStepCosts) -> str:
        match job:
            case PromoteBlocks(wanted):
                self._tell(Promote(wanted))
            case DropBlocks(wanted):
                self._tell(Drop(wanted))
            case PinBlocks(wanted, seconds, owner):
                self._tell(Pin(wanted, seconds, owner))
            case NoteStepCosts(token_s, position_s):
                self._tell(NoteCosts(token_s, position_s))
        return ""

    async def _ask(self, make: Callable[[int], ToStore]) -> tuple[int, asyncio.Queue[FromStore | None]]:
        """Raises EOFError where there is no store."""
        link = self._joined()
        number, self._next_number = self._next_number, self._next_number + 1
        heard = self._heard[number] = asyncio.Queue[FromStore | None]()
        try:
            await link.say(make(number))
        except EOFError:
            del self._heard[number]
            raise
        return number, heard

    async def _hear(self, heard: asyncio.Queue[FromStore | None]) -> FromStore:
        message = await heard.get()
        if message is None:
            raise EOFError("The KV store has gone.")
        return message

    def _tell(self, message: ToStore) -> None:
        with suppress(EOFError):
            self._say_at_once(message)

    def _say_at_once(self, message: ToStore) -> None:
        saying = self._joined().say(message)
        with suppress(StopIteration):
            saying.send(None)

    def _joined(self) -> TierLink:
        if self._link is None:
            link = None if self.is_over else self.machine.connect()
            if link is None:
                raise EOFError("There is no KV store.")
            self._link = link
            config = self.machine.config
            self._say_at_once(Join(config.numerics_id, config.block_bytes, self.name, self.name))
            self._reader = asyncio.get_running_loop().create_task(self._read(link), name=f"kv link of {self.name}")
        return self._link

    async def _read(self, link: TierLink) -> None:
        with suppress(EOFError):
            while True:
                message = await link.hear()
                if isinstance(message, Joined):
                    assert not message.error, message
                    continue
                heard = self._heard.get(getattr(message, "number", -1))
                if heard is not None:
                    heard.put_nowait(message)
        self._link = None
        for heard in self._heard.values():
            heard.put_nowait(None)

    def _slots(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _content(self, group: int, block: int) -> Slots:
        pool, slots = self.pools[group], self._slots(block)
        return pool.positions[slots][0], tuple(pool.tokens[slots])


_RETRY_S = 0.05


class TierWatch:
    """spawn: runs a task as long as the simulation."""

    def __init__(self, machine: ToyMachine, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._machine = machine
        self._spawn = spawn
        self._hear: Callable[[TierEvents], None] | None = None
        self._link: TierLink | None = None
        self._is_running = False

    def __call__(self, hear: Callable[[TierEvents], None] | None) -> None:
        """kv.events.relay.Watch"""
        self._hear = hear
        if hear is None:
            if self._link is not None:
                self._link.close()
        elif self._link is not None:
            self._spawn(self._ask(self._link), "ask for tiers")
        elif not self._is_running:
            self._is_running = True
            self._spawn(self._follow(), "watch tiers")

    async def _ask(self, link: TierLink) -> None:
        with suppress(EOFError):
            await link.say(WatchTiers(True))

    async def _follow(self) -> None:
        config = self._machine.config
        while self._hear is not None:
            self._link = self._machine.connect()
            if self._link is None:
                await asyncio.sleep(_RETRY_S)
                continue
            with suppress(EOFError):
                await self._link.say(Join(config.numerics_id, config.block_bytes))
                await self._link.say(WatchTiers(True))
                while True:
                    message = await self._link.hear()
                    if isinstance(message, TierEvents) and self._hear is not None:
                        self._hear(message)
            self._link = None
        self._is_running = False
