"""By when sequences must have had their first step planned, where their requests say so."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ..core.sequence import Sequence, Status

_FEW = 64
"""So many that have begun are kept in any case; beyond that, no more than are unfinished."""


class Deadlines:
    """A heap of (time, number, sequence). Those that have begun are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence, num_open: int) -> None:
        """A sequence whose request bounds its wait has come; `num_open` are unfinished."""
        request = seq.request
        heappush(self._heap, (request.arrival_s + request.terms.queue_s, seq.number, seq))
        if len(self._heap) > 2 * num_open + _FEW:
            self._heap = [each for each in self._heap if _has_yet_to_begin(each[2])]
            heapify(self._heap)

    def take(self, now: float) -> list[Sequence]:
        """Those that have waited too long."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            seq = heappop(self._heap)[2]
            if _has_yet_to_begin(seq):
                late.append(seq)
        return late


def _has_yet_to_begin(seq: Sequence) -> bool:
    return seq.status is Status.WAITING and seq.num_cached < 0
