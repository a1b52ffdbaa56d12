"""Which blocks are written to a tier below host memory.

    all         every one
    second-use  those that were wanted twice: most prompts come once, and writing them wears a disk for nothing

What was refused is remembered, so that the second use counts also where the block was given up between the two: a
ghost list, as in 2Q (Johnson & Shasha, VLDB 1994) and S3-FIFO (Yang et al., SOSP 2023). It knows that a block may have
been seen, in four bytes each: two Bloom filters (Bloom, 1970); the older is emptied when the newer is full. One
new block of some hundreds is taken for one that was seen.
"""

from __future__ import annotations

from ....core.tiers import TierKey
from ..replacement import TierBlock

_BITS = 16
_PROBES = 4


class AdmitAll:
    def __init__(self, num_bytes: int) -> None:
        pass

    def admits(self, block: TierBlock, now: float) -> bool:
        return True


class SecondUse:
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._refused: Seen | None = None

    def admits(self, block: TierBlock, now: float) -> bool:
        if block.num_uses > 1:
            return True
        if self._refused is None:
            self._refused = Seen(self._num_bytes // block.num_bytes)
        return self._refused.note(block.block)


class Seen:
    """num: of the last keys, how many are remembered at least."""

    def __init__(self, num: int) -> None:
        self._num = max(64, num)
        self._num_bits = _BITS * self._num
        self._old, self._new = bytearray(self._num_bits // 8), bytearray(self._num_bits // 8)
        self._num_new = 0

    def note(self, block: TierKey) -> bool:
        """Whether it was noted before, or is taken for one."""
        spots = self._spots(block)
        is_new = not _has(self._new, spots)
        was_seen = not is_new or _has(self._old, spots)
        if is_new:
            if self._num_new == self._num:
                self._old, self._new, self._num_new = self._new, bytearray(self._num_bits // 8), 0
            self._num_new += 1
            for spot in spots:
                self._new[spot >> 3] |= 1 << (spot & 7)
        return was_seen

    def _spots(self, block: TierKey) -> list[int]:
        """Bits: keys are hashes already."""
        group, key = block
        first, step = int.from_bytes(key[:8], "little") + group, int.from_bytes(key[8:], "little") | 1
        return [(first + nth * step) % self._num_bits for nth in range(_PROBES)]


def _has(bits: bytearray, spots: list[int]) -> bool:
    return all(bits[spot >> 3] >> (spot & 7) & 1 for spot in spots)
