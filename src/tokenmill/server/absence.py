"""While no engine serves: why, until when if that is known, and who waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.errors import Unavailable
from ..core.events import Ready


class Absence:
    """why      there is no engine, told to whoever asks
    find_ready  the facts of the engines that serve; None: none does
    """

    def __init__(self, why: str, find_ready: Callable[[], Ready | None]) -> None:
        self.why = why
        self._find_ready = find_ready
        self._back_s: float | None = None
        self._callers: set[asyncio.Future[None]] = set()
        self._is_for_good = False

    def expect(self, back_s: float | None) -> None:
        """One comes in so many seconds from now, if that is known."""
        self._back_s = None if back_s is None else asyncio.get_running_loop().time() + back_s

    def close(self, why: str) -> None:
        """None will come any more."""
        self._is_for_good = True
        self.why = why
        self.wake()

    def wake(self) -> None:
        """Those who wait look again."""
        for woken in self._callers:
            if not woken.done():
                woken.set_result(None)

    def require_hope(self) -> None:
        """Raises Unavailable where none will come."""
        if self._is_for_good:
            raise Unavailable(self.why)

    def require_ready(self) -> Ready:
        """Raises Unavailable while no engine is ready."""
        ready = self._find_ready()
        if ready is None:
            back_s = self._back_s
            left_s = None if back_s is None else max(0.0, back_s - asyncio.get_running_loop().time())
            raise Unavailable(self.why, retry_after_s=left_s)
        return ready

    async def wait_ready(self, longest_s: float) -> Ready:
        """Waits for an engine. Raises Unavailable where none is ready in time, at once where that is known."""
        loop = asyncio.get_running_loop()
        is_near = self._back_s is None or self._back_s - loop.time() <= longest_s
        if self._find_ready() is None and is_near and not self._is_for_good:
            woken = loop.create_future()
            self._callers.add(woken)
            try:
                async with asyncio.timeout(longest_s):
                    await woken
            except TimeoutError:
                pass
            finally:
                self._callers.discard(woken)
        return self.require_ready()
