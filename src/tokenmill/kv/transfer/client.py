"""A worker's side of a KV store: questions over its socket, bytes through the memory that both map.

Without a store a worker goes on: when the store has gone, or does not answer, every call raises OSError at once, and
the client joins again in the background as soon as it is back. What a call had been promised by a store that died
meanwhile is void: a checksum tells.

    find    which tier has each block
    fetch   slots that hold blocks, as they come in -> `take` copies them out
    store   slots for blocks -> `fill` copies them in
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from ...core.errors import ConfigError
from ...core.kv_events import CLEARED
from ...core.tiers import (
    NO_PLACE,
    BlockFacts,
    Drop,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Granted,
    Inquire,
    Join,
    Lease,
    Leased,
    NoteCosts,
    Pin,
    Promote,
    Store,
    Stored,
    TierEvent,
    TierEvents,
    TierFacts,
    TierKey,
    Told,
    ToStore,
    WatchTiers,
    Written,
)
from .connection import PATIENCE_S, Connection, shake_hands

log = logging.getLogger(__name__)

PART_BYTES = 1 << 25
"""Asked for at once, so that a store with little host memory can go on with the next part while one is copied."""

AHEAD = 2
"""Parts that a store works on for one call."""

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
FETCH_S = 30.0
"""What a store may take for the next blocks of a Fetch; then those that are left are missing."""

GRANTED_S = 10.0
STORED_S = 60.0
TOLD_S = 600.0

Take = Callable[[Sequence[Lease]], Awaitable[Sequence[int]]]
Fill = Callable[[Sequence[tuple[int, int]]], Awaitable[Sequence[int]]]
T = TypeVar("T", bound=FromStore)


class StoreClient:
    """Made by `connect`. num_rejoined  how often the store has been joined again
    when_rejoined  called each time
    """

    def __init__(self, path: str, join: Join) -> None:
        self._path = path
        self._join = join
        self._connection: Connection | None = None
        self._hear: Callable[[TierEvents], None] | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._costs: NoteCosts | None = None
        self._is_closed = False
        self.tiers: tuple[TierFacts, ...] = ()
        self.num_rejoined = 0
        self.when_rejoined: Callable[[], None] = lambda: None

    @classmethod
    async def connect(
        cls, path: str, numerics_id: str = "", block_bytes: Sequence[int] = (), name: str = "", incarnation: str = ""
    ) -> Self:
        """Join the store at `path`; without a numerics id only to ask. Raises OSError where none answers there, and
        ConfigError where it refuses."""
        client = cls(path, Join(numerics_id, tuple(block_bytes), name, incarnation))
        await client._join_store()
        return client

    @property
    def is_there(self) -> bool:
        return self._connection is not None and not self._connection.is_over

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """A slot's bytes. Only within `take` and `fill`."""
        assert self._connection is not None, "no store has been joined"
        return self._connection.arena.view(offset, num_bytes)

    async def find(self, wanted: Sequence[TierKey]) -> str:
        """A digit for each block (see core.tiers.TIERS)."""
        connection = self._there()
        with connection.asking() as number:
            connection.say(Find(number, tuple(wanted)))
            try:
                return _expect(Found, await connection.hear(number, 2 * PATIENCE_S)).digits
            except TimeoutError as error:
                raise OSError("The KV store takes too long to find blocks.") from error

    async def fetch(self, wanted: Sequence[TierKey], take: Take) -> set[int]:
        """The places in `wanted` of the blocks that were taken and are sound. `take` is given leases as they come,
        their `nth` in `wanted`, and returns the places of blocks whose checksum is wrong; it returns, or raises, only
        when it uses their slots no more. Where the store goes meanwhile, the result is what had been taken."""
        connection, taken, ahead = self._there(), set[int](), deque[_Part]()
        parts = iter(self._parts([group for group, _ in wanted]))
        with connection.busy(), contextlib.suppress(ConnectionError):
            try:
                while True:
                    while len(ahead) < AHEAD and (part := next(parts, None)) is not None:
                        ahead.append(_Part(connection, part[0], wanted[part[0] : part[1]]))
                    if not ahead:
                        break
                    await ahead[0].take(take, taken)
                    ahead.popleft().end()
            finally:
                for each in ahead:
                    each.end()
        return taken

    async def store(self, facts: Sequence[BlockFacts], fill: Fill, is_shared: bool = False) -> bool:
        """Whether the store keeps all of these blocks, where others share them if that is asked for. `fill` is given
        (place in `facts`, offset of its slot) of those that are wanted and returns their checksums in that order; it
        returns, or raises, only when it writes no more."""
        connection, is_kept = self._there(), True
        for begin, end in self._parts([each.block[0] for each in facts]):
            is_kept &= await self._store_part(connection, begin, facts[begin:end], fill, is_shared)
        return is_kept

    async def _store_part(
        self, connection: Connection, begin: int, facts: Sequence[BlockFacts], fill: Fill, is_shared: bool
    ) -> bool:
        with connection.busy(), connection.asking() as number:
            connection.say(Store(number, tuple(facts), is_shared))
            try:
                answer = await connection.hear(number, GRANTED_S)
                if isinstance(answer, Stored):
                    return answer.is_kept
                offsets = _expect(Granted, answer).offsets
                sums = [NO_PLACE] * len(facts)
                try:
                    granted = [nth for nth, offset in enumerate(offsets) if offset != NO_PLACE]
                    if granted:
                        filled = await fill([(begin + nth, offsets[nth]) for nth in granted])
                        for nth, each in zip(granted, filled, strict=True):
                            sums[nth] = each
                finally:
                    connection.say(Written(number, tuple(sums)))
                return _expect(Stored, await connection.hear(number, STORED_S)).is_kept
            except TimeoutError:
                return False

    def promote(self, wanted: Sequence[TierKey]) -> None:
        self._tell(Promote(tuple(wanted)))

    def drop(self, wanted: Sequence[TierKey]) -> None:
        self._tell(Drop(tuple(wanted)))

    def pin(self, wanted: Sequence[TierKey], seconds: float, owner: str = "") -> None:
        self._tell(Pin(tuple(wanted), seconds, owner))

    def note_costs(self, token_s: float, position_s: float) -> None:
        """Also told to a store that is joined later."""
        self._costs = NoteCosts(token_s, position_s)
        if self.is_there:
            self._tell(self._costs)

    async def inquire(self, what: str, argument: str = "") -> str:
        """Raises ConfigError where it cannot be done."""
        connection = self._there()
        with connection.asking() as number:
            connection.say(Inquire(number, what, argument))
            try:
                told = _expect(Told, await connection.hear(number, TOLD_S))
            except TimeoutError as error:
                raise OSError(f"The KV store takes too long for {what}.") from error
        if told.error:
            raise ConfigError(told.error)
        return told.answer

    def watch(self, hear: Callable[[TierEvents], None] | None) -> None:
        """Have `hear` told what is stored and removed, at first all that there is; None: nobody is told any more. Where
        the store goes, it hears that all is cleared; where it is back, all that there is."""
        self._hear = hear
        if self.is_there:
            self._tell(WatchTiers(hear is not None))

    async def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Nothing may be asked any more."""
        self._is_closed = True
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self._connection is not None:
            self._connection.end("The KV store has been left.")

    def _tell(self, message: ToStore) -> None:
        self._there().say(message)

    def _there(self) -> Connection:
        if self._connection is None or self._connection.is_over:
            raise ConnectionError("The KV store is not there.")
        return self._connection

    async def _join_store(self) -> None:
        loop = asyncio.get_running_loop()
        end, joined, arena = await loop.run_in_executor(None, shake_hands, self._path, self._join)
        streams = await asyncio.open_unix_connection(sock=end)
        self.tiers = joined.tiers
        self._connection = Connection(arena, streams, self._heard, self._lost)
        if self._is_closed:
            self._connection.end("The KV store has been left.")
            return
        if self._costs is not None:
            self._tell(self._costs)
        if self._hear is not None:
            self._tell(WatchTiers(True))

    def _heard(self, events: TierEvents) -> None:
        if self._hear is not None:
            self._hear(events)

    def _lost(self) -> None:
        self._heard(TierEvents(0, (TierEvent(CLEARED),)))
        if not self._is_closed:
            log.warning("The KV store at %s has gone; what it held is computed until it is back.", self._path)
            self._rejoining = asyncio.get_running_loop().create_task(self._rejoin(), name="kv-store-rejoin")

    async def _rejoin(self) -> None:
        retry_s, told = FIRST_RETRY_S, ""
        while True:
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)
            try:
                await self._join_store()
            except OSError:
                continue
            except ConfigError as error:
                if error.message != told:
                    log.error("The KV store at %s is back, but refuses: %s", self._path, error.message)
                told = error.message
            else:
                break
        self.num_rejoined += 1
        log.warning("The KV store at %s is back.", self._path)
        self.when_rejoined()

    def _parts(self, groups: Sequence[int]) -> list[tuple[int, int]]:
        """Begin and end of runs of at most PART_BYTES, or one block."""
        parts: list[tuple[int, int]] = []
        begin = num_bytes = 0
        for nth, group in enumerate(groups):
            size = self._join.block_bytes[group] if group < len(self._join.block_bytes) else 0
            if num_bytes + size > PART_BYTES and nth > begin:
                parts.append((begin, nth))
                begin, num_bytes = nth, 0
            num_bytes += size
        return [*parts, (begin, len(groups))] if groups else []


class _Part:
    """One Fetch, said when it is made. begin: place of its first block in the call."""

    def __init__(self, connection: Connection, begin: int, wanted: Sequence[TierKey]) -> None:
        self._connection = connection
        self._begin = begin
        self._number = connection.open()
        self._bad: list[int] = []
        connection.say(Fetch(self._number, tuple(wanted)))

    async def take(self, take: Take, taken: set[int]) -> None:
        is_last = False
        while not is_last:
            try:
                answer: FromStore | None = await self._connection.hear(self._number, FETCH_S)
            except TimeoutError:
                return
            leases: list[Lease] = []
            while answer is not None:
                leased = _expect(Leased, answer)
                leases += [lease._replace(nth=lease.nth + self._begin) for lease in leased.leases]
                is_last = leased.is_last
                answer = self._connection.poll(self._number)
            if leases:
                bad = set(await take(leases))
                taken.update(lease.nth for lease in leases if lease.nth not in bad)
                self._bad += sorted(nth - self._begin for nth in bad)

    def end(self) -> None:
        self._connection.close(self._number)
        with contextlib.suppress(OSError):
            self._connection.say(Fetched(self._number, tuple(self._bad)))


def _expect(kind: type[T], answer: FromStore) -> T:
    if not isinstance(answer, kind):
        raise ConnectionError(f"The KV store answers with {type(answer).__name__} instead of {kind.__name__}.")
    return answer
