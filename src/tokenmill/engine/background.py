"""What an engine does by the clock, beside its steps.

send_heartbeats      while it has work: a step may take long, and a front end that hears nothing cannot tell a long
                     step from a stopped process (`cluster.failures`)
send_expert_load     what its experts have computed, twice a second while there is something new
reclaim_idle_memory  gives memory of the pools back (`memory_reclaim`) after a time without work, and where the
                     machine is short of it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from ..core.effects import Relax
from ..core.events import Beat
from ..core.experts import ExpertLoad
from ..core.ports import EngineEnd
from ..core.units import MiB
from .core import EngineCore
from .shell import EngineShell

HEARTBEAT_S = 0.4


async def send_heartbeats(shell: EngineShell, link: EngineEnd, num_ticks: Callable[[], int | None]) -> None:
    """Until the front end is gone. `num_ticks`: of the kernels, see Beat."""
    core = shell.core
    with contextlib.suppress(EOFError):
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if core.has_work:
                num_in_flight = len(core.state.in_flight)
                in_flight_s = core.stats().in_flight_s if num_in_flight else 0.0
                await link.send(Beat(num_ticks(), num_in_flight, in_flight_s, shell.num_jobs))


TELL_S = 0.5


async def send_expert_load(core: EngineCore, link: EngineEnd, read: Callable[[], ExpertLoad | None]) -> None:
    """Until the front end is gone; at once over where the model has no experts. read: what they have computed, without
    the number of steps."""
    told = read()
    if told is None:
        return
    with contextlib.suppress(EOFError):
        while True:
            await asyncio.sleep(TELL_S)
            num_steps = core.state.counters.num_steps  # before the counts are read, which may be newer
            load = read()
            if load is not None and (load := replace(load, num_steps=num_steps)) != told:
                told = load
                await link.send(load)


LOOK_S = 1.0
IDLE_S = 30.0
LONG_IDLE_S = 600.0
"""After so long without work the prefix cache goes, too, where there are tiers that have it."""

PIECE_BYTES = 64 * MiB
"""Given back at once, each time one looks: some milliseconds between two steps."""


async def reclaim_idle_memory(shell: EngineShell, is_short: Callable[[], bool]) -> None:
    """Until cancelled. is_short: whether the machine has little memory left."""
    core, quiet_s, num_steps = shell.core, 0.0, -1
    while True:
        await asyncio.sleep(LOOK_S)
        before, num_steps = num_steps, core.state.counters.num_steps
        quiet_s = 0.0 if core.has_work or num_steps != before else quiet_s + LOOK_S
        evicts = is_short() or (quiet_s >= LONG_IDLE_S and core.state.has_tiers)
        if (evicts or quiet_s >= IDLE_S) and core.memory_reclaim.has_spare(evicts):
            shell.hear(Relax(PIECE_BYTES, evicts))
