"""Makes a KV store's parts from options, once the first worker has told whose KV it is to keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...core.tier_jobs import Tier
from ...core.tiers import DISK, HOST, PEER, REMOTE, Join
from ...core.units import MiB
from ..tiers.config import EVERYBODY, TierConfig
from ..tiers.manager import TierManager
from ..tiers.shell import TierShell
from ..transfer.arena import SharedArena
from ..transfer.disk.tier import DiskTier
from ..transfer.remote.peer import PeerTier, check_address
from ..transfer.seal import Seal, load_key
from .options import TierOptions
from .peers import PeerService
from .server import Parts

SPARE_DISK_BYTES = 512 * MiB
"""What the disk tier leaves free for others."""

SCRUB_BYTES_S = 4 * MiB
"""How fast blocks on disk are compared with their checksums while nobody asks for them."""


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
