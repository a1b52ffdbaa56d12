"""When an engine gives memory of its pools back (`lean`): after a time without work, and where there is little left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.effects import Relax
from ..core.units import MiB
from .shell import EngineShell

LOOK_S = 1.0
IDLE_S = 30.0
LONG_IDLE_S = 600.0
"""After so long without work the prefix cache goes, too, where there are tiers that have it."""

PIECE_BYTES = 64 * MiB
"""Given back at once, each time one looks: some milliseconds between two steps."""


async def keep_lean(shell: EngineShell, is_short: Callable[[], bool]) -> None:
    """Until cancelled. is_short: whether the machine has little memory left."""
    core, quiet_s, num_steps = shell.core, 0.0, -1
    while True:
        await asyncio.sleep(LOOK_S)
        before, num_steps = num_steps, core.state.counters.num_steps
        quiet_s = 0.0 if core.has_work or num_steps != before else quiet_s + LOOK_S
        evicts = is_short() or (quiet_s >= LONG_IDLE_S and core.state.has_tiers)
        if (evicts or quiet_s >= IDLE_S) and core.lean.has_spare(evicts):
            shell.hear(Relax(PIECE_BYTES, evicts))
