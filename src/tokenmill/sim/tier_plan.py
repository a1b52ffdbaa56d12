"""Tiers of KV below the workers' pools, as a cluster's file says them, made into stores, media and the ways to them.

    pool (HBM) <- copies -> host (DRAM) <- jobs -> disk (SSD of the host) -> remote (a store that all hosts share)

A host's tiers are shared by the workers on it. The media of disks are made for each host; there is one remote medium,
and where the topology has its node, bytes to and from it go over the network like all others.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..core.config import EngineConfig
from ..core.effects import WRITE_THROUGH, WRITES
from ..core.errors import Infeasible
from ..core.tiers import DISK, HOST, REMOTE, TIERS, USUAL_FACTS, TierFacts
from ..kv.tiers import policies
from ..kv.tiers.config import SLOT_ALIGN, TierConfig
from .fields import Fields
from .loop import VirtualLoop
from .shared_links import SharedLinks
from .tier_store import ToyMachine
from .tiers import NO_FAULTS, Medium, Pace, TierFaults, Way
from .timed_tiers import TimedTiers


@dataclass(frozen=True, slots=True)
class TierSpec:
    """kind: host, disk or remote. num_bytes: of each host; of a remote tier, in all. latency_s: of each job; of a
    device with a queue_depth, of each block. node: where a remote tier is in the topology; "" if nowhere.
    faults: of its jobs and blocks."""

    kind: str
    num_bytes: int
    read_bytes_s: float
    write_bytes_s: float
    latency_s: float
    queue_depth: int = 0
    policy: str = policies.REPLACEMENT
    admission: str = policies.ADMISSION
    node: str = ""
    faults: TierFaults = NO_FAULTS

    @property
    def pace(self) -> Pace:
        return Pace(self.latency_s, self.read_bytes_s, write_bytes_s=self.write_bytes_s, queue_depth=self.queue_depth)

    @property
    def facts(self) -> TierFacts:
        """What engines and front ends take it to be: what it is when nobody else uses it."""
        return TierFacts(self.kind, self.num_bytes, self.latency_s, self.read_bytes_s)


@dataclass(frozen=True, slots=True)
class TierSpecs:
    """tiers: nearest first; the first is host memory. shared_by: workers that have a host in common, where the topology
    does not say; writes: when blocks are saved there; is_told: whether front ends know what stores have."""

    tiers: tuple[TierSpec, ...]
    shared_by: int = 1
    writes: str = WRITE_THROUGH
    is_told: bool = True

    @property
    def facts(self) -> tuple[TierFacts, ...]:
        return tuple(tier.facts for tier in self.tiers)

    def config(self, engine: EngineConfig) -> TierConfig:
        """Of the store of one host. Raises Infeasible where a tier holds no block."""
        by_kind = {tier.kind: tier for tier in self.tiers}
        block_bytes = max(group.bytes_per_block for group in engine.groups)
        for number, tier in enumerate(self.tiers):
            if tier.num_bytes < block_bytes + SLOT_ALIGN:
                where = f"tiers[{number}].bytes"
                what = f"a block of this model's KV takes {block_bytes} bytes, so that {tier.num_bytes} hold none"
                raise Infeasible(f"{where}: {what}; give more", param=where)
        return TierConfig(
            engine.numerics_id,
            tuple(group.bytes_per_block for group in engine.groups),
            by_kind[HOST].num_bytes,
            tuple(tier.kind for tier in self.tiers[1:]),
            by_kind[DISK].num_bytes if DISK in by_kind else 0,
            block_size=engine.block_size,
            policies={kind: tier.policy for kind, tier in by_kind.items() if kind != REMOTE},
            admissions={kind: tier.admission for kind, tier in by_kind.items() if kind != HOST},
            facts=self.facts,
        )


def read_tiers(fields: Fields, name: str = "tiers", nodes: Sequence[str] = ()) -> TierSpecs | None:
    """From `[[tiers]]`, of which the host's entry says who shares it; None where there are none. nodes: of the
    topology. Raises ConfigError, which names the field."""
    tables = fields.tables(name)
    if not tables:
        return None
    tiers: list[TierSpec] = []
    shared_by, writes, is_told = 1, WRITE_THROUGH, True
    for each in tables:
        kind = each.text("kind", among=(HOST, DISK, REMOTE))
        if tiers and TIERS.index(kind) <= TIERS.index(tiers[-1].kind):
            raise each.error("kind", "tiers are named once each, nearest first: host, disk, remote")
        if not tiers and kind != HOST:
            raise each.error("kind", "the first tier is host memory; all others go through it")
        usual = USUAL_FACTS[kind]
        read_bytes_s = each.number("read_bytes_s", usual.bytes_s, is_open=True)
        if kind == HOST:
            for key in ("write_bytes_s", "queue_depth"):
                if each.has(key):
                    raise each.error(key, "host memory has none: copies take its read_bytes_s both ways; take it out")
            shared_by = each.count("shared_by", 1, least=1)
            writes = each.text("writes", WRITE_THROUGH, among=WRITES)
            is_told = each.flag("is_told", True)
        tiers.append(
            TierSpec(
                kind,
                each.size("bytes", least=1),
                read_bytes_s,
                each.number("write_bytes_s", read_bytes_s, is_open=True),
                each.number("latency_s", usual.latency_s),
                each.count("queue_depth", 0),
                each.text("policy", policies.REPLACEMENT, among=tuple(policies.REPLACEMENTS)) if kind != REMOTE else "",
                each.text("admission", policies.ADMISSION, among=tuple(policies.ADMISSIONS)) if kind != HOST else "",
                _read_node(each, nodes) if kind == REMOTE else "",
                _read_faults(each) if kind != HOST else NO_FAULTS,
            )
        )
        each.end()
    return TierSpecs(tuple(tiers), shared_by, writes, is_told)


def _read_node(each: Fields, nodes: Sequence[str]) -> str:
    node = each.text("node", "", among=nodes)
    if node and not nodes:
        raise each.error("node", f"{node!r} needs [topology], which has the nodes; give one, or take this out")
    return node


def _read_faults(each: Fields) -> TierFaults:
    return TierFaults(**{part: each.number(f"{part}_rate", 0.0, most=1.0) for part in ("fail", "lose", "spoil")})


class TierHosts:
    """Stores of a cluster: one for each host, which is made when its first worker begins. hosts: name -> the store
    there. shared_links: over which copies between pools and host memory, and what goes to a remote tier, go; None: each
    has links of its own."""

    def __init__(
        self,
        specs: TierSpecs,
        engine: EngineConfig,
        loop: VirtualLoop,
        rng: random.Random,
        shared_links: SharedLinks | None = None,
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        """nodes: worker -> its node of the topology, if there is one."""
        self.specs = specs
        self.hosts: dict[str, ToyMachine] = {}
        self.media: dict[tuple[str, str], Medium] = {}
        self._config = specs.config(engine)
        self._loop = loop
        self._rng = rng
        self._shared_links = shared_links
        self._nodes = nodes or {}
        self._num_workers: dict[str, int] = {}
        self._host_of: dict[str, str] = {}

    def host_of(self, worker: str) -> str:
        """The name of the host that a worker is on; the same for each of its lives."""
        known = self._host_of.get(worker)
        if known is None:
            number = len(self._host_of) // self.specs.shared_by
            known = self._host_of[worker] = self._nodes.get(worker) or f"host{number}"
        return known

    def machine(self, worker: str) -> ToyMachine:
        host = self.host_of(worker)
        made = self.hosts.get(host)
        if made is None:
            media, ways = {}, {}
            for tier in self.specs.tiers[1:]:
                at = "" if tier.kind == REMOTE else host
                medium = self.media.get((at, tier.kind))
                if medium is None:
                    is_shared = tier.kind == REMOTE
                    medium = Medium(tier.num_bytes, self._config.block_bytes, is_shared, tier.pace)
                    self.media[at, tier.kind] = medium
                media[tier.kind] = medium
                if tier.node and self._shared_links is not None:
                    ways[tier.kind] = self._way(host, tier.node)
            faults = {tier.kind: tier.faults for tier in self.specs.tiers[1:]}
            made = ToyMachine(self._config, media, self._loop, self._rng, faults, ways)
            made.start()
            self.hosts[host] = made
        return made

    def begin(self, worker: str, incarnation: str) -> TimedTiers:
        """The end of a worker's life in the store of its host."""
        way = (
            self._way(worker, self._nodes[worker]) if self._shared_links is not None and worker in self._nodes else None
        )
        return TimedTiers(self.machine(worker), incarnation, self.specs.tiers[0].read_bytes_s, way)

    def _way(self, near: str, far: str) -> Way:
        assert self._shared_links is not None
        return partial(_carry, self._shared_links, near, far)


async def _carry(shared_links: SharedLinks, near: str, far: str, num_bytes: int, is_outward: bool) -> None:
    source, destination = (near, far) if is_outward else (far, near)
    await shared_links.carry(source, destination, num_bytes)
