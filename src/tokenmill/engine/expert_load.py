"""Tells front ends what the engine's experts have computed: twice a second while there is something new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from ..core.experts import ExpertLoad
from ..core.ports import EngineEnd
from .core import EngineCore

TELL_S = 0.5


async def keep_telling_load(core: EngineCore, link: EngineEnd, read: Callable[[], ExpertLoad | None]) -> None:
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
