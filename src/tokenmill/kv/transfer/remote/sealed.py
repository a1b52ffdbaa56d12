"""Blocks, sealed, in a store that others have a hand in: what it lost, and whatever is wrong, is a miss.

    slots  <- open <-  values     threads; a chunk of a batch on each
    slots  -> seal ->  values

After a few failures in a row the store is not asked at all until it answers again, quickly (`breaker`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ....core.tiers import NO_PLACE, TierKey
from ..checksum import block_sum
from ..seal import OVERHEAD, BadSeal, Seal
from .backend import Backend
from .calls import ASK, FIRST_PAUSE_S, LOAD, SAVE, Calls, Chunk, said

_NEW = 0.2
_LEAST_BYTES = 256 * 1024

View = Callable[[int, int], memoryview]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Limits:
    """call_s   a load or save, and besides what its bytes take at `least_bytes_s`
    poll_s   between two looks at what concerns all blocks
    retry_s  before a store that was given up is tried again
    """

    call_s: float = 2.0
    least_bytes_s: float = 20e6
    poll_s: float = 5.0
    retry_s: float = FIRST_PAUSE_S

    def of(self, num_bytes: int) -> float:
        return self.call_s + num_bytes / self.least_bytes_s


class SealedStore:
    """All calls on one event loop. None raises because of the store.

    name_of      (block, epoch) -> its name there
    seal         what opens and closes values; its epoch is that of all names
    block_bytes  of each KV group
    view         (offset, bytes) of host memory
    enter        what is to be done in so many seconds before the store is used, also after it was away; raises OSError,
                 EOFError
    may_write    whether values may be written and deleted
    """

    def __init__(
        self,
        backend: Backend,
        name_of: Callable[[TierKey, int], str],
        seal: Seal,
        block_bytes: Sequence[int],
        view: View,
        limits: Limits,
        enter: Callable[[float], Awaitable[None]],
        may_write: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._name_of = name_of
        self._seal = seal
        self._block_bytes = tuple(block_bytes)
        self._view = view
        self._limits = limits
        self._enter = enter
        self._may_write = may_write
        self.calls = Calls(backend.name, backend.num_threads, self._return, limits.retry_s)
        self.rate = Rate()
        self._counts = self.calls.counts
        self._opened = asyncio.Event()

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def is_down(self) -> bool:
        return self.calls.breaker.is_open or not self._opened.is_set()

    def stat(self) -> dict[str, float]:
        """Counters of all outcomes, and the state."""
        return {
            **self._counts,
            "is_down": self.is_down,
            "num_given_up": self.calls.breaker.num_opened,
            "latency_s": self.rate.latency_s,
            "bytes_s": self.rate.bytes_s,
        }

    async def open(self) -> None:
        """A store that does not answer is tried again later."""
        self.calls.open()
        try:
            await self._enter(self._limits.call_s)
        except (OSError, EOFError) as error:
            self.calls.breaker.trip(said(error))
        self._opened.set()

    async def close(self) -> None:
        await self.calls.close()
        self._backend.close()

    async def look(self, wanted: Sequence[TierKey]) -> list[bool]:
        self._counts["looks"] += 1
        if not self._opened.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), self._backend.look_s)
        if self.is_down:
            self._counts["looks_skipped"] += 1
            return [False] * len(wanted)
        names, limit_s = self._names(wanted), self._backend.look_s
        runs = list(self._runs(wanted))
        calls = [partial(self._backend.has, [names[nth] for nth in run], limit_s) for run in runs]
        began_s = time.monotonic()
        found = await self.calls.all(ASK, calls, limit_s)
        if any(part is None for part in found):
            self._counts["looks_failed"] += 1
        else:
            self.rate.note_latency(time.monotonic() - began_s)
        places = [False] * len(wanted)
        for run, part in zip(runs, found, strict=True):
            for nth, is_there in zip(run, part or [False] * len(run), strict=True):
                places[nth] = is_there
        self._counts["blocks_found"] += sum(places)
        self._counts["blocks_not_found"] += len(places) - sum(places)
        return places

    async def load(self, blocks: Sequence[tuple[TierKey, int]]) -> list[int]:
        """Fill the slots at these offsets: the checksums, NO_PLACE for what is not to be had."""
        sums = [NO_PLACE] * len(blocks)
        if self.is_down:
            self._counts["loads_skipped"] += len(blocks)
            return sums
        runs = list(self._cut([(nth, *each) for nth, each in enumerate(blocks)], [block for block, _ in blocks]))
        num_bytes = self._bytes_of(block for block, _ in blocks)
        limit_s = self._limits.of(num_bytes)
        chunks = [Chunk() for _ in runs]
        calls = [partial(self._load, run, chunk, limit_s) for run, chunk in zip(runs, chunks, strict=True)]
        began_s = time.monotonic()
        for run, done in zip(runs, await self.calls.all(LOAD, calls, limit_s, chunks), strict=True):
            if done is None:
                self._counts["loads_failed"] += len(run)
                continue
            there, outcomes = done
            self._counts.update(outcomes)
            for nth, value in there.items():
                sums[nth] = value
        num_loaded = self._bytes_of(blocks[nth][0] for nth, value in enumerate(sums) if value != NO_PLACE)
        self._counts["bytes_loaded"] += num_loaded
        if num_loaded == num_bytes:
            self.rate.note_bytes(num_bytes, time.monotonic() - began_s)
        return sums

    async def save(self, blocks: Sequence[tuple[TierKey, int, int]]) -> list[bool]:
        """Which are kept of what is in the slots at these offsets, with these checksums."""
        kept = [False] * len(blocks)
        if self.is_down or not self._may_write():
            self._counts["saves_skipped"] += len(blocks)
            return kept
        runs = list(self._cut([(nth, *each) for nth, each in enumerate(blocks)], [block for block, _, _ in blocks]))
        limit_s = self._limits.of(self._bytes_of(block for block, _, _ in blocks))
        chunks = [Chunk() for _ in runs]
        calls = [partial(self._save, run, chunk, limit_s) for run, chunk in zip(runs, chunks, strict=True)]
        for run, taken in zip(runs, await self.calls.all(SAVE, calls, limit_s, chunks), strict=True):
            if taken is None:
                self._counts["saves_failed"] += len(run)
                continue
            for (nth, block, _, _), outcome in zip(run, taken, strict=True):
                kept[nth] = outcome == "blocks_saved"
                self._counts[outcome] += 1
                self._counts["bytes_saved"] += kept[nth] * self._block_bytes[block[0]]
        return kept

    async def drop(self, blocks: Sequence[TierKey]) -> None:
        if self.is_down or not self._may_write():
            return
        self._counts["blocks_dropped"] += len(blocks)
        limit_s = self._limits.call_s
        await self.calls.all(ASK, [partial(self._backend.delete, self._names(blocks), limit_s)], limit_s)

    # ---- on threads ----

    def _load(
        self, run: Sequence[tuple[int, TierKey, int]], chunk: Chunk, limit_s: float
    ) -> tuple[dict[int, int], Counter[str]]:
        """The checksums of what was loaded, by place, and how each block went."""
        names = self._names([block for _, block, _ in run])
        sums: dict[int, int] = {}
        bad: dict[int, str] = {}

        def take(at: int, value: memoryview) -> None:
            nth, block, offset = run[at]
            if nth in sums or at in bad:
                return
            with chunk.lock:
                chunk.check()
                try:
                    sums[nth] = self._seal.open(block, value, self._view(offset, self._block_bytes[block[0]]))
                except BadSeal as error:
                    bad[at] = str(error)

        most_bytes = max(self._block_bytes[block[0]] for _, block, _ in run) + OVERHEAD
        self._backend.get(names, most_bytes, take, limit_s)
        if bad and self._may_write():
            with suppress(OSError, EOFError):
                self._backend.delete([names[at] for at in bad], self._backend.look_s)
        outcomes = Counter({"blocks_loaded": len(sums), "blocks_missing": len(run) - len(sums) - len(bad)})
        return sums, outcomes + Counter(f"blocks_{why}" for why in bad.values())

    def _save(self, run: Sequence[tuple[int, TierKey, int, int]], chunk: Chunk, limit_s: float) -> list[str]:
        """How each block went. What is not as it was computed does not leave this machine."""
        values: dict[int, tuple[str, bytearray]] = {}
        names = self._names([block for _, block, _, _ in run])
        for at, (_, block, offset, value) in enumerate(run):
            num_bytes = self._block_bytes[block[0]]
            sealed = bytearray(num_bytes + OVERHEAD)
            with chunk.lock:
                chunk.check()
                data = self._view(offset, num_bytes)
                if block_sum(block, data) == value:
                    self._seal.seal(block, value, data, sealed)
                    values[at] = names[at], sealed
        outcomes = ["saves_corrupt"] * len(run)
        taken = self._backend.put(list(values.values()), limit_s) if self._may_write() else [False] * len(values)
        for at, is_taken in zip(values, taken, strict=True):
            outcomes[at] = "blocks_saved" if is_taken else "saves_refused"
        return outcomes

    # ----

    async def _return(self) -> None:
        """It is used again once it is quick enough."""
        async with asyncio.timeout(2 * self._backend.look_s):
            await self._enter(self._backend.look_s)

    def _names(self, blocks: Iterable[TierKey]) -> list[str]:
        epoch = self._seal.epoch
        return [self._name_of(block, epoch) for block in blocks]

    def _bytes_of(self, blocks: Iterable[TierKey]) -> int:
        return sum(self._block_bytes[group] for group, _ in blocks)

    def _runs(self, wanted: Sequence[TierKey]) -> Iterator[list[int]]:
        """Places of what is asked for in one call, each of one KV group."""
        most = self._backend.look_names
        for group in range(len(self._block_bytes)):
            places = [nth for nth, block in enumerate(wanted) if block[0] == group]
            yield from (places[at : at + most] for at in range(0, len(places), most))

    def _cut(self, items: Iterable[_Item], blocks: Iterable[TierKey]) -> Iterator[list[_Item]]:
        """Runs of at most the backend's batch_bytes, of one item at least."""
        run: list[_Item] = []
        room = 0
        for item, (group, _) in zip(items, blocks, strict=True):
            if run and room < self._block_bytes[group]:
                yield run
                run = []
            if not run:
                room = self._backend.batch_bytes
            run.append(item)
            room -= self._block_bytes[group]
        if run:
            yield run


class Rate:
    """What loading from a tier takes, as measured: what engines decide by whether they fetch or compute. Averages in
    which what is new counts a fifth.

    latency_s  that a call takes as such; 0: not measured yet
    bytes_s    after that
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.bytes_s = 0.0

    def note_latency(self, seconds: float) -> None:
        self.latency_s = _mix(self.latency_s, seconds)

    def note_bytes(self, num_bytes: int, seconds: float) -> None:
        """Note a load; small ones count for the latency alone."""
        if num_bytes >= _LEAST_BYTES:
            self.bytes_s = _mix(self.bytes_s, num_bytes / max(seconds - self.latency_s, 1e-6, 0.1 * seconds))


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _NEW) * old + _NEW * new
