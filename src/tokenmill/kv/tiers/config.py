"""How a KV store keeps its blocks: what the manager is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.config import BLOCK_SIZE, check_name
from ...core.errors import ConfigError
from ...core.tiers import DISK, HOST, NO_PLACE, REMOTE, TIERS, USUAL_FACTS, TierFacts
from . import policies
from .replacement import Replacement, TierAdmission

SLOT_ALIGN = 4096
"""Slots start at multiples of a page, so that a disk may read straight into them."""

EVERYBODY = "*"
"""In quotas: each owner that is not named."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """block_bytes      of each KV group
    host_bytes          of host memory; what is not used of it is not taken from the system
    tiers               those below host memory, nearest first
    disk_bytes          of the disk tier
    block_size          tokens of a block
    told_group          the place of the KV group whose blocks WatchTiers tells of: layers that see everything
    policies            tier (host, disk) -> which block is given up first (policies.REPLACEMENTS)
    admissions          tier (disk, remote) -> which blocks are written there (policies.ADMISSIONS)
    fills_disk          whether all blocks are written to a disk that has room, whatever its admission says
    quotas              tier (host, disk) -> owner, or EVERYBODY -> bytes; no other limit. Owner "" is only limited by
                        name
    write_bytes_s       tier -> bytes a second that may be written, on average over `burst_s`; without one: no limit
    pinned_share        of a tier: what is pinned beyond it is not kept better than the rest
    client_share        of host memory: what one client's fetches may hold at once; all clients' together: lease_share.
                        grant_share: what may be granted to writers at once; promote_share: filled ahead of fetches
    job_bytes           most bytes of one job of a tier
    saves               most jobs that write to a tier at once
    find_timeout_s      a Find is answered after so long with what is known by then
    fetch_timeout_s     after so long what has not come of a Fetch is missing, and a shared Store has failed
    present_s, absent_s how long what a shared tier said of a block is believed
    num_remembered      most blocks of which it is
    facts               what tiers take, as measured; without one: as usual for its kind
    """

    numerics_id: str
    block_bytes: tuple[int, ...]
    host_bytes: int
    tiers: tuple[str, ...] = ()
    disk_bytes: int = 0
    block_size: int = BLOCK_SIZE
    told_group: int = 0
    policies: Mapping[str, str] = field(default_factory=dict)
    admissions: Mapping[str, str] = field(default_factory=dict)
    fills_disk: bool = True
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    write_bytes_s: Mapping[str, float] = field(default_factory=dict)
    burst_s: float = 10.0
    pinned_share: float = 0.5
    client_share: float = 0.5
    lease_share: float = 0.75
    grant_share: float = 0.5
    promote_share: float = 0.125
    job_bytes: int = 8 << 20
    saves: int = 2
    find_timeout_s: float = 0.5
    fetch_timeout_s: float = 30.0
    present_s: float = 60.0
    absent_s: float = 5.0
    num_remembered: int = 65536
    facts: tuple[TierFacts, ...] = ()
    slot_align: int = SLOT_ALIGN

    def __post_init__(self) -> None:
        if not self.block_bytes or min(self.block_bytes) < 1:
            raise ConfigError(f"block_bytes must be of one group at least, and positive, got {self.block_bytes}.")
        most = max(map(self.slot_bytes, range(len(self.block_bytes))))
        if self.host_bytes < most:
            raise ConfigError(
                f"kv_host must hold one block at least, {most} bytes, got {self.host_bytes}.", param="kv_host"
            )
        for tier in self.tiers:
            check_name(tier, TIERS[1:], "tiers")
        if tuple(sorted(self.tiers, key=TIERS.index)) != self.tiers or len(set(self.tiers)) != len(self.tiers):
            raise ConfigError(f"tiers must be named once each, nearest first, got {self.tiers}.")
        if DISK in self.tiers and self.disk_bytes < max(self.block_bytes):
            raise ConfigError(
                f"kv_disk must hold one block at least, {max(self.block_bytes)} bytes, got {self.disk_bytes}.",
                param="kv_disk",
            )
        for tier in (HOST, DISK):
            policies.check(self.policies.get(tier, policies.REPLACEMENT))
        for tier in (DISK, REMOTE):
            policies.check_admission(self.admissions.get(tier, policies.ADMISSION))
        if not NO_PLACE <= self.told_group < len(self.block_bytes):
            raise ConfigError(f"told_group must be the place of a group, or {NO_PLACE}, got {self.told_group}.")

    def slot_bytes(self, group: int) -> int:
        """Of host memory for a block."""
        return -(-self.block_bytes[group] // self.slot_align) * self.slot_align

    def tier_bytes(self, tier: str) -> int:
        return {HOST: self.host_bytes, DISK: self.disk_bytes}.get(tier, 0)

    def replacement(self, tier: str) -> Replacement:
        return policies.pick(self.policies.get(tier, policies.REPLACEMENT), self.tier_bytes(tier))

    def admission(self, tier: str) -> TierAdmission:
        # A tier whose size is not known remembers as much as the disk would, or ten times host memory.
        num_bytes = self.tier_bytes(tier) or self.disk_bytes or 10 * self.host_bytes
        return policies.pick_admission(self.admissions.get(tier, policies.ADMISSION), num_bytes)

    def tier_facts(self, tier: str) -> TierFacts:
        known = {facts.name: facts for facts in self.facts}
        return (known.get(tier) or USUAL_FACTS[tier])._replace(num_bytes=self.tier_bytes(tier))
