"""Sequences that wait to run, in order of rank. A preempted sequence returns to its earlier position.

Each tenant has a line for each class, priority and adapter of its sequences, in the order of service. Whose line is
next depends on what tenants and adapters have received (`service`). Where there is one line it is a plain heap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ..core.fairness import class_of
from ..core.sequence import Sequence, Status
from .service import Rank, Service

_FEW = 64
"""So many that ended while waiting are kept in any case; beyond that, no more than wait."""

_Key = tuple[int, str, int, str]
_Place = tuple[float, int]


@dataclass(slots=True, eq=False)
class _Line:
    """heap: by due time and number."""

    tenant: str
    heap: list[tuple[_Place, Sequence]] = field(default_factory=list)
    num_waiting: int = 0

    def peek(self) -> Sequence:
        while self.heap[0][1].status is not Status.WAITING:
            heappop(self.heap)
        return self.heap[0][1]

    def drop_ended(self) -> None:
        if len(self.heap) > 2 * self.num_waiting + _FEW:
            self.heap = [entry for entry in self.heap if entry[1].status is Status.WAITING]
            heapify(self.heap)

    def refresh(self, first: int, most: int, reconsider: Callable[[Sequence], None]) -> None:
        """Have those from place `first` of the heap reconsidered, `most` of them; O(len) if a place changes."""
        heap = self.heap
        has_changed = False
        for index in range(first, min(first + most, len(heap))):
            before, seq = heap[index]
            if seq.status is Status.WAITING:
                reconsider(seq)
                now = _place(seq)
                if now != before:
                    heap[index] = (now, seq)
                    has_changed = True
        if has_changed:
            heapify(heap)


class WaitingQueue:
    """Push and take in O(log n), peek in O(lines); a sequence that ended while waiting is told by `discard` and dropped
    lazily. `service` knows every sequence from its arrival to its end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lines: dict[_Key, _Line] = {}
        self._num_waiting = 0
        self._next_refreshed = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no order worth anything."""
        return (seq for line in self._lines.values() for _, seq in line.heap if seq.status is Status.WAITING)

    def num_up_to(self, class_: int, passed: Collection[str] = ()) -> int:
        """Those that wait in this class or a higher one. Of tenants in `passed`, none counts."""
        lines = self._lines.items()
        return sum(line.num_waiting for (each, *_), line in lines if each <= class_ and line.tenant not in passed)

    def tenants(self) -> Iterator[tuple[int, str]]:
        """Class and tenant of each line."""
        return ((class_, tenant) for class_, tenant, _, _ in self._lines)

    def push(self, seq: Sequence) -> None:
        assert seq.status is Status.WAITING, seq
        key = _key(seq)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(seq.request.terms.tenant)
        heappush(line.heap, (_place(seq), seq))
        line.num_waiting += 1
        self._num_waiting += 1
        line.drop_ended()
        self.service.wait(seq)

    def peek(self, passed: Collection[str] = ()) -> Sequence | None:
        """The next sequence, or None. Tenants in `passed` have no turn."""
        lines = self._lines
        if len(lines) == 1:
            (line,) = lines.values()
            return None if line.tenant in passed else line.peek()
        if not lines:
            return None
        heads = [line.peek() for line in lines.values() if line.tenant not in passed]
        return min(heads, key=self.service.rank, default=None)

    def take(self, seq: Sequence) -> None:
        """Take out one that was next, or would have been but for tenants that were passed."""
        key = _key(seq)
        line = self._lines[key]
        assert line.peek() is seq, f"sequence {seq.number} is not the next of its line"
        heappop(line.heap)
        self._count_out(key, line, seq)

    def discard(self, seq: Sequence) -> None:
        """Count out a waiting sequence that is about to be finished."""
        assert seq.status is Status.WAITING, seq
        key = _key(seq)
        self._count_out(key, self._lines[key], seq)

    def refresh(self, most: int, reconsider: Callable[[Sequence], None]) -> None:
        """Have `reconsider` set anew what `most` of the sequences are ranked by, in turn."""
        lines = list(self._lines.values())
        num_in_all = sum(len(line.heap) for line in lines)
        first = self._next_refreshed if self._next_refreshed < num_in_all else 0
        self._next_refreshed = first + most
        for line in lines:
            if most > 0 and first < len(line.heap):
                num_left = len(line.heap) - first
                line.refresh(first, most, reconsider)
                most -= num_left
            first = max(0, first - len(line.heap))

    def rank(self, seq: Sequence) -> Rank:
        """Of one that waits or runs: its place in the order of service."""
        return self.service.rank(seq)

    def _count_out(self, key: _Key, line: _Line, seq: Sequence) -> None:
        self.service.stop_waiting(seq)
        self._num_waiting -= 1
        line.num_waiting -= 1
        if not line.num_waiting:
            del self._lines[key]


def _key(seq: Sequence) -> _Key:
    request = seq.request
    return (class_of(request), request.terms.tenant, request.priority, request.adapter)


def _place(seq: Sequence) -> _Place:
    return (seq.due, seq.number)
