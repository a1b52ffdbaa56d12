"""The bytes of one KV group's blocks: what every backend offers of them, and the pool of those that compute on the CPU.

That pool is one anonymous mapping that the system commits page by page. Memory grows with the blocks that have ever
been written, not with the size of the pool; in large pages where the system has them, since a step reads blocks from
all over the pool and would miss the address cache at most of them. What a block's bytes mean is the group's layout
(core/block.py), known to this room alone: others copy blocks out and in whole.

The first touch of a page is dear, above all in a virtual machine, where the host may have to find the memory too: a
step that takes new blocks for 16 sequences can take half as long again. So pages are committed somewhat ahead of use
while nothing else is to be done. Blocks are handed out in the order of their ids as long as there are unused ones.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from ..core.block import KVGroup
from ..core.memory import give_back, give_range_back, map_private
from ..core.units import MiB

AHEAD_BYTES = 256 * MiB
"""Most that is committed beyond the blocks that have been used; a small pool keeps to AHEAD_SHARE of its size."""

AHEAD_SHARE = 1 / 16
_PAGE_BYTES = 2 * MiB
_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: Linux 5.14, not named in the mmap module


class KVPool(Protocol):
    """A pool as the rooms above see it. Copies are made between steps: a block that is copied must be held, so that no
    step and no other copy writes to it meanwhile."""

    group: KVGroup
    num_blocks: int
    kv: Any
    """The handle that a forward pass is given: `kv` of `Ops.write_kv` and `Ops.paged_attention`."""

    def copy_out(self, blocks: Sequence[int]) -> bytes:
        """The bytes of these blocks, one after the other."""
        ...

    def copy_in(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        """Make `data` the bytes of these blocks, as `copy_out` gave them for as many."""
        ...

    def copy(self, source: int, to: int) -> None:
        """Make the bytes of one block those of another."""
        ...

    def commit(self, blocks: Sequence[int]) -> None:
        """Have the memory of these blocks ready to be written, whatever it holds; others may run meanwhile."""
        ...

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let the memory of these blocks go, whatever it holds; they may hold anything after that."""
        ...

    def memory(self) -> tuple[memoryview, int]:
        """All blocks as flat bytes of this process, and the address of the first."""
        ...

    def commit_ahead(self, num_used: int) -> bool:
        """A small piece of work ahead of the use of blocks beyond the first `num_used`; False where there is no more
        of it."""
        ...

    def close(self) -> None:
        """Give the memory back; nothing may run on it any more."""
        ...


class HostPool:
    """A KVPool in the machine's main memory. `data`: uint8 [num_blocks, group.bytes_per_block], zero where never
    written. `bind` makes the backend's handle on it."""

    def __init__(self, group: KVGroup, num_blocks: int, bind: Callable[[np.ndarray, KVGroup], Any]) -> None:
        assert num_blocks >= 1, num_blocks
        size = num_blocks * group.bytes_per_block
        self._mapping = map_private(size)
        self.group = group
        self.num_blocks = num_blocks
        self.data = np.frombuffer(self._mapping, np.uint8).reshape(num_blocks, group.bytes_per_block)
        self.kv = bind(self.data, group)
        self._committed = 0  # bytes from the start that are, or are taken to be

    def copy_out(self, blocks: Sequence[int]) -> bytes:
        return self.data[list(blocks)].tobytes()

    def copy_in(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        assert len(data) == len(blocks) * self.group.bytes_per_block, (len(data), len(blocks), self.group)
        self.data[list(blocks)] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)

    def copy(self, source: int, to: int) -> None:
        self.data[to] = self.data[source]

    def commit(self, blocks: Sequence[int]) -> None:
        size = self.group.bytes_per_block
        for first, last in _runs(blocks):
            begin = first * size // _PAGE * _PAGE
            end = min(-(-(last + 1) * size // _PAGE) * _PAGE, self.data.nbytes)
            _populate(self.data.ctypes.data + begin, end - begin)

    def give_back(self, blocks: Sequence[int]) -> None:
        size = self.group.bytes_per_block
        for first, last in _runs(blocks):
            give_range_back(self.data.ctypes.data + first * size, (last + 1 - first) * size)

    def memory(self) -> tuple[memoryview, int]:
        return self.data.reshape(-1).data, self.data.ctypes.data

    def commit_ahead(self, num_used: int) -> bool:
        """Commit one more large page ahead of the first `num_used` blocks; False where there is nothing (more) to do.
        What the page holds stays as it is, also while others write to it; the interpreter is free meanwhile."""
        used = min(num_used * self.group.bytes_per_block, self.data.nbytes)
        end = min(used + min(AHEAD_BYTES, int(self.data.nbytes * AHEAD_SHARE)), self.data.nbytes)
        begin = max(self._committed, used // _PAGE_BYTES * _PAGE_BYTES)
        if begin >= end:
            return False
        size = min(_PAGE_BYTES, self.data.nbytes - begin)
        self._committed = begin + size if _populate(self.data.ctypes.data + begin, size) else self.data.nbytes
        return True

    def close(self) -> None:
        """Give the memory back at once. Views of `data` that others still hold stay valid and read as zeros."""
        give_back(self._mapping)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of ids."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        runs.append((runs.pop()[0], block) if runs and runs[-1][1] == block - 1 else (block, block))
    return runs


def _populate(address: int, num_bytes: int) -> bool:
    """False where the system cannot."""
    if sys.platform != "linux":
        return False
    return _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE) == 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
