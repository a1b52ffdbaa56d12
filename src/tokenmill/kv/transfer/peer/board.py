"""What one worker offers to others, by ticket, and the memory that it offers: the blocks of a pool as bytes in this
process, read by another process of the machine. The worker's threads share the board.

A ticket belongs to the first reader that comes with it. Its blocks are pinned by whoever posted them until `over` was
called for the post, or until `withdraw` has returned: from then on nobody gets them, and a reader that has copied them
meanwhile learns from `check` that they may have changed.

`process_vm_readv` copies from one process's memory to another's in one go, without a pipe or a shared mapping, so that
pools stay private and in large pages. The kernel allows it to whom it allows ptrace: the same user, and under Yama's
ptrace_scope 1 or above nobody else's children; then `read_memory` raises MayNotRead and blocks go over a socket.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import NamedTuple

_MOST_VECTORS = 512
"""Ranges of one system call; the kernel takes 1024."""
GONE = "Nothing is offered under this ticket."
TAKEN = "The ticket was used by another."
CHANGED = "Blocks were given back while they were copied."
DAMAGED = "Blocks did not come as they were sent."
SUMS_S = 2.0
UNKNOWN_S = 2.0
"""For so long a ticket is waited for that is not known yet: its reader may hear of it first."""


class Refused(Exception):
    """The message says why."""


@dataclass(slots=True, eq=False)
class _Post:
    """`over` hears once that the reader has all of it."""

    blocks: tuple[tuple[int, int, int], ...]
    num_tokens: int
    is_last: bool
    over: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Offer:
    generation: int
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    num_tokens: int = 0
    is_last: bool = False
    reader: str = ""
    heard_s: float = 0.0
    posts: list[_Post] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """What is there from block `start` of a prefix on: as in `core.moves.Pulled`, and which blocks."""

    blocks: tuple[tuple[int, int, int], ...]
    num_tokens: int
    num_there: int
    is_last: bool
    generation: int


@dataclass(frozen=True, slots=True)
class Had:
    """What a reader says that it has: the sums of what it copied; all else as it was told in a Part."""

    generation: int
    sums: dict[tuple[int, int], int]
    num_tokens: int
    is_last: bool

    def includes(self, num_tokens: int, is_last: bool) -> bool:
        return num_tokens <= self.num_tokens and (self.is_last or not is_last)


class Board:
    """`block_size`: tokens."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._offers: dict[str, _Offer] = {}
        self._changed = threading.Condition()
        self._generations = count(1)
        self._is_closed = False

    def post(
        self,
        ticket: str,
        blocks: Sequence[tuple[int, int, int]],
        num_tokens: int,
        is_last: bool,
        over: Callable[[], None],
    ) -> None:
        """Offer these blocks (group, index, block) too."""
        with self._changed:
            offer = self._offers.get(ticket)
            if offer is None:
                offer = self._offers[ticket] = _Offer(next(self._generations), heard_s=time.monotonic())
            offer.blocks |= {(group, index): block for group, index, block in blocks}
            offer.num_tokens = max(offer.num_tokens, num_tokens)
            offer.is_last |= is_last
            if blocks or is_last:
                offer.posts.append(_Post(tuple(blocks), num_tokens, is_last, over))
            self._changed.notify_all()

    def note_sums(self, ticket: str, sums: dict[tuple[int, int], int]) -> None:
        with self._changed:
            offer = self._offers.get(ticket)
            if offer is not None:
                offer.sums |= sums
                self._changed.notify_all()

    def withdraw(self, ticket: str) -> None:
        with self._changed:
            self._offers.pop(ticket, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._offers.clear()
            self._changed.notify_all()

    def knows(self, ticket: str) -> bool:
        with self._changed:
            return ticket in self._offers

    def silent_s(self, ticket: str) -> float:
        """Since a reader was last heard of."""
        with self._changed:
            offer = self._offers.get(ticket)
            return 0.0 if offer is None else time.monotonic() - offer.heard_s

    def take(self, ticket: str, reader: str, start: int, most: int, is_final: bool, wait_s: float) -> Part | None:
        """What is there of blocks [start, start + most); None where that is nothing yet. Waits for so long. Raises
        Refused."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                offer = self._offers.get(ticket)
                if offer is not None:
                    self._note_reader(offer, reader)
                    num_full = offer.num_tokens // self._size
                    if offer.is_last or (num_full > start and not is_final):
                        return self._part(offer, start, most)
                left_s = until_s - time.monotonic()
                if self._is_closed:
                    raise Refused(GONE)
                if left_s <= 0:
                    return None
                was_there = offer is not None
                self._changed.wait(left_s)
                if was_there and ticket not in self._offers:
                    raise Refused(GONE)

    def blocks_of(self, ticket: str, reader: str, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """(group, block) of each of these. Raises Refused."""
        with self._changed:
            offer = self._require(ticket, reader)
            try:
                return [(group, offer.blocks[group, index]) for group, index in wanted]
            except KeyError as error:
                raise Refused(GONE) from error

    def check(self, ticket: str, reader: str, had: Had) -> None:
        """What the reader has. Waits for the sums made here. Raises Refused where it is not to be used."""
        until_s = time.monotonic() + SUMS_S
        with self._changed:
            while True:
                offer = self._require(ticket, reader)
                if offer.generation != had.generation:
                    raise Refused(CHANGED)
                left_s = until_s - time.monotonic()
                if left_s <= 0 or all(place in offer.sums for place in had.sums):
                    break
                self._changed.wait(left_s)
            if any(offer.sums.get(place) != value for place, value in had.sums.items()):
                raise Refused(DAMAGED)
            over = [post for post in offer.posts if had.includes(post.num_tokens, post.is_last)]
            offer.posts = [post for post in offer.posts if post not in over]
        for post in over:
            post.over()

    def _require(self, ticket: str, reader: str) -> _Offer:
        offer = self._offers.get(ticket)
        if offer is None:
            raise Refused(CHANGED)
        self._note_reader(offer, reader)
        return offer

    def _note_reader(self, offer: _Offer, reader: str) -> None:
        if offer.reader not in ("", reader):
            raise Refused(TAKEN)
        offer.reader = reader
        offer.heard_s = time.monotonic()

    def _part(self, offer: _Offer, start: int, most: int) -> Part:
        num_blocks = -(-offer.num_tokens // self._size) if offer.is_last else offer.num_tokens // self._size
        end = min(num_blocks, start + most)
        blocks = tuple((group, index, block) for (group, index), block in offer.blocks.items() if start <= index < end)
        return Part(blocks, min(offer.num_tokens, end * self._size), offer.num_tokens, offer.is_last, offer.generation)


class BlockMemory(NamedTuple):
    """Blocks of one KV group: `view` is all of their bytes, flat; `address` is where it begins."""

    view: memoryview
    address: int
    block_bytes: int

    def block(self, index: int) -> memoryview:
        return self.view[index * self.block_bytes : (index + 1) * self.block_bytes]


class CannotRead(Exception):
    """The other process's memory was not read; the message says why."""


class MayNotRead(CannotRead):
    """Nor will it be another time."""


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def can_read_memory() -> bool:
    """Whether this system has the call at all."""
    return sys.platform == "linux" and hasattr(_libc(), "process_vm_readv")


def read_memory(pid: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Copy ranges (address there, address here, bytes) out of process `pid`; others may run meanwhile. Raises
    CannotRead where the process is gone or a range is not mapped, and MayNotRead."""
    for start in range(0, len(ranges), _MOST_VECTORS):
        part = ranges[start : start + _MOST_VECTORS]
        num = len(part)
        here = (_Range * num)(*[_Range(address, size) for _, address, size in part])
        there = (_Range * num)(*[_Range(address, size) for address, _, size in part])
        wanted = sum(size for *_, size in part)
        got = _libc().process_vm_readv(pid, here, num, there, num, 0)
        if got != wanted:
            number = ctypes.get_errno() if got < 0 else 0
            reason = os.strerror(number) if number else f"{got} of {wanted} bytes came"
            is_lasting = number in (errno.EPERM, errno.ENOSYS)
            raise (MayNotRead if is_lasting else CannotRead)(f"memory of process {pid} cannot be read: {reason}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "process_vm_readv"):
        vectors = ctypes.POINTER(_Range)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        libc.process_vm_readv.argtypes = (
            ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong,
        )  # fmt: skip
    return libc
