"""When open requests must have begun, and when they must be over. Pure: the caller says what time it is."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..core.request import Request

_FEW = 64
"""So many are kept in any case; beyond that, twice as many as all open requests could have."""


class Due(NamedTuple):
    """is_end: the request must be over; else, an engine must have it."""

    at_s: float
    request_id: str
    is_end: bool


class Deadlines:
    """Of requests whose terms have bounds. Of those that are over some stay until their time comes: who asks knows
    them."""

    def __init__(self) -> None:
        self._heap: list[Due] = []

    @property
    def next_s(self) -> float | None:
        """When `take` has something; None: never."""
        return self._heap[0].at_s if self._heap else None

    def add(self, request: Request, still_open: Collection[str]) -> None:
        """`still_open`: all requests that are, this one too."""
        terms = request.terms
        if terms.timeout_s:
            heappush(self._heap, Due(request.arrival_s + terms.timeout_s, request.id, True))
        if terms.queue_s:
            heappush(self._heap, Due(request.arrival_s + terms.queue_s, request.id, False))
        if len(self._heap) > 4 * len(still_open) + _FEW:
            self._heap = [due for due in self._heap if due.request_id in still_open]
            heapify(self._heap)

    def take(self, now: float) -> list[Due]:
        """Those whose time has come."""
        due = []
        while self._heap and self._heap[0].at_s <= now:
            due.append(heappop(self._heap))
        return due
