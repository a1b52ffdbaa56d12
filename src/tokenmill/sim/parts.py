"""The parts that workers of one simulated service share: links, cores, tiers of KV and what comes up after a crash; and
the sections of a cluster's file that describe them. docs/operate/simulate-parts.md says every key.

    [[topology.nodes]], [topology.spine]   links        [[tiers]]    KV below the pools
    [topology] file                        links of a file of their own
    [host]     cores, front end and clients             [[faults]]   what fails, and when
    [[workers]]: node, threads, cold_start_s, weights_bytes_s or weights_node

What a deployment leaves out is not simulated: without a topology KV goes over the wires of `network`, without cores
each program has as many as it wants, without faults nothing fails. A worker that comes up begins its process and reads
its weights. Weights from a store over the network share its links with everything else, so that a rack of workers that
start together waits for the store's ports; weights on a host's own disk are read one worker after the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..core.config import EngineConfig
from ..core.effects import Event, StoreOpened
from ..core.errors import ConfigError, Infeasible
from ..core.tiers import TierFacts
from ..kv.events.relay import Watch
from .cores import Host, Process
from .fault_script import Fault, FaultRunner, read_faults
from .fields import Fields
from .loop import VirtualLoop
from .shared_links import SharedLinks
from .tier_plan import TierHosts, TierSpecs, read_tiers
from .tier_store import TierWatch
from .timed_tiers import TimedTiers
from .topology import Place, Topology, read_topology
from .worker import Worker


@dataclass(frozen=True, slots=True)
class ColdStart:
    """begin_s: of the process, and all that does not depend on weights. weights_bytes: that come from the node
    `weights_node` of the topology, or at weights_bytes_s from the host's own disk; 0: none do."""

    begin_s: float = 0.0
    weights_bytes: int = 0
    weights_bytes_s: float = 2e9
    weights_node: str = ""

    @property
    def alone_s(self) -> float:
        """Without what its way over the network takes."""
        return self.begin_s + (0.0 if self.weights_node else self.weights_bytes / self.weights_bytes_s)


def read_cold_start(fields: Fields, weights_bytes: int = 0, nodes: tuple[str, ...] = ()) -> ColdStart:
    """From the fields of a table of workers: cold_start_s, weights_bytes_s or weights_node (without either, weights
    take no time). weights_bytes: of the model, 0 where its shape is not known. Raises ConfigError, which names
    the field."""
    begin_s = fields.number("cold_start_s", 0.0)
    has_disk, has_node = fields.has("weights_bytes_s"), fields.has("weights_node")
    if has_disk and has_node:
        raise fields.error(
            "weights_node", "weights come from here or from a disk (weights_bytes_s), not both; keep one"
        )
    if (has_disk or has_node) and not weights_bytes:
        key = "weights_node" if has_node else "weights_bytes_s"
        raise fields.error(key, "needs a [model]: its shape says how many bytes the weights have")
    if has_node and not nodes:
        raise fields.error("weights_node", "needs [topology], which has the nodes; give one, or weights_bytes_s")
    bytes_s = fields.number("weights_bytes_s", 2e9, is_open=True)
    node = fields.text("weights_node", among=nodes) if has_node else ""
    return ColdStart(begin_s, weights_bytes if has_disk or has_node else 0, bytes_s, node)


class ColdStarts:
    """Of all workers. starts: by worker; hosts: worker -> what it shares a disk with. num_starts, taken_s: so far, in
    all."""

    def __init__(
        self,
        starts: Mapping[str, ColdStart],
        loop: VirtualLoop,
        hosts: Mapping[str, str] | None = None,
        shared_links: SharedLinks | None = None,
    ) -> None:
        self.num_starts = 0
        self.taken_s = 0.0
        self._starts = starts
        self._loop = loop
        self._hosts = hosts or {}
        self._shared_links = shared_links
        self._free_s: dict[str, float] = {}

    async def wait(self, worker: str) -> None:
        """Returns when it can serve that has begun to start now."""
        start = self._starts.get(worker, ColdStart())
        began_s = self._loop.time()
        if start.begin_s:
            await asyncio.sleep(start.begin_s)
        if start.weights_bytes and start.weights_node and self._shared_links is not None:
            await self._shared_links.carry(start.weights_node, worker, start.weights_bytes)
        elif start.weights_bytes:
            host, now = self._hosts.get(worker, worker), self._loop.time()
            self._free_s[host] = max(now, self._free_s.get(host, 0.0)) + start.weights_bytes / start.weights_bytes_s
            await asyncio.sleep(self._free_s[host] - now)
        self.num_starts += 1
        self.taken_s += self._loop.time() - began_s


HOST = "host"
"""Of workers that have no node: they are all on it."""


class FrontCostModel(Protocol):
    """What front ends compute, in seconds of one core, and how long calls and tokens are under way besides.

    front_s, front_delay_s   before a call of a prompt is with an engine
    back_s, back_delay_s     for the tokens of a step's rows before they are with the clients
    end_s                    for an answer after its last token
    """

    def front_s(self, num_prompt_tokens: int) -> float: ...

    def front_delay_s(self, num_prompt_tokens: int) -> float: ...

    def back_s(self, num_rows: int) -> float: ...

    def back_delay_s(self) -> float: ...

    def end_s(self) -> float: ...


class FrontCosts(NamedTuple):
    """The simplest FrontCostModel: seconds for each call, token of its prompt, step that is heard of, token of an
    answer."""

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0

    def front_s(self, num_prompt_tokens: int) -> float:
        return self.request_s + self.prompt_token_s * num_prompt_tokens

    def front_delay_s(self, num_prompt_tokens: int) -> float:
        return 0.0

    def back_s(self, num_rows: int) -> float:
        return self.step_s + self.token_s * num_rows

    def back_delay_s(self) -> float:
        return 0.0

    def end_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class CorePlan:
    """cores: of each node; 0: more than are wanted. front: what the front end computes, None: nothing. calibration: a
    file that says so, which is not read here; "": that of a worker, if it has one. client_s: what clients compute for
    each event that they hear. front_shares, clients_share: they are on the first worker's node,
    else on cores of their own."""

    cores: int = 0
    front: FrontCostModel | None = None
    client_s: float = 0.0
    front_shares: bool = True
    clients_share: bool = True
    calibration: str = ""


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """topology: where links are shared as they are in it; tiers, faults: as read."""

    topology: Topology | None = None
    tiers: TierSpecs | None = None
    faults: tuple[Fault, ...] = ()
    cores: CorePlan = CorePlan()


NO_PARTS = PartsPlan()


class Site(NamedTuple):
    """Of one worker. threads: of its steps; cold: how a further life of it begins."""

    name: str
    config: EngineConfig
    node: str = ""
    gpus: tuple[int, ...] = ()
    threads: int = 1
    cold: ColdStart = ColdStart()


def read_cores(fields: Fields) -> CorePlan:
    """From `[host]`. Raises ConfigError, which names the field."""
    cores = fields.count("cores", 0)
    costs = FrontCosts(
        fields.number("front_request_s", 0.0),
        fields.number("front_prompt_token_s", 0.0),
        fields.number("front_step_s", 0.0),
        fields.number("front_token_s", 0.0),
    )
    plan = CorePlan(
        cores,
        costs if any(costs) else None,
        fields.number("client_event_s", 0.0),
        fields.flag("front_shares", True),
        fields.flag("clients_share", True),
        fields.text("calibration", ""),
    )
    if plan.front is not None and plan.calibration:
        raise fields.error("calibration", "says what the front end computes, and so do front_...: give one of them.")
    fields.end()
    return plan


class Parts:
    """shared_links, tiers: None where there are none. front, clients: the processes of the front end and of all
    clients, None where they take no time; ends: of what both do after an answer, which nobody waits for."""

    def __init__(self, plan: PartsPlan, sites: Sequence[Site], loop: VirtualLoop, seed: int = 0) -> None:
        """Raises ConfigError for a worker on a node that is not there."""
        self._plan = plan
        self._loop = loop
        self._seed = seed
        self._sites = {site.name: site for site in sites}
        self._nodes = {site.name: site.node for site in sites if site.node}
        self._wiring = None
        self.shared_links: SharedLinks | None = None
        if plan.topology is not None:
            _check_places(plan.topology, sites)
            self._wiring = plan.topology.wire(Place(site.name, site.node, site.gpus) for site in sites)
            self.shared_links = SharedLinks(loop, self._wiring)
        self.tiers: TierHosts | None = None
        if plan.tiers is not None:
            rng = random.Random(f"tiers {seed}")
            self.tiers = TierHosts(plan.tiers, sites[0].config, loop, rng, self.shared_links, self._nodes)
        hosts = {site.name: site.node or HOST for site in sites}
        self.hosts = {node: Host(loop, plan.cores.cores, node) for node in dict.fromkeys(hosts.values())}
        self.cold = ColdStarts({site.name: site.cold for site in sites}, loop, hosts, self.shared_links)
        cores, first = plan.cores, self.hosts[hosts[sites[0].name]]
        apart = Host(loop, 0, "apart")
        front, clients = (first if shares else apart for shares in (cores.front_shares, cores.clients_share))
        self.front = front.process("front") if cores.front is not None else None
        self.ends = front.process("ends") if cores.front is not None else None
        self.clients = clients.process("clients") if cores.client_s else None
        self._steps: dict[str, Process] = {}
        if cores.cores:
            self._steps = {
                site.name: self.hosts[hosts[site.name]].process(f"steps {site.name}", site.threads, is_steps=True)
                for site in sites
            }

    def steps(self, worker: str) -> Process | None:
        """What computes the steps of a worker; None where its cores are its own."""
        return self._steps.get(worker)

    def store(self, worker: str, incarnation: str) -> tuple[TimedTiers | None, tuple[Event, ...]]:
        """The end of one life of a worker in the KV store of its host, and what its engine is told of it."""
        if self.tiers is None:
            return None, ()
        specs = self.tiers.specs
        return self.tiers.begin(worker, incarnation), (StoreOpened(tiers=specs.facts, writes=specs.writes),)

    @property
    def facts(self) -> tuple[TierFacts, ...]:
        """worker.Build.tiers"""
        return self.tiers.specs.facts if self.tiers is not None and self.tiers.specs.is_told else ()

    def watched(self, worker: str) -> Mapping[str, tuple[str, Watch]]:
        """worker.Build.stores"""
        if self.tiers is None or not self.tiers.specs.is_told:
            return {}
        return {worker: (self.tiers.host_of(worker), TierWatch(self.tiers.machine(worker), self._loop.spawn))}

    def strike(self, workers: Sequence[Worker]) -> FaultRunner:
        """Let faults happen from now on. Raises ConfigError for a target that is not there."""
        runner = FaultRunner(
            self._plan.faults,
            self._loop,
            {worker.name: worker for worker in workers},
            seed=self._seed,
            nodes=self._nodes,
            shared_links=self.shared_links,
            wiring=self._wiring,
            tiers=self.tiers,
            hosts=self.hosts if self._plan.cores.cores else {},
        )
        runner.start()
        return runner


def _check_places(topology: Topology, sites: Sequence[Site]) -> None:
    for number, site in enumerate(sites):
        fields = Fields({"node": site.node, "gpus": site.gpus}, f"workers[{number}]")
        fields.text("node", among=list(topology.nodes))
        num_gpus = topology.nodes[site.node].num_gpus
        if any(gpu >= num_gpus for gpu in site.gpus):
            raise fields.error("gpus", f"{site.node} has {num_gpus} GPUs, of which {list(site.gpus)} are not all there")


def no_topology(path: str) -> Topology:
    raise ConfigError("topologies cannot be read here; give their nodes")


def read_parts(fields: Fields, named: Callable[[str], Topology] = no_topology) -> PartsPlan:
    """From the whole file's fields. named: the topology in such a file. Raises ConfigError, which names the field."""
    topology = _read_topology(fields.table("topology"), named) if fields.has("topology") else None
    nodes = tuple(topology.nodes) if topology is not None else ()
    return PartsPlan(topology, read_tiers(fields, nodes=nodes), read_faults(fields), read_cores(fields.table("host")))


def _read_topology(fields: Fields, named: Callable[[str], Topology]) -> Topology:
    """In the section itself, or in the file that it names and that other clusters may name, too."""
    if not fields.has("file"):
        return read_topology(fields)
    name = fields.text("file")
    for key in ("nodes", "spine"):
        if fields.has(key):
            raise fields.error(key, f"links are described once; keep this, or file = {name!r}")
    fields.end()
    try:
        return named(name)
    except ConfigError as error:
        raise fields.error("file", error.message) from None


@dataclass(slots=True)
class Placer:
    """Puts workers on nodes, in the order of the file: each GPU is one worker's, and a worker without any goes where
    the fewest are of the nodes that have no GPU."""

    topology: Topology | None
    _num_used: dict[str, int] = field(default_factory=dict)

    def place(self, fields: Fields, num_gpus: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
        """(node, its GPUs) of each worker of a table; `node`: where all of them are. Raises Infeasible where there is
        no room."""
        topology = self.topology
        if topology is None:
            return [(fields.text("node", ""), ())] * count
        wanted = fields.text("node", "", among=list(topology.nodes))
        nodes = [wanted] if wanted else list(topology.nodes)
        found: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(count):
            node = self._next(nodes, num_gpus)
            if node is None:
                where = f"node {wanted!r}" if wanted else "the topology's nodes"
                what = f"of {count} workers of {num_gpus} GPUs {len(found)} fit on {where}; give more nodes or GPUs"
                raise fields.error("count", what, Infeasible)
            used = self._num_used.get(node, 0)
            self._num_used[node] = used + max(1, num_gpus)
            found.append((node, tuple(range(used, used + num_gpus))))
        return found

    def _next(self, nodes: list[str], num_gpus: int) -> str | None:
        assert self.topology is not None
        made, used = self.topology.nodes, self._num_used
        if num_gpus:
            return next((name for name in nodes if made[name].num_gpus - used.get(name, 0) >= num_gpus), None)
        without = [name for name in nodes if made[name].has_workers and not made[name].num_gpus]
        return min(without, key=lambda name: used.get(name, 0), default=None)


def read_cold(fields: Fields, parts: PartsPlan, weights_bytes: float) -> ColdStart:
    """How lives of the workers of a table begin. weights_bytes: of the model in one worker."""
    nodes = tuple(parts.topology.nodes) if parts.topology is not None else ()
    return read_cold_start(fields, round(weights_bytes), nodes)
