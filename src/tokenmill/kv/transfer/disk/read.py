"""What threads of the disk tier that read do: large reads into host memory, and looking at single blocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

from ....core.tiers import TierKey
from ..checksum import block_sum
from .extent import Extent
from .slots import DiskSlots
from .space import DiskSpace
from .write import Complaints, DiskCounts

T = TypeVar("T")
P = ParamSpec("P")

_PIECE_BYTES = 4 << 20
_PROBE_BYTES = 32 << 20


class Piece(NamedTuple):
    """Consecutive slots to read at once, and the place in the job of each block."""

    extent: Extent
    first: int
    nths: list[int]


class DiskReader:
    def __init__(self, space: DiskSpace, counts: DiskCounts, complaints: Complaints, slots: DiskSlots) -> None:
        self._space = space
        self._counts = counts
        self._complaints = complaints
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
            self._complaints.tell(f"read {error.errno}", f"reading fails ({error.strerror or error})")
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
            self._complaints.tell(f"read {error.errno}", f"reading fails ({error.strerror or error})")
            return False

    def _timed(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        token = next(self._tokens)
        self._busy[token] = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            del self._busy[token]
