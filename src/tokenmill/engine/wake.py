"""Wakes one task that waits: asyncio.Event at a third of the price."""

from __future__ import annotations

import asyncio


class Wake:
    """For one who waits. Once set, it stays so until somebody has waited."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Returns when it has been set; it no longer is then."""
        if not self.is_set:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self.is_set = False
