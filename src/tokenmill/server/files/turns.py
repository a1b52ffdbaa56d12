"""Whose line begins next: the owners of batches take turns, and at an owner's turn that owner's batches do.

A batch asks for one turn at a time and comes back for its next line, so an owner with many batches always has some in
the queue, and one with a single batch comes back to it after each line. An owner who has had a turn goes behind all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Turn:
    """One batch's wait for its next line. has_come: set when no other is before it, until it leaves."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.has_come = asyncio.Event()


class Turns:
    """Each operation takes the same time however many wait, but for leaving before the turn has come."""

    def __init__(self) -> None:
        self._now: Turn | None = None
        self._waiting: dict[str, deque[Turn]] = {}  # the owner whose turn is next first; nobody without one that waits

    @contextlib.asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """Entered when it is the owner's turn, which ends with the block."""
        turn = self.join(owner)
        try:
            await turn.has_come.wait()
            yield
        finally:
            self.leave(turn)

    def join(self, owner: str) -> Turn:
        turn = Turn(owner)
        self._waiting.setdefault(owner, deque()).append(turn)
        if self._now is None:
            self._call_next()
        return turn

    def leave(self, turn: Turn) -> None:
        """Its line has begun, or never will."""
        if turn is self._now:
            if turn.owner in self._waiting:
                self._waiting[turn.owner] = self._waiting.pop(turn.owner)  # behind the others
            self._call_next()
            return
        self._waiting[turn.owner].remove(turn)
        if not self._waiting[turn.owner]:
            del self._waiting[turn.owner]

    def _call_next(self) -> None:
        self._now = None
        for owner, turns in self._waiting.items():
            self._now = turns.popleft()
            self._now.has_come.set()
            if not turns:
                del self._waiting[owner]
            return
