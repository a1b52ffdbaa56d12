"""Aligned arrays, room for weights, and the arena of a program: values that are never alive together share bytes."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import numpy as np

from ...core.memory import give_back, map_private, write_protect

ALIGNMENT = 64
_SLAB_BYTES = 64 * 2**20


def aligned_bytes(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], uninitialised, starting at a multiple of 64 bytes."""
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + num_bytes]


class WeightArena:
    """Hands out pieces of large mappings that ask for huge pages: a model's weights lie side by side, and walking them
    misses the address cache rarely. Untouched pages take no memory; a slab goes when all its pieces have gone, or with
    all others when the arena is closed."""

    def __init__(self) -> None:
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._slab = np.empty(0, np.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], zero, starting at a multiple of 64 bytes."""
        if self._used + num_bytes > self._slab.size:
            mapping = map_private(max(_SLAB_BYTES, num_bytes))
            self._mappings.add(mapping)
            self._slab = np.frombuffer(mapping, np.uint8)
            self._used = 0
        piece = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece

    def seal(self) -> None:
        """Nobody writes what was handed out so far; what comes lies elsewhere."""
        for mapping in self._mappings:
            write_protect(mapping)
        self._slab, self._used = np.empty(0, np.uint8), 0

    def close(self) -> None:
        """Give all memory back at once; pieces that others still hold read as zeros."""
        for mapping in self._mappings:
            give_back(mapping)
        self._slab, self._used = np.empty(0, np.uint8), 0


def place(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offsets for values of `sizes` bytes, alive over the inclusive intervals `lives`, and the arena's total bytes.

    Each value, in order of birth, takes the lowest gap that is free throughout its life.
    """
    offsets = [0] * len(sizes)
    total = 0
    placed: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda value: lives[value]):
        first, last = lives[index]
        size = -(-sizes[index] // ALIGNMENT) * ALIGNMENT
        taken = sorted(
            (offsets[other], offsets[other] + -(-sizes[other] // ALIGNMENT) * ALIGNMENT)
            for other in placed
            if lives[other][0] <= last and first <= lives[other][1]
        )
        offset = 0
        for begin, end in taken:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + size)
    return offsets, total
