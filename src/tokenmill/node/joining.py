"""An engine joins the KV store of its machine.

Where there is none yet it is waited for a little, as both start together; after that the engine serves without tiers,
and is told of them when the store is there. One that refuses ends the start: it has the KV of another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.effects import Event, StoreOpened
from ..core.errors import ConfigError
from ..core.events import Ready
from ..core.tiers import TierFacts
from ..core.units import format_bytes
from ..kv.connector.worker.tiers import TierCopies
from ..kv.transfer.client import StoreClient

if TYPE_CHECKING:
    from .load import Engine

JOIN_S = 10.0
"""A store that opens a large folder on a slow disk takes seconds."""

_FIRST_S, _LONGEST_S = 0.02, 2.0

log = logging.getLogger(__name__)


async def join_store(engine: Engine, ready: Ready, within_s: float = JOIN_S) -> Ready:
    """What front ends are told of an engine, with the tiers of its store, if it was given one. Raises ConfigError where
    the store refuses it."""
    path = engine.settings.spec.kv_store
    if path is None:
        return ready
    facts = ready.worker._replace(kv_store=_store_id(ready.worker.host, path))
    try:
        async with asyncio.timeout(within_s):
            await _join(engine, ready, path)
    except TimeoutError:
        log.warning("No KV store answers at %s; the engine serves without, and joins when there is one.", path)
        return replace(ready, worker=facts, facts=_with(ready.facts, f"none yet: no KV store answers at {path}"))
    tiers = engine.tiers
    said = f"{_described(tiers)}; {engine.settings.spec.kv_writes}"
    return replace(ready, worker=facts, tiers=tiers, facts=_with(ready.facts, said))


def _with(facts: tuple[tuple[str, str], ...], tiers: str) -> tuple[tuple[str, str], ...]:
    """Before what is said of memory."""
    at = next((n for n, (name, _) in enumerate(facts) if name == "memory"), len(facts))
    return (*facts[:at], ("kv_tiers", tiers), *facts[at:])


@asynccontextmanager
async def joining_later(engine: Engine, ready: Ready, hear: Callable[[Event], None]) -> AsyncIterator[None]:
    """While this is open a store that was not there is joined when it comes; the engine hears of it, and of one that
    was away and is back."""
    path = engine.settings.spec.kv_store
    if path is None:
        yield
        return
    task = asyncio.create_task(_tell_when_there(engine, ready, path, hear), name="kv-joining")
    try:
        yield
    finally:
        task.cancel()
        if (copies := engine.worker.executor.tiers) is not None:
            copies.when_rejoined(lambda: None)


async def _tell_when_there(engine: Engine, ready: Ready, path: str, hear: Callable[[Event], None]) -> None:
    def tell() -> None:
        hear(StoreOpened(tiers=engine.tiers, writes=engine.settings.spec.kv_writes))

    if not engine.tiers:
        try:
            await _join(engine, ready, path)
        except ConfigError as error:
            log.error("The engine serves without KV tiers: %s", error.message)
            return
        log.warning("The engine has joined the KV store at %s.", path)
        tell()
    copies = engine.worker.executor.tiers
    assert copies is not None
    copies.when_rejoined(tell)


async def _join(engine: Engine, ready: Ready, path: str) -> None:
    """Waits for a store that is there. Raises ConfigError."""
    wait_s, pools = _FIRST_S, engine.worker.pools
    sizes = [pool.group.bytes_per_block for pool in pools]
    worker = ready.worker
    while True:
        with contextlib.suppress(OSError):
            client = await StoreClient.connect(path, ready.numerics_id, sizes, worker.id, worker.incarnation)
            engine.worker.executor.use_tiers(TierCopies(pools, client))
            return
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_S)


def _described(tiers: tuple[TierFacts, ...]) -> str:
    return ", ".join(tier.name + (f" {format_bytes(tier.num_bytes)}" if tier.num_bytes else "") for tier in tiers)


def _store_id(host: str, path: str) -> str:
    """Equal for all who use this socket of this machine."""
    return hashlib.sha256(f"{host}\0{os.path.abspath(path)}".encode()).hexdigest()[:16]
