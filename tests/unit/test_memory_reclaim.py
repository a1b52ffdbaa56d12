"""When an engine is told to give memory back: idle for some time, longer with what only the cache has, or at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.core.effects import Relax
from tokenmill.engine.background import IDLE_S, LONG_IDLE_S, PIECE_BYTES, reclaim_idle_memory
from tokenmill.sim.loop import VirtualLoop


class Core:
    """An engine that gives 3 pieces of free blocks and any number of cached ones."""

    def __init__(self, has_tiers: bool) -> None:
        self.state = SimpleNamespace(counters=SimpleNamespace(num_steps=0), has_tiers=has_tiers)
        self.has_work = False
        self.memory_reclaim = self
        self.num_spare = 3
        self.heard: list[tuple[float, bool]] = []

    def has_spare(self, evicts: bool) -> bool:
        return evicts or self.num_spare > 0


def watch(core: Core, until_s: float, *, busy: tuple[float, ...] = (), short: tuple[float, float] = (0, 0)) -> None:
    """busy: times at which a step is made; short: from when to when there is little memory."""
    loop = VirtualLoop()

    def hear(event: Any) -> None:
        assert event == Relax(PIECE_BYTES, event.evicts)
        core.heard.append((round(loop.time()), event.evicts))
        core.num_spare -= not event.evicts

    def step() -> None:
        core.state.counters.num_steps += 1

    async def main() -> None:
        for at_s in busy:
            loop.call_later(at_s, step)
        shell = cast(Any, SimpleNamespace(core=core, hear=hear))
        task = loop.create_task(reclaim_idle_memory(shell, lambda: short[0] <= loop.time() < short[1]))
        ended = loop.create_future()
        loop.call_later(until_s, ended.set_result, None)
        await ended
        task.cancel()

    loop.run(main())


def test_an_idle_engine_gives_free_blocks_back() -> None:
    """Once it has been quiet for long enough, piece by piece; each step begins the wait anew."""
    core = Core(has_tiers=False)
    watch(core, LONG_IDLE_S + 100, busy=(20.5,))
    begin = 21 + IDLE_S
    assert core.heard == [(begin, False), (begin + 1, False), (begin + 2, False)]


@pytest.mark.parametrize("has_work", [True, False])
def test_cached_blocks_go_after_long(has_work: bool) -> None:
    """Where tiers have them; an engine with requests is not idle."""
    core = Core(has_tiers=True)
    core.has_work = has_work
    watch(core, LONG_IDLE_S + 2.5)
    cached = [at_s for at_s, evicts in core.heard if evicts]
    assert cached == ([] if has_work else [LONG_IDLE_S + 1, LONG_IDLE_S + 2])
    assert len(core.heard) == (0 if has_work else 5)


def test_a_machine_that_is_short_of_memory_does_not_wait() -> None:
    """All goes that nobody uses, as long as it lasts."""
    core = Core(has_tiers=False)
    core.has_work = True
    watch(core, 10, short=(3.5, 6.5))
    assert core.heard == [(4, True), (5, True), (6, True)]
