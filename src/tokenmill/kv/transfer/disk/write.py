"""What the one thread of the disk tier that writes does: blocks into slots, then their entries; and clears entries."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....core.block import KEY_BYTES
from ....core.tiers import NO_PLACE, BlockFacts, SaveTo
from .extent import ENTRY_BYTES, PAGE_BYTES, Entry, Extent
from .io import DiskSlots, write_entries
from .space import DiskSpace, place_of

log = logging.getLogger(__name__)

_MOST_PIECE_BYTES = 4 << 20
_QUIET_S = 60.0


@dataclass
class DiskCounts:
    """Since the tier was opened.

    num_loaded, loaded_bytes    blocks that were read
    load_s          time in which blocks were being read
    num_saved, saved_bytes      blocks that were written; what the disk wears by
    num_dropped     blocks that were forgotten
    num_missed      asked for at a place that holds another block by now, or none
    num_refused     not saved for want of room, or since too much was waiting to be written
    num_failed      blocks that the disk could not read or write
    num_verified    blocks that were read and compared with their checksums
    num_damaged     entries and blocks that were found to be wrong: they are gone
    num_unusable    files found to be another model's, of another version or damaged
    """

    num_loaded: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    num_saved: int = 0
    saved_bytes: int = 0
    num_dropped: int = 0
    num_missed: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_verified: int = 0
    num_damaged: int = 0
    num_unusable: int = 0


@dataclass
class RateLimitedWarnings:
    """Warnings, of each kind one a minute at most. last_s: when the last one was, by kind."""

    what: object
    last_s: dict[str, float] = field(default_factory=dict)

    def tell(self, kind: str, message: str) -> None:
        now_s = time.monotonic()
        if now_s - self.last_s.get(kind, -_QUIET_S) >= _QUIET_S:
            self.last_s[kind] = now_s
            log.warning("KV blocks on disk, %s: %s; what is not there is computed.", self.what, message)


class DiskWriter:
    """seq: the largest number of an entry so far. since_s: when the write began that has not ended. Slots whose writing
    failed, but for want of room, are not used again until the next start."""

    def __init__(
        self, space: DiskSpace, counts: DiskCounts, warnings: RateLimitedWarnings, slots: DiskSlots, seq: int
    ) -> None:
        self._space = space
        self._counts = counts
        self._warnings = warnings
        self._slots = slots
        self._seq = max(seq, time.time_ns())
        self._unsynced: set[Extent] = set()
        self.since_s = math.inf

    def save(self, job: SaveTo) -> list[int]:
        places = [NO_PLACE] * len(job.blocks)
        for nths in self._runs(job):
            waiting = iter(nths)
            try:
                for (extent, first, count), _ in self._space.take([job.blocks[nth][0] for nth in nths]):
                    for piece, slot in _cut([next(waiting) for _ in range(count)], first, extent.head.slot_bytes):
                        if self._put(extent, slot, [job.blocks[nth] for nth in piece]):
                            for nth, at in enumerate(piece):
                                places[at] = place_of(extent, slot + nth)
            except OSError as error:
                self._warnings.tell(f"room {error.errno}", f"nothing more is written ({error.strerror or error})")
        self._counts.num_refused += places.count(NO_PLACE)
        return places

    def clear(self, places: Sequence[int]) -> None:
        """Free slots whose blocks were forgotten; sorted."""
        runs: list[tuple[Extent, int, int]] = []
        for extent, slot in map(self._space.find, places):
            if runs and runs[-1][0] is extent and sum(runs[-1][1:]) == slot:
                runs[-1] = (extent, runs[-1][1], runs[-1][2] + 1)
            elif extent is not None:
                runs.append((extent, slot, 1))
        for extent, first, count in runs:
            try:
                write_entries(extent, PAGE_BYTES + first * ENTRY_BYTES, bytes(count * ENTRY_BYTES))
            except OSError as error:
                self._warnings.tell("clear", f"entries cannot be cleared ({error.strerror or error})")
                continue
            for slot in range(first, first + count):
                self._space.free(extent, slot)
            self._counts.num_dropped += count

    def sync(self) -> None:
        """Have the disk keep what was written, also over a power cut."""
        for extent in self._unsynced:
            try:
                os.fsync(extent.fd)
            except OSError as error:
                self._warnings.tell("sync", f"not all may outlast a power cut ({error.strerror or error})")

    def _runs(self, job: SaveTo) -> Iterator[list[int]]:
        """The places in the job of blocks of one group, each the child of the one before."""
        nths = [nth for nth, (facts, _, _) in enumerate(job.blocks) if self._is_sound(facts)]
        nths.sort(key=lambda nth: job.blocks[nth][0].block[0])
        run: list[int] = []
        for nth in nths:
            facts = job.blocks[nth][0]
            last = job.blocks[run[-1]][0].block if run else None
            if last is not None and last != (facts.block[0], facts.parent):
                yield run
                run = []
            run.append(nth)
        if run:
            yield run

    def _is_sound(self, facts: BlockFacts) -> bool:
        group, key = facts.block
        is_key = len(key) == KEY_BYTES and len(facts.parent) in (0, KEY_BYTES)
        return is_key and 0 <= group < len(self._space.block_bytes)

    def _put(self, extent: Extent, first: int, blocks: Sequence[tuple[BlockFacts, int, int]]) -> bool:
        """Bytes, then entries. Blocks can be found once all of it is written."""
        entries = []
        for facts, _, sum_ in blocks:
            self._seq += 1
            entries.append(Entry(facts, self._seq, sum_))
        codec, uid = self._space.codec, extent.head.uid
        self.since_s = time.monotonic()
        self._unsynced.add(extent)
        packed = b"".join(codec.pack(uid, slot, entry) for slot, entry in enumerate(entries, first))
        try:
            self._slots.write(extent, first, [(facts.block, offset, sum_) for facts, offset, sum_ in blocks])
            write_entries(extent, PAGE_BYTES + first * ENTRY_BYTES, packed)
        except OSError as error:
            self._warnings.tell(f"write {error.errno}", f"writing fails ({error.strerror or error})")
            self._counts.num_failed += len(blocks)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                extent.set_used(first, len(blocks), False)
            return False
        finally:
            self.since_s = math.inf
        for slot, entry in enumerate(entries, first):
            extent.put(slot, entry)
        self._counts.num_saved += len(blocks)
        self._counts.saved_bytes += len(blocks) * extent.head.slot_bytes + len(packed)
        return True


def _cut(nths: Sequence[int], first: int, slot_bytes: int) -> Iterator[tuple[Sequence[int], int]]:
    """Pieces to write at once, and the first slot of each."""
    most = max(1, _MOST_PIECE_BYTES // slot_bytes)
    return ((nths[at : at + most], first + at) for at in range(0, len(nths), most))
