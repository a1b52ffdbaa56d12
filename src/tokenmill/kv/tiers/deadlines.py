"""How long others wait: each of what is waited for has the same time, so what came first ends first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """In the order in which they were added, which is that of their ends. is_over: whether nobody waits for one any
    more."""

    def __init__(self, is_over: Callable[[T], bool]) -> None:
        self._is_over = is_over
        self._ends: deque[tuple[float, T]] = deque()

    def __iter__(self) -> Iterator[T]:
        return (each for _, each in self._ends)

    def add(self, until_s: float, each: T) -> None:
        self._ends.append((until_s, each))

    @property
    def next_s(self) -> float | None:
        """When the next ends that somebody waits for."""
        while self._ends and self._is_over(self._ends[0][1]):
            self._ends.popleft()
        return self._ends[0][0] if self._ends else None

    def due(self, now: float) -> Iterator[T]:
        """Those that end by now and that somebody waits for, each once."""
        while self._ends and self._ends[0][0] <= now:
            _, each = self._ends.popleft()
            if not self._is_over(each):
                yield each
