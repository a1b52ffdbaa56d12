"""Whose turn it is: places for jobs, handed out to clients round robin, and to a client's jobs by size.

A client holds at most `per_client` places. One whose last job had to be killed comes after all that wait. Pure but for
the futures it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator
from itertools import count

_MAX_REMEMBERED = 1024


class FairQueue:
    def __init__(self, num_places: int, per_client: int) -> None:
        self._num_free = num_places
        self._per_client = per_client
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {}  # the client whose turn it is first
        self._held: dict[str, int] = {}
        self._late: dict[str, None] = {}
        self._numbers = count()

    @contextlib.asynccontextmanager
    async def turn(self, client: str, size: int) -> AsyncIterator[None]:
        """A place for `client`, until the block ends."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(client, []), (size, next(self._numbers), granted))
        self._hand_out()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._num_free += 1
                self._held[client] -= 1
                if not self._held[client]:
                    del self._held[client]
            else:
                granted.cancel()
            self._hand_out()

    def note_end(self, client: str, *, was_killed: bool) -> None:
        """How a job of `client` ended."""
        self._late.pop(client, None)
        if was_killed:
            self._late[client] = None
            if len(self._late) > _MAX_REMEMBERED:
                del self._late[next(iter(self._late))]

    def _hand_out(self) -> None:
        while self._num_free and (client := self._next()) is not None:
            jobs = self._waiting.pop(client)
            _, _, granted = heapq.heappop(jobs)
            if jobs:
                self._waiting[client] = jobs  # at the end
            if not granted.done():
                self._num_free -= 1
                self._held[client] = self._held.get(client, 0) + 1
                granted.set_result(None)

    def _next(self) -> str | None:
        may = [client for client in self._waiting if self._held.get(client, 0) < self._per_client]
        return next((client for client in may if client not in self._late), may[0] if may else None)
