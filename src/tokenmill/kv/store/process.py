"""The life of a KV store's process: what it is told, its memory, socket and tiers, and its end.

It ends when its parent does, or on SIGTERM: then what is to be on disk and is not yet is written, within FLUSH_S. Its
parts are made once the first worker has told whose KV it is to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...core.config import BLOCK_SIZE
from ...core.errors import ConfigError
from ...core.tiers import DISK, HOST, PEER, REMOTE, Join, Tier
from ...core.units import MiB, format_bytes
from ...net.child_process import exit_when_parent_ends
from ...net.system import MonotonicClock
from ...node.machine import MemoryReader, MemoryState
from ...node.memory import Pressure
from ..tiers.config import EVERYBODY, TierConfig
from ..tiers.manager import TierManager
from ..tiers.shell import TierShell
from ..transfer.arena import SharedArena
from ..transfer.disk.tier import DiskTier
from ..transfer.remote.peer import PeerTier, check_address
from ..transfer.seal import Seal, load_key
from .options import LEAST_HOST_BYTES, TierOptions
from .peers import PeerService
from .server import KVStore, Parts

log = logging.getLogger(__name__)
SPARE_DISK_BYTES = 512 * MiB
"""What the disk tier leaves free for others."""
SCRUB_BYTES_S = 4 * MiB
"""How fast blocks on disk are compared with their checksums while nobody asks for them."""
QUIET_S = 30.0
PIECES = 16
FLUSH_S = 10.0
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreLaunch:
    """What the process of a KV store is told, as JSON between two processes.

    block_size   tokens of a block
    listener_fd     inherited socket on which workers join
    lifeline_fd     inherited read end of a pipe that closes when the parent ends
    report_fd       inherited write end of a pipe that takes one line, only where the store cannot be as it was asked
    log_level, log_format   of its own messages (cli.logs)
    """

    options: TierOptions
    block_size: int = BLOCK_SIZE
    listener_fd: int = -1
    lifeline_fd: int = -1
    report_fd: int = -1
    log_level: str = "warning"
    log_format: str = "text"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        fields: dict[str, Any] = json.loads(data)
        options = fields["options"]
        quota = tuple((owner, num_bytes) for owner, num_bytes in options["kv_quota"])
        return cls(**{**fields, "options": TierOptions(**{**options, "kv_quota": quota})})


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
            if store.inquiries is not None:
                await store.inquiries.inquire("flush")


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
        level = self._pressure.look(state, now)
        piece = -(-self._most_bytes // PIECES)
        if not level.may_grow:
            self._restless_s = now
        if level.is_short:
            less = min(self.num_bytes, taken_bytes) - max(level.lacking_bytes, piece)
            less = max(less, self._least_bytes)
            self.num_shrunk += less < self.num_bytes
            self.num_bytes = min(less, self.num_bytes)
        elif self.num_bytes < self._most_bytes and now - self._restless_s >= QUIET_S:
            self.num_bytes = min(self.num_bytes + piece, self._most_bytes)
            self.num_grown += 1
        return self.num_bytes


def check_store(options: TierOptions) -> None:
    """What can be told to be wrong before a worker joins. Raises ConfigError."""
    keys = ((options.kv_key_file, "--kv-key-file"), (options.kv_disk_key, "--kv-disk-key"))
    for key in [load_key(path, flag) for path, flag in keys if path is not None]:
        Seal(key, "check", "")  # raises where the package is missing
    for address in options.peers:
        check_address(address)
    if options.kv_remote is not None:
        from ..transfer.remote.tier import open_backend

        open_backend(options.kv_remote)[0].close()


def parts_maker(options: TierOptions, block_size: int) -> Callable[[Join, SharedArena], Parts]:
    """What it returns raises ConfigError where the blocks do not fit."""

    def make(join: Join, arena: SharedArena) -> Parts:
        key = load_key(options.kv_key_file) if options.kv_key_file is not None else b""
        tiers = _tiers(options, join, arena, key)
        disk = tiers.get(DISK)
        disk_bytes = disk.capacity_bytes if isinstance(disk, DiskTier) else 0
        manager = TierManager(tier_config(options, join, arena.num_bytes, block_size, disk_bytes))
        return Parts(manager, tiers, _peers_server(options, join, arena, key))

    return make


def tier_config(options: TierOptions, join: Join, host_bytes: int, block_size: int, disk_bytes: int = 0) -> TierConfig:
    """disk_bytes: what blocks on disk may have together, without what is written around them. Raises ConfigError."""
    quotas = {owner or EVERYBODY: num_bytes for owner, num_bytes in options.quotas.items()}
    kept_here = [tier for tier in options.tiers if tier in (HOST, DISK)]
    policy, rate = options.kv_tier_policy, options.kv_disk_write_rate
    return TierConfig(
        join.numerics_id,
        join.block_bytes,
        host_bytes,
        options.tiers[1:],
        disk_bytes=disk_bytes,
        block_size=block_size,
        policies={} if policy is None else dict.fromkeys(kept_here, policy),
        # What is used here for the first time may be wanted on another machine next.
        admissions={REMOTE: "all"},
        quotas=dict.fromkeys(kept_here, quotas) if quotas else {},
        write_bytes_s={} if rate is None else {DISK: rate},
    )


def _tiers(options: TierOptions, join: Join, arena: SharedArena, key: bytes) -> dict[str, Tier]:
    """Those below host memory."""
    tiers: dict[str, Tier] = {}
    if options.disk is not None:
        folder, num_bytes = options.disk
        tiers[DISK] = DiskTier(
            folder,
            join.numerics_id,
            join.block_bytes,
            num_bytes,
            arena.view,
            None if options.kv_disk_key is None else load_key(options.kv_disk_key, "--kv-disk-key"),
            spare_bytes=SPARE_DISK_BYTES,
            scrub_bytes_s=SCRUB_BYTES_S,
        )
    if options.kv_remote is not None:
        from ..transfer.remote import RemoteTier

        tiers[REMOTE] = RemoteTier(options.kv_remote, join.numerics_id, join.block_bytes, arena.view, key)
    if options.peers:
        tiers[PEER] = PeerTier(options.peers, join.numerics_id, join.block_bytes, arena.view, key)
    return tiers


def _peers_server(
    options: TierOptions, join: Join, arena: SharedArena, key: bytes
) -> Callable[[TierShell, asyncio.AbstractEventLoop], PeerService] | None:
    address = options.kv_peer_address
    if address is None:
        return None

    def serve(shell: TierShell, loop: asyncio.AbstractEventLoop) -> PeerService:
        service = PeerService(shell, join, arena.view, key, loop)
        service.start(address)
        return service

    return serve
