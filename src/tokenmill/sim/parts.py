"""The parts that workers of one simulated service share: links, cores, tiers of KV and what comes up after a crash.

What a deployment leaves out is not simulated: without a topology KV goes over the wires of `network`, without cores
each program has as many as it wants, without faults nothing fails.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..core.config import EngineConfig
from ..core.effects import Event, StoreOpened
from ..core.tiers import TierFacts
from ..kv.events.relay import Watch
from .cold_start import ColdStart, ColdStarts
from .cores import Host, Process
from .fabric import Fabric
from .fault_script import Fault, FaultRunner
from .fields import Fields
from .loop import VirtualLoop
from .tier_plan import TierHosts, TierSpecs
from .tier_watch import TierWatch
from .timed_tiers import TimedTiers
from .topology import Place, Topology
from .worker import Worker

HOST = "host"
"""Of workers that have no node: they are all on it."""


class FrontLaw(Protocol):
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
    """The simplest FrontLaw: seconds for each call, token of its prompt, step that is heard of, token of an answer."""

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
    front: FrontLaw | None = None
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
    """fabric, tiers: None where there are none. front, clients: the processes of the front end and of all clients, None
    where they take no time; ends: of what both do after an answer, which nobody waits for."""

    def __init__(self, plan: PartsPlan, sites: Sequence[Site], loop: VirtualLoop, seed: int = 0) -> None:
        """Raises ConfigError for a worker on a node that is not there."""
        self._plan = plan
        self._loop = loop
        self._seed = seed
        self._sites = {site.name: site for site in sites}
        self._nodes = {site.name: site.node for site in sites if site.node}
        self._wiring = None
        self.fabric: Fabric | None = None
        if plan.topology is not None:
            _check_places(plan.topology, sites)
            self._wiring = plan.topology.wire(Place(site.name, site.node, site.gpus) for site in sites)
            self.fabric = Fabric(loop, self._wiring)
        self.tiers: TierHosts | None = None
        if plan.tiers is not None:
            rng = random.Random(f"tiers {seed}")
            self.tiers = TierHosts(plan.tiers, sites[0].config, loop, rng, self.fabric, self._nodes)
        hosts = {site.name: site.node or HOST for site in sites}
        self.hosts = {node: Host(loop, plan.cores.cores, node) for node in dict.fromkeys(hosts.values())}
        self.cold = ColdStarts({site.name: site.cold for site in sites}, loop, hosts, self.fabric)
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
            fabric=self.fabric,
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
