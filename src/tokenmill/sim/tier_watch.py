"""What a simulated KV store tells of its blocks, to a worker's `kv.events.relay`: a client of its own, which joins
again when the store is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ..core.tiers import Join, TierEvents, WatchTiers
from ..kv.tiers.shell import TierLink
from .tier_store import ToyMachine

_RETRY_S = 0.05


class TierWatch:
    """spawn: runs a task as long as the simulation."""

    def __init__(self, machine: ToyMachine, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._machine = machine
        self._spawn = spawn
        self._hear: Callable[[TierEvents], None] | None = None
        self._link: TierLink | None = None
        self._is_running = False

    def __call__(self, hear: Callable[[TierEvents], None] | None) -> None:
        """kv.events.relay.Watch"""
        self._hear = hear
        if hear is None:
            if self._link is not None:
                self._link.close()
        elif self._link is not None:
            self._spawn(self._ask(self._link), "ask for tiers")
        elif not self._is_running:
            self._is_running = True
            self._spawn(self._follow(), "watch tiers")

    async def _ask(self, link: TierLink) -> None:
        with suppress(EOFError):
            await link.say(WatchTiers(True))

    async def _follow(self) -> None:
        config = self._machine.config
        while self._hear is not None:
            self._link = self._machine.connect()
            if self._link is None:
                await asyncio.sleep(_RETRY_S)
                continue
            with suppress(EOFError):
                await self._link.say(Join(config.numerics_id, config.block_bytes))
                await self._link.say(WatchTiers(True))
                while True:
                    message = await self._link.hear()
                    if isinstance(message, TierEvents) and self._hear is not None:
                        self._hear(message)
            self._link = None
        self._is_running = False
