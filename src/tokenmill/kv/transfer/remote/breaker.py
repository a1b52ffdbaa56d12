"""Keeps a store that is down or slow from costing time: after a few failures in a row nobody asks it any more.

    closed --- `most_failures` in a row ---> open --- a probe succeeds ---> closed
                                             probes in the background, ever less often

A timeout is a failure: who waits for a slow store is better off without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MOST_FAILURES = 3
FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 4.0


class Breaker:
    """For one store, on one event loop.

    name           as the log has it
    probe          whether the store answers again: raises OSError where it does not
    first_pause_s  before the first probe; each later one waits twice as long, at most MOST_PAUSE_S, until a call that
                   was no probe has succeeded
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[None]],
        first_pause_s: float = FIRST_PAUSE_S,
        most_failures: int = MOST_FAILURES,
    ) -> None:
        self._name = name
        self._probe = probe
        self._first_pause_s = self._pause_s = first_pause_s
        self._most = most_failures
        self._num_failures = 0
        self._probing: asyncio.Task[None] | None = None
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the store is not to be asked."""
        return self._probing is not None

    def succeed(self) -> None:
        self._num_failures = 0
        self._pause_s = self._first_pause_s

    def fail(self, why: str) -> None:
        """A call failed. Says so in the log when it is the last that is made for now."""
        self._num_failures += 1
        if self._num_failures >= self._most:
            self.trip(why)

    def trip(self, why: str) -> None:
        if self._probing is None:
            self.num_opened += 1
            log.warning("KV is not looked for in %s for now: %s", self._name, why)
            self._probing = asyncio.get_running_loop().create_task(self._wait_for_it())

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _wait_for_it(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
            try:
                await self._probe()
            except (OSError, EOFError) as error:
                log.debug("%s does not answer yet: %s", self._name, error)
            else:
                break
        self._num_failures, self._probing = 0, None
        log.warning("KV is looked for in %s again.", self._name)
