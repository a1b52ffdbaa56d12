"""The bytes of one KV group's blocks, in one anonymous mapping that the system commits page by page.

Memory grows with the blocks that have ever been written, not with the size of the pool; in large pages where the system
has them, since a step reads blocks from all over the pool and would miss the address cache at most of them. What a
block's bytes mean is the group's layout (core/block.py), known to ops alone.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from ..core.block import KVGroup


class KVPool:
    """`data`: uint8 [num_blocks, group.bytes_per_block], zero where never written."""

    def __init__(self, group: KVGroup, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        size = num_blocks * group.bytes_per_block
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._mapping = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # A kernel without huge pages: only slower.
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.group = group
        self.data = np.frombuffer(self._mapping, np.uint8).reshape(num_blocks, group.bytes_per_block)

    def close(self) -> None:
        """Give the memory back at once. Views of `data` that others still hold stay valid and read as zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
