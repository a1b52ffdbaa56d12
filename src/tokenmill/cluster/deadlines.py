"""When open requests must have begun, when they must be over, and how long they wait for an engine that does not start.
Pure: the caller says what time it is."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..core.request import Request

_FEW = 64
"""So many are kept in any case; beyond that, twice as many as all open requests could have."""

START_LIMIT_S = 30.0
NUM_STARTS = 3


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


class StartLimit:
    """For how long engines may fail to start until what waits for one is ended.

    limit_s  counted from the first start that failed since there was a good engine, while something waits; None:
             START_LIMIT_S, or the time of NUM_STARTS starts like the last good one if that is longer
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self._start_s = 0.0
        self._since_s: float | None = None

    def join(self, start_s: float) -> None:
        """An engine serves; its start took so long."""
        self._start_s, self._since_s = start_s, None

    def is_over(self, now: float, num_waiting: int) -> bool:
        """To be asked when a start has failed and no engine serves."""
        if self._since_s is None or not num_waiting:
            self._since_s = now
        limit_s = self.limit_s
        return now - self._since_s >= (max(START_LIMIT_S, NUM_STARTS * self._start_s) if limit_s is None else limit_s)
