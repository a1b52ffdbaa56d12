"""When to do what nobody waits for yet: once a process has had nothing to do for a while, so that nobody feels it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.1
NUM_LOOKS = 10


async def until_quiet(is_busy: Callable[[], bool], num_done: Callable[[], int]) -> None:
    """Return when NUM_LOOKS looks one after the other, LOOK_S apart, have found nothing to do, and nothing done since
    the one before. `num_done`: grows with what is done."""
    num_quiet, before = 0, num_done()
    while num_quiet < NUM_LOOKS:
        await asyncio.sleep(LOOK_S)
        now = num_done()
        num_quiet = 0 if is_busy() or now != before else num_quiet + 1
        before = now
