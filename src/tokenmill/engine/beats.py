"""Signs of life from an engine that has work, between the ends of its steps: a step may take long, and an end of the
link that hears nothing cannot tell a long step from a stopped process (`cluster.liveness`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..core.events import Beat
from ..core.ports import EngineEnd
from .shell import EngineShell

BEAT_S = 0.4


async def keep_beating(shell: EngineShell, link: EngineEnd, num_ticks: Callable[[], int | None]) -> None:
    """Until the front end is gone. `num_ticks`: of the kernels, see Beat."""
    core = shell.core
    with contextlib.suppress(EOFError):
        while True:
            await asyncio.sleep(BEAT_S)
            if core.has_work:
                num_in_flight = len(core.state.in_flight)
                in_flight_s = core.stats().in_flight_s if num_in_flight else 0.0
                await link.send(Beat(num_ticks(), num_in_flight, in_flight_s, shell.num_jobs))
