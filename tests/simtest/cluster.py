"""A whole cluster on virtual time: the live gateway, real engine shells, links that break, hardware that fails.

A seeded scenario is served by one or several workers while faults of the seed hit them. Checked are

    each request    ends once, with the tokens, log probabilities and reason of its solo run, whatever failed under it
    poison          a request that ends every engine ends with its own error, after a bounded number of deaths
    each event      leaves the books of the gateway consistent (Gateway.check), and those of engines (EngineCore.check)
    at the end      the gateway's books are empty; no engine holds a request, a block or a reservation
    liveness        a hang is a Deadlock, a run that goes on for ever a TimeLimit (sim.loop)

`PYTHONPATH=tests python -m simtest.cluster --seed N` repeats one seed. The digest of a run covers each
output and its time; it is equal on every machine and under every PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from simtest.at_random import Copycat, Wanderlust
from simtest.cluster_kinds import MAKERS, Cluster
from simtest.cluster_stores import FACTS, Stores
from simtest.faults import strike
from tokenmill.cluster.events import Effects, GatewayEvent, GivenUp
from tokenmill.cluster.pools import decision_named
from tokenmill.cluster.rescheduling import policy_named
from tokenmill.core.block import BlockKey
from tokenmill.core.effects import Event
from tokenmill.core.errors import EngineFailed, Overloaded
from tokenmill.core.events import FINISH_ABORT
from tokenmill.core.ports import Executor
from tokenmill.sim.executor import ToyExecutor
from tokenmill.sim.front import Front
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.network import Network
from tokenmill.sim.peers import ToyNetwork
from tokenmill.sim.run import ClientStream, check_saved, check_stream
from tokenmill.sim.store import Slots
from tokenmill.sim.tier_store import ToyTiers
from tokenmill.sim.worker import Build, Worker
from tokenmill.sim.workload import VOCAB_SIZE, Scenario

_LIMIT_S = 200.0
_SETTLE_S, _SETTLE_QUIET_S = 31.0, 15.0
"""As long as an offer of KV is kept whose release was lost with its link; less, where nothing failed."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """`faults`: how many of each kind; `num_left`: links that were lost or let go, `num_let_go`: of those, the ones of
    silent workers; `num_moved`: requests that went to another worker, `num_pulled`: blocks of KV that they took along;
    `num_copied`: prefixes that came to another worker's cache, `num_uncopied`: that did not;
    `num_fetched`: blocks that came from KV stores;
    `ends`: (finish reason or error kind, number of requests), sorted."""

    digest: str
    faults: dict[str, int]
    num_left: int
    num_let_go: int
    num_resumed: int
    num_poisoned: int
    num_exported: int
    num_moved: int
    num_unmoved: int
    num_pulled: int
    num_copied: int
    num_uncopied: int
    num_fetched: int
    ends: tuple[tuple[str, int], ...]
    duration_s: float


@dataclass(slots=True)
class _Clients:
    """All clients of a scenario, and what the gateway did for them."""

    scenario: Scenario
    loop: VirtualLoop
    stored: dict[tuple[int, bytes], tuple[int, tuple[int, ...]]]
    streams: dict[str, ClientStream] = field(init=False)
    digest: blake2b = field(default_factory=lambda: blake2b(digest_size=16))
    done: asyncio.Event = field(default_factory=asyncio.Event)
    num_ended: int = 0
    num_resumed: int = 0
    num_poisoned: int = 0
    num_exported: int = 0
    num_moved: int = 0
    num_unmoved: int = 0
    num_copied: int = 0
    num_uncopied: int = 0

    def __post_init__(self) -> None:
        self.streams = {request.id: ClientStream(request) for request in self.scenario.requests}

    def hear(self, event: GatewayEvent, effects: Effects) -> None:
        self.num_resumed += effects.resumed
        self.num_poisoned += effects.poisoned
        for moved in effects.moved:
            self.num_moved += not moved.error
            self.num_unmoved += bool(moved.error)
        for copied in effects.copied:
            self.num_copied += not copied.error
            self.num_uncopied += bool(copied.error)
        for output in effects.outputs:
            self.digest.update(f"{self.loop.time()!r} {output!r}\n".encode())
            stream = self.streams[output.request_id]
            stream.take(output)
            if output.finish_reason is not None:
                check_saved(stream, self.scenario, self.stored)
                self.num_exported += output.is_saved
        for ended in effects.ended:
            self.num_ended += 1
            stream = self.streams[ended.request.id]
            assert (stream.end is None) == (ended.reason == FINISH_ABORT), ended
            if self.num_ended == len(self.streams):
                self.done.set()

    async def call(self, front: Front) -> None:
        for arrival in self.scenario.arrivals:
            await asyncio.sleep(max(0.0, arrival.at_s - self.loop.time()))
            front.open(arrival.requests, f"client {len(arrival.requests) % 3}")

    async def cancel(self, front: Front) -> None:
        for cancellation in self.scenario.cancellations:
            await asyncio.sleep(max(0.0, cancellation.at_s - self.loop.time()))
            self.streams[cancellation.request_id].is_cancelled = True
            front.handle(GivenUp(cancellation.request_id, FINISH_ABORT))


def _new_front(cluster: Cluster, loop: VirtualLoop, clients: _Clients, seed: int) -> Front:
    front = Front(loop, clients.hear, limit_s=cluster.limit_s, grace_s=cluster.grace_s)
    gateway = front.gateway
    gateway.is_shared = cluster.is_shared
    gateway.pools.decision = decision_named(cluster.splits)
    at_random = Wanderlust(random.Random(f"moves {seed}"))
    gateway.reviews.policy = at_random if cluster.migration == "random" else policy_named(cluster.migration)
    gateway.reviews.replication = Copycat(random.Random(f"copies {seed}")) if cluster.copies else None
    return front


def _beginning(
    cluster: Cluster,
    loop: VirtualLoop,
    peers: ToyNetwork,
    stored: dict[tuple[int, BlockKey], Slots] | None,
    stores: Stores | None,
    ends_of_stores: list[ToyTiers],
) -> Callable[[str, str], tuple[Executor, tuple[Event, ...]]]:
    """How a worker at an address begins a life: with a new executor and what its engine is told first. The ends of
    stores that executors have go to `ends_of_stores`."""
    scenario = cluster.scenario

    def begin(address: str, incarnation: str) -> tuple[Executor, tuple[Event, ...]]:
        executor = ToyExecutor(
            scenario.config,
            loop,
            vocab_size=VOCAB_SIZE,
            costs=scenario.costs,
            drafter=scenario.drafter,
            peers=(peers, address),
            incarnation=incarnation,
            machine=None if stores is None else stores.of(address),
        )
        if executor.tiers is not None:
            ends_of_stores.append(executor.tiers)
        if stores is not None:
            return executor, (stores.opened(),)
        if stored is None:
            return executor, ()
        executor.store.blocks = stored
        return executor, (executor.store.opened(),)

    return begin


def run_cluster(cluster: Cluster, seed: int) -> ClusterReport:
    """Run to the end of every request and check everything; an AssertionError or a Violation tells what is wrong."""
    loop = VirtualLoop(limit_s=_LIMIT_S)
    scenario, counts = cluster.scenario, Counter[str]()
    stored = None if scenario.stored is None else dict(scenario.stored)  # outlives workers, and they share it
    clients = _Clients(scenario, loop, {} if stored is None else stored)
    front = _new_front(cluster, loop, clients, seed)
    peers = ToyNetwork(seed, cluster.peers_fail)
    rng = random.Random(f"stores {seed}")
    ends_of_stores: list[ToyTiers] = []
    stores = Stores(cluster.stores, scenario.config, loop, rng, cluster.lies) if cluster.stores else None
    begin = _beginning(cluster, loop, peers, stored, stores, ends_of_stores)

    async def main() -> None:
        names = [f"w{number}" for number in range(len(cluster.pools))]
        build = Build(scenario.config, begin, peers, cluster.check_rate, are_linked=cluster.are_linked)
        if stores is not None:
            stores.start()
            build = replace(build, stores=stores.watches(names), tiers=FACTS)
        network = Network(loop, cluster.shape, random.Random(f"network {seed}"))
        workers = [
            Worker(f"w{number}", pool, build, network, loop, random.Random(f"w{number} {seed}"), [front.attach])
            for number, pool in enumerate(cluster.pools)
        ]
        for worker in workers:
            loop.spawn(worker.serve(), worker.name)
        loop.spawn(front.watch(), "watch")
        loop.spawn(clients.call(front), "call")
        loop.spawn(clients.cancel(front), "cancel")
        striking = loop.spawn(
            strike(cluster.faults, workers, [front], random.Random(f"faults {seed}"), counts), "faults"
        )
        crashing = None if stores is None else loop.spawn(stores.crash(1.0), "stores")
        await clients.done.wait()
        striking.cancel()
        if crashing is not None:
            crashing.cancel()
        await _settle(workers, _SETTLE_S if cluster.faults.number else _SETTLE_QUIET_S)

    loop.run(main())
    gateway = front.gateway
    assert not gateway.num_open and not gateway.request_queue.num_tokens and not gateway.request_queue.num_waiting
    assert not front.refused, front.refused
    ends = Counter(_check(stream, cluster, front.num_left) for stream in clients.streams.values())
    if cluster.poison and not cluster.faults.number:
        assert front.num_left <= 5, f"{front.num_left} engines died of one request"
    num_fetched = sum(each.num_fetched for each in ends_of_stores)
    return _report(clients, front, counts, ends, peers.num_pulled, num_fetched, loop.time())


def _report(
    clients: _Clients,
    front: Front,
    counts: Counter[str],
    ends: Counter[str],
    num_pulled: int,
    num_fetched: int,
    duration_s: float,
) -> ClusterReport:
    return ClusterReport(
        clients.digest.hexdigest(),
        dict(sorted(counts.items())),
        front.num_left,
        front.num_let_go,
        clients.num_resumed,
        clients.num_poisoned,
        clients.num_exported,
        clients.num_moved,
        clients.num_unmoved,
        num_pulled,
        clients.num_copied,
        clients.num_uncopied,
        num_fetched,
        tuple(sorted(ends.items())),
        duration_s,
    )


async def _settle(workers: Sequence[Worker], most_s: float) -> None:
    """Faults are over: after a while no worker has anything of a request that is over."""
    for worker in workers:
        worker.hardware.thaw()
    began_s = asyncio.get_running_loop().time()
    while left := {each.name: (each.core.open_ids, each.core.stats()) for each in workers if _is_busy(each)}:
        await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - began_s < most_s, f"still there: {left}"
    for worker in workers:
        worker.core.check()
        stats = worker.core.stats()
        assert stats.num_held_blocks == stats.num_running == stats.num_waiting == 0, f"{worker.name}: {stats}"


def _is_busy(worker: Worker) -> bool:
    core = worker.core
    return not worker.is_up or core.has_work or core.stats().num_held_blocks > 0 or bool(core.open_tickets)


def _check(stream: ClientStream, cluster: Cluster, num_left: int) -> str:
    request = stream.request
    if stream.end is None:
        assert stream.is_cancelled, f"{request.id} was never answered"
        return FINISH_ABORT
    if stream.end.error_kind == EngineFailed.kind:
        # Where more links were lost, a request may have been unlucky as often as a poison one would be.
        assert request.id == cluster.poison or (cluster.faults.number and num_left > 3), (
            f"{request.id}: {stream.end.error}"
        )
    assert not (stream.end.error_kind == Overloaded.kind and stream.tokens), f"{request.id} was refused when resumed"
    return check_stream(stream, cluster.scenario, 1)


def run_seed(seed: int, kind: str = "deaths") -> ClusterReport:
    return run_cluster(MAKERS[kind](seed), seed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m simtest.cluster", description="Let a cluster fail.")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    parser.add_argument("--kind", choices=MAKERS, default="faults", help="what happens")
    options = parser.parse_args(arguments)
    logging.getLogger("tokenmill").addHandler(logging.NullHandler())
    for seed in range(options.seed, options.seed + options.count):
        report = run_seed(seed, options.kind)
        faults = ", ".join(f"{number} {kind}" for kind, number in report.faults.items()) or "no faults"
        print(
            f"seed {seed}: {report.digest} {faults}; {report.num_left} links lost, {report.num_let_go} of them silent; "
            f"{report.num_moved} moved with {report.num_pulled} blocks, {report.num_unmoved} not; "
            f"{report.num_fetched} blocks from stores; {report.num_copied} prefixes copied, {report.num_uncopied} not; "
            f"{report.num_resumed} resumed, {report.num_poisoned} given up, {report.duration_s:.3f} s virtual; "
            + ", ".join(f"{number} {end}" for end, number in report.ends)
        )


if __name__ == "__main__":
    main()
