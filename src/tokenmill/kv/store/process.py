"""The life of a KV store's process: memory, socket, tiers, and its end.

It ends when its parent does, or on SIGTERM: then what is to be on disk and is not yet is written, within FLUSH_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket

from ...core.errors import ConfigError
from ...core.units import format_bytes
from ...net.clock import MonotonicClock
from ...net.lifeline import exit_when_parent_ends
from ...node.machine import MemoryReader, MemoryState
from ...node.pressure import Pressure
from ..transfer.arena import SharedArena
from .build import parts_maker
from .launch import StoreLaunch
from .options import LEAST_HOST_BYTES
from .server import KVStore

log = logging.getLogger(__name__)

QUIET_S = 30.0
PIECES = 16

FLUSH_S = 10.0
LOOK_S = 1.0


async def keep_store(launch: StoreLaunch) -> None:
    """Serve until told to end. Raises TokenmillError where the store cannot be as it was asked."""
    # The manager has millions of objects and no cycles of them: to walk them all would hold everybody up for seconds.
    gc.freeze()
    gc.set_threshold(10_000, 100, 1_000_000)
    try:
        arena = SharedArena(launch.options.host_bytes)
    except OSError as error:
        asked = format_bytes(launch.options.host_bytes)
        raise ConfigError(f"--kv-host {asked} cannot be had: {error.strerror}.", param="kv_host") from error
    clock = MonotonicClock()
    elastic = Elastic(arena.num_bytes, LEAST_HOST_BYTES, MemoryReader().read().available_bytes)
    store = KVStore(arena, parts_maker(launch.options, launch.block_size), clock, lambda: _host_counts(arena, elastic))
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    if launch.lifeline_fd >= 0:
        exit_when_parent_ends(
            launch.lifeline_fd, grace_s=FLUSH_S + 5, tell=lambda: loop.call_soon_threadsafe(ending.set)
        )
    with socket.socket(fileno=launch.listener_fd) as listener:
        serving = asyncio.create_task(store.run(listener), name="kv-store-server")
        serving.add_done_callback(lambda _: ending.set())
        watching = asyncio.create_task(_keep_to_memory(store, elastic, clock), name="kv-store-memory")
        try:
            await ending.wait()
            if not serving.done():
                await _flush(store)
        finally:
            watching.cancel()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            arena.close()


async def _flush(store: KVStore) -> None:
    with contextlib.suppress(TimeoutError, EOFError):
        async with asyncio.timeout(FLUSH_S):
            if store.desk is not None:
                await store.desk.inquire("flush")


async def _keep_to_memory(store: KVStore, elastic: Elastic, clock: MonotonicClock) -> None:
    told_bytes, memory = elastic.num_bytes, MemoryReader()
    while True:
        await asyncio.sleep(LOOK_S)
        num_bytes = elastic.look(memory.read(), store.arena.taken_bytes, clock.now())
        if num_bytes != told_bytes and store.shell is not None:
            if num_bytes < told_bytes:
                log.warning("Memory is short: the KV store takes %s at most now.", format_bytes(num_bytes))
            told_bytes = num_bytes
            store.shell.resize(num_bytes)


def _host_counts(arena: SharedArena, elastic: Elastic) -> dict[str, float]:
    return {
        "slab_bytes": arena.num_bytes,
        "taken_bytes": arena.taken_bytes,
        "may_take_bytes": elastic.num_bytes,
        "num_shrunk": elastic.num_shrunk,
        "num_grown": elastic.num_grown,
    }


class Elastic:
    """How much memory a KV store may take now: all that it was given, unless the machine is short of memory. Then it
    gives memory up at once, and takes it again piece by piece after some quiet.

    most_bytes, least_bytes: of the store. `available_bytes`: when it started. num_bytes: that it may take."""

    def __init__(self, most_bytes: int, least_bytes: int, available_bytes: int) -> None:
        self.num_bytes = most_bytes
        self.num_shrunk = self.num_grown = 0
        self._most_bytes = most_bytes
        self._least_bytes = min(least_bytes, most_bytes)
        self._pressure = Pressure(available_bytes)
        self._restless_s = 0.0

    def look(self, state: MemoryState, taken_bytes: int, now: float) -> int:
        """What the store may take from now on. taken_bytes: what it takes."""
        verdict = self._pressure.look(state, now)
        piece = -(-self._most_bytes // PIECES)
        if not verdict.is_quiet:
            self._restless_s = now
        if verdict.is_short:
            less = min(self.num_bytes, taken_bytes) - max(verdict.lacking_bytes, piece)
            less = max(less, self._least_bytes)
            self.num_shrunk += less < self.num_bytes
            self.num_bytes = min(less, self.num_bytes)
        elif self.num_bytes < self._most_bytes and now - self._restless_s >= QUIET_S:
            self.num_bytes = min(self.num_bytes + piece, self._most_bytes)
            self.num_grown += 1
        return self.num_bytes
