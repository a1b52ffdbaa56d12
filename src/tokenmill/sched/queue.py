"""Sequences that wait to run, in order of rank. A preempted sequence returns to its earlier position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from ..core.sequence import Sequence, Status
from .rank import Rank, rank

_FEW = 64
"""So many that ended while waiting are kept in any case; beyond that, no more than wait."""


class WaitingQueue:
    """Push, peek and pop in O(log n); a sequence that ended while waiting is told by `discard` and dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_waiting = 0
        self._next_refreshed = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no order worth anything."""
        return (seq for _, seq in self._heap if seq.status is Status.WAITING)

    def push(self, seq: Sequence) -> None:
        assert seq.status is Status.WAITING, seq
        heappush(self._heap, (rank(seq), seq))
        self._num_waiting += 1
        if len(self._heap) > 2 * self._num_waiting + _FEW:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapify(self._heap)

    def peek(self) -> Sequence | None:
        """The next sequence, or None."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the next sequence out."""
        seq = self.peek()
        assert seq is not None, "nothing waits"
        heappop(self._heap)
        self._num_waiting -= 1
        return seq

    def discard(self, seq: Sequence) -> None:
        """Count out a waiting sequence that is about to be finished."""
        assert seq.status is Status.WAITING, seq
        self._num_waiting -= 1

    def refresh(self, most: int, reconsider: Callable[[Sequence], None]) -> None:
        """Have `reconsider` set anew what `most` of the sequences are ranked by, in turn; O(len) if a rank changes."""
        heap, first = self._heap, self._next_refreshed
        if first >= len(heap):
            first = 0
        self._next_refreshed = first + most
        has_changed = False
        for index in range(first, min(first + most, len(heap))):
            before, seq = heap[index]
            if seq.status is Status.WAITING:
                reconsider(seq)
                now = rank(seq)
                if now != before:
                    heap[index] = (now, seq)
                    has_changed = True
        if has_changed:
            heapify(heap)
