"""Blocks between slots of host memory and slots of extents: as they are, or sealed on the way."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence

from ....core.tiers import TierKey
from ..seal import BadSeal, Seal
from .extent import Extent
from .io import read_slots, write_slots

View = Callable[[int, int], memoryview]


class DiskSlots:
    """view: to host memory, a multiple of 4096 bytes from such a multiple. Threads may share it. All raises OSError."""

    def __init__(self, block_bytes: Sequence[int], view: View, seal: Seal | None) -> None:
        self._block_bytes = block_bytes
        self._view = view
        self._seal = seal
        self._scratch: list[mmap.mmap] = []

    def read(self, extent: Extent, first: int, blocks: Sequence[tuple[TierKey, int]]) -> list[bool]:
        """Consecutive slots into host memory, blocks by key and offset; whether each opens. Where blocks are not
        sealed, none is looked at."""
        size = extent.head.slot_bytes
        if self._seal is None:
            read_slots(extent, first, [self._view(offset, size) for _, offset in blocks])
            return [True] * len(blocks)
        with self._memory(len(blocks) * size) as memory:
            read_slots(extent, first, [memory])
            return [
                self._opens(extent, first + nth, block, memory[nth * size :], self._data(block, offset))
                for nth, (block, offset) in enumerate(blocks)
            ]

    def write(self, extent: Extent, first: int, blocks: Sequence[tuple[TierKey, int, int]]) -> None:
        """Blocks by key, offset and checksum into consecutive slots."""
        size = extent.head.slot_bytes
        if self._seal is None:
            return write_slots(extent, first, [self._view(offset, size) for _, offset, _ in blocks])
        with self._memory(len(blocks) * size) as memory:
            for nth, (block, offset, sum_) in enumerate(blocks):
                sealed_bytes = self._block_bytes[block[0]] + extent.head.overhead
                sealed = memory[nth * size : nth * size + sealed_bytes]
                self._seal.seal(block, sum_, self._data(block, offset), sealed)
            write_slots(extent, first, [memory])

    @contextlib.contextmanager
    def look(self, extent: Extent, slot: int) -> Iterator[memoryview | None]:
        """The bytes of one block; None where it does not open."""
        block = extent.groups[slot], extent.key(slot)
        with self._memory(2 * extent.head.slot_bytes) as memory:
            raw, data = memory[: extent.head.slot_bytes], memory[extent.head.slot_bytes :]
            read_slots(extent, slot, [raw])
            data = (raw if self._seal is None else data)[: self._block_bytes[block[0]]]
            yield data if self._seal is None or self._opens(extent, slot, block, raw, data) else None

    def _data(self, block: TierKey, offset: int) -> memoryview:
        return self._view(offset, self._block_bytes[block[0]])

    def _opens(self, extent: Extent, slot: int, block: TierKey, raw: memoryview, data: memoryview) -> bool:
        assert self._seal is not None
        try:
            return self._seal.open(block, raw[: len(data) + extent.head.overhead], data) == extent.sums[slot]
        except BadSeal:
            return False

    @contextlib.contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Some that a disk can read into, which others had before."""
        memory = self._scratch.pop() if self._scratch else mmap.mmap(-1, num_bytes)
        if len(memory) < num_bytes:
            memory.close()
            memory = mmap.mmap(-1, num_bytes)
        with memoryview(memory) as whole:
            yield whole[:num_bytes]
        self._scratch.append(memory)
