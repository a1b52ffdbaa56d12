"""The disk tier: KV blocks in a folder of extents that outlives the process.

One thread writes, a few read; the index that says which block is where is the caller's, rebuilt from the extents when
the tier is opened. What is known here of a slot is the key of its block and the checksum, so that a place that holds
another block by now is a miss. The checksum is compared by whoever takes the block (see `core.tiers`); here blocks are
only read for that by `verify`. Nothing is synced before a call returns: what was saved outlives the process however it
ends, and but the last of it a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from ....core.mac import derive
from ....core.tiers import DISK, NO_PLACE, DropFrom, LoadFrom, LookIn, SaveTo, TierEntry, TierFacts, TierKey
from ..checksum import block_sum
from ..seal import OVERHEAD, Seal
from .extent import ENTRY_BYTES, EntryCodec, Extent
from .folder import claim, open_extents
from .io import DiskSlots, View
from .space import DiskSpace, place_of
from .whole import convert
from .write import DiskCounts, DiskWriter, RateLimitedWarnings

T = TypeVar("T")
P = ParamSpec("P")
_PIECE_BYTES = 4 << 20
_PROBE_BYTES = 32 << 20
_MOST_WAITING_BYTES = 1 << 30
_STUCK_S = 20.0
_USUAL_SPEED = (0.0005, 1e9)
_SCRUB_PAUSE_S = 3600.0
_NICE = 5
_IN_USE_S, _IN_USE_FACTOR = 10.0, 8


class DiskTier:
    """path: the folder, which this process then has alone. block_bytes: of each KV group. num_bytes: what the extents
    there may take together, those of other models too. view: to host memory, for slots of multiples of 4096 bytes.
    key: seals blocks and what is said of them, None: neither. spare_bytes: what the file system is to keep free for
    others. scrub_bytes_s: how fast blocks are verified all the time, 0: not at all. Raises ConfigError where the key
    cannot be used."""

    def __init__(
        self,
        path: Path,
        numerics_id: str,
        block_bytes: Sequence[int],
        num_bytes: int,
        view: View,
        key: bytes | None = None,
        num_threads: int = 6,
        spare_bytes: int = 0,
        scrub_bytes_s: float = 0.0,
    ) -> None:
        seal = None if key is None else Seal(key, "disk", numerics_id)
        codec = EntryCodec(b"" if key is None else derive(key, b"disk entries", numerics_id.encode()))
        overhead = 0 if seal is None else OVERHEAD
        self.counts = DiskCounts()
        self._warnings = RateLimitedWarnings(path)
        self._space = DiskSpace(path, numerics_id, tuple(block_bytes), num_bytes, codec, overhead, spare_bytes)
        self._slots = DiskSlots(block_bytes, view, seal)
        self._reader = DiskReader(self._space, self.counts, self._warnings, self._slots)
        self._writer: DiskWriter | None = None
        self._readers = ThreadPoolExecutor(num_threads, "disk-tier-read")
        self._writers = ThreadPoolExecutor(1, "disk-tier-write", _give_way)
        self._scrub_bytes_s = scrub_bytes_s
        self._scrubber: asyncio.Task[None] | None = None
        self._lock = -1
        self._waiting_bytes = 0
        self._speed: tuple[float, float] | None = None
        self._num_loading = 0
        self._loading_s = self._used_s = 0.0

    @property
    def capacity_bytes(self) -> int:
        """What blocks may have by the sum of their sizes, so that they fit with tables and padding."""
        sizes, space = self._space.block_bytes, self._space
        slots = [space.slot_bytes(group) for group in range(len(sizes))]
        share = min(size / (slot + ENTRY_BYTES) for size, slot in zip(sizes, slots, strict=True))
        return max(0, int((space.num_bytes * 0.98 - 4 * sum(set(slots))) * share))

    @property
    def facts(self) -> TierFacts:
        """As measured when the tier was opened, or as is usual where there was nothing to read."""
        return TierFacts(DISK, self.capacity_bytes, *(self._speed or _USUAL_SPEED))

    def stat(self) -> dict[str, float]:
        """Counters, and what is taken now."""
        extents = list(self._space.extents.values())
        return {
            **asdict(self.counts),
            "num_blocks": sum(extent.num_used for extent in extents),
            "num_extents": len(extents),
            "taken_bytes": self._space.taken_bytes,
            "other_bytes": sum(list(self._space.others.values())),
            "max_bytes": self._space.num_bytes,
        }

    async def open(self) -> Sequence[TierEntry]:
        """Raises OSError where the folder cannot be used, or another process has it."""
        (entries,) = await _all([self._readers.submit(self._open)])
        if self._scrub_bytes_s > 0:
            self._scrubber = asyncio.create_task(self._scrub())
        return entries

    async def look(self, job: LookIn) -> Sequence[int]:
        """Nobody else writes here: who saved a block has been told its place."""
        return [NO_PLACE] * len(job.wanted)

    async def load(self, job: LoadFrom) -> Sequence[int]:
        self._used_s = time.monotonic()
        sums = [NO_PLACE] * len(job.blocks)
        found = [(place, nth) for nth, (block, place, _) in enumerate(job.blocks) if self._holds(block, place)]
        self.counts.num_missed += len(job.blocks) - len(found)
        if self._is_stuck():
            return sums
        pieces = self._reader.pieces(sorted(found))
        self._note_loading(1)
        try:
            reads = await _all([self._readers.submit(self._reader.read, piece, job.blocks) for piece in pieces])
        finally:
            self._note_loading(-1)
        for (extent, first, nths), seqs in zip(pieces, reads, strict=True):
            for slot, (nth, seq) in enumerate(zip(nths, seqs, strict=True), first):
                if seq and extent.holds(slot, *job.blocks[nth][0]) and extent.seqs[slot] == seq:
                    sums[nth] = extent.sums[slot]
                    self.counts.num_loaded += 1
                    self.counts.loaded_bytes += extent.head.slot_bytes
        return sums

    async def save(self, job: SaveTo) -> Sequence[int]:
        self._used_s = time.monotonic()
        num_bytes = len(job.blocks) * max(map(self._space.slot_bytes, range(len(self._space.block_bytes))))
        if self._writer is None or self._is_stuck() or self._waiting_bytes + num_bytes > _MOST_WAITING_BYTES:
            self.counts.num_refused += len(job.blocks)
            return [NO_PLACE] * len(job.blocks)
        self._waiting_bytes += num_bytes
        try:
            (places,) = await _all([self._writers.submit(self._writer.save, job)])
        finally:
            self._waiting_bytes -= num_bytes
        return places

    async def drop(self, job: DropFrom) -> None:
        await self._drop(sorted({place for block, place in job.blocks if self._holds(block, place)}))

    async def verify(self, bytes_s: float = math.inf) -> list[TierKey]:
        """Read all that is here, so many bytes a second, and fewer while blocks are loaded or saved; forget what is not
        as it was saved: those blocks."""
        bad: list[TierKey] = []
        for extent in list(self._space.extents.values()):
            for slot in range(extent.head.num_slots):
                if extent.is_empty(slot):
                    continue
                block, seq = (extent.groups[slot], extent.key(slot)), extent.seqs[slot]
                (is_sound,) = await _all([self._readers.submit(self._reader.is_sound, extent, slot)])
                self.counts.num_verified += 1
                if not is_sound and extent.holds(slot, *block) and extent.seqs[slot] == seq:
                    bad.append(block)
                    self.counts.num_damaged += 1
                    await self._drop([place_of(extent, slot)])
                is_in_use = time.monotonic() - self._used_s < _IN_USE_S
                await asyncio.sleep(extent.head.slot_bytes / bytes_s * (_IN_USE_FACTOR if is_in_use else 1))
        return bad

    async def close(self) -> None:
        """Has the disk keep all that was written. Nothing may be asked of the tier any more."""
        if self._scrubber is not None:
            self._scrubber.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._scrubber
        await _all([self._writers.submit(self._close)])
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False)

    def _open(self) -> Sequence[TierEntry]:
        self._lock = claim(self._space.folder)
        try:
            if not self._space.overhead:
                convert(self._space.folder, self._space.numerics_id, self._space.block_bytes)
            opened = open_extents(self._space)
            self._speed = self._reader.probe()
        except BaseException:
            self._close()
            raise
        self.counts.num_damaged += opened.num_damaged
        self.counts.num_unusable += opened.num_unusable
        self._writer = DiskWriter(self._space, self.counts, self._warnings, self._slots, opened.seq)
        return opened.entries

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.sync()
        self._space.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._writer, self._lock = None, -1

    def _holds(self, block: TierKey, place: int) -> bool:
        extent, slot = self._space.find(place)
        return extent is not None and extent.holds(slot, *block)

    async def _drop(self, places: Sequence[int]) -> None:
        """They are not found any more at once; their slots are free when that is on the disk, too."""
        for extent, slot in map(self._space.find, places):
            if extent is not None:
                extent.forget(slot)
        if self._writer is not None and places:
            await _all([self._writers.submit(self._writer.clear, places)])

    async def _scrub(self) -> None:
        while True:
            await self.verify(self._scrub_bytes_s)
            await asyncio.sleep(_SCRUB_PAUSE_S)

    def _note_loading(self, change: int) -> None:
        """Loads overlap: what counts is the time in which there is any."""
        now_s = time.monotonic()
        if self._num_loading:
            self.counts.load_s += now_s - self._loading_s
        self._num_loading += change
        self._loading_s = now_s

    def _is_stuck(self) -> bool:
        """A disk that has not answered for long is asked nothing more until it does."""
        writing_s = math.inf if self._writer is None else self._writer.since_s
        is_stuck = time.monotonic() - min(writing_s, self._reader.since_s) > _STUCK_S
        if is_stuck:
            self._warnings.tell("stuck", f"the disk has not answered for {_STUCK_S:.0f} s")
        return is_stuck


def _give_way() -> None:
    """On a thread: processors are first for others. Nobody waits for what it writes."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


async def _all(works: Sequence[Future[T]]) -> list[T]:
    """The results of what runs on threads. It has ended when this ends, also when the caller is cancelled."""
    waits = asyncio.gather(*map(asyncio.wrap_future, works), return_exceptions=True)
    is_cancelled = False
    while not waits.done():
        try:
            await asyncio.shield(waits)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    return [work.result() for work in works]


class Piece(NamedTuple):
    """Consecutive slots to read at once, and the place in the job of each block."""

    extent: Extent
    first: int
    nths: list[int]


class DiskReader:
    """What the threads that read do: large reads into host memory, and looking at single blocks."""

    def __init__(self, space: DiskSpace, counts: DiskCounts, warnings: RateLimitedWarnings, slots: DiskSlots) -> None:
        self._space = space
        self._counts = counts
        self._warnings = warnings
        self._slots = slots
        self._tokens = itertools.count()
        self._busy: dict[int, float] = {}

    @property
    def since_s(self) -> float:
        """When the oldest read began that has not ended."""
        return min(list(self._busy.values()), default=math.inf)

    def pieces(self, found: Sequence[tuple[int, int]]) -> list[Piece]:
        """What to read at once: neighbours, but not so many that there is nothing left for other threads. found: sorted
        pairs of a place and the block's place in the job."""
        pieces: list[Piece] = []
        for place, nth in found:
            extent, slot = self._space.find(place)
            assert extent is not None
            last = pieces[-1] if pieces else None
            is_next = last is not None and last.extent is extent and last.first + len(last.nths) == slot
            if last is not None and is_next and len(last.nths) * extent.head.slot_bytes < _PIECE_BYTES:
                last.nths.append(nth)
            else:
                pieces.append(Piece(extent, slot, [nth]))
        return pieces

    def read(self, piece: Piece, blocks: Sequence[tuple[TierKey, int, int]]) -> list[int]:
        """The number of each block's entry as it was before it was read; 0 where the block cannot be had. blocks: of
        the job."""
        extent, first, nths = piece
        seqs = extent.seqs[first : first + len(nths)]
        wanted = [(blocks[nth][0], blocks[nth][2]) for nth in nths]
        try:
            opens = self._timed(self._slots.read, extent, first, wanted)
        except OSError as error:
            self._counts.num_failed += len(nths)
            self._warnings.tell(f"read {error.errno}", f"reading fails ({error.strerror or error})")
            return [0] * len(nths)
        return [seq if is_open else 0 for seq, is_open in zip(seqs, opens, strict=True)]

    def is_sound(self, extent: Extent, slot: int) -> bool:
        """Whether a slot's bytes have the checksum that they had. What the disk cannot read is not."""
        return self._timed(self._is_sound, extent, slot)

    def probe(self) -> tuple[float, float] | None:
        """How long it takes to read one slot, and bytes a second of some; None where there are none."""
        began_s = time.perf_counter()
        once_s, num_bytes = 0.0, 0
        for extent in self._space.extents.values():
            for slot in range(extent.head.num_slots):
                if num_bytes < _PROBE_BYTES and extent.used[slot]:
                    self._is_sound(extent, slot)
                    num_bytes += extent.head.slot_bytes
                    once_s = once_s or time.perf_counter() - began_s
        return (once_s, num_bytes / (time.perf_counter() - began_s)) if num_bytes else None

    def _is_sound(self, extent: Extent, slot: int) -> bool:
        group, key = extent.groups[slot], extent.key(slot)
        try:
            with self._slots.look(extent, slot) as data:
                return data is not None and block_sum((group, key), data) == extent.sums[slot]
        except OSError as error:
            self._warnings.tell(f"read {error.errno}", f"reading fails ({error.strerror or error})")
            return False

    def _timed(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        token = next(self._tokens)
        self._busy[token] = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            del self._busy[token]
