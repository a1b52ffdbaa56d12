"""A whole cluster on virtual time: the live gateway, real engine shells, links that break, hardware that fails.

A seeded scenario is served by one or several workers while faults of the seed hit them. Checked are

    each request    ends once, with the tokens, log probabilities and reason of its solo run, whatever failed under it
    poison          a request that ends every engine ends with its own error, after a bounded number of deaths
    each event      leaves the books of the gateway consistent (Gateway.check), and those of engines (EngineCore.check)
    at the end      the gateway's books are empty; no engine holds a request, a block or a reservation
    liveness        a hang is a Deadlock, a run that goes on for ever a TimeLimit (sim.loop)

`python -m tokenmill.sim.cluster --seed N` repeats one seed. The digest of a run covers each output and its time; it is
equal on every machine and under every PYTHONHASHSEED.
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

from ..cluster.events import Effects, GatewayEvent, GivenUp
from ..cluster.pools import decision_named
from ..cluster.rescheduling import policy_named
from ..core.effects import Event
from ..core.errors import EngineFailed, Overloaded
from ..core.events import FINISH_ABORT
from ..core.ports import Executor
from ..sched.admission import refusal
from .at_random import Copycat, Wanderlust
from .check import ClientStream, check_saved, check_stream
from .executor import ToyExecutor
from .faults import CRASH, FLIP, FREEZE, HOLD, KINDS, LEAVE, Faults, strike
from .front import Front
from .loop import VirtualLoop
from .network import NO_DELAY, Network, Shape
from .peers import ToyNetwork
from .worker import POISON_SEED, Build, Worker
from .workload import VOCAB_SIZE, Arrival, Scenario, make_scenario

_LIMIT_S = 200.0
_SETTLE_S, _SETTLE_QUIET_S = 31.0, 15.0
"""As long as an offer of KV is kept whose release was lost with its link; less, where nothing failed."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """pools      of the workers, one each
    is_shared  whether choices have places in turn
    poison     id of the request that ends engines; "": there is none
    limit_s    after which a worker is lost that gives no sign of life
    grace_s    for how long a worker that was let go may still be heard
    splits, migration  names of the policies of `cluster.pools` and `cluster.rescheduling`, and "random" moves
    copies     whether prefixes are copied from worker to worker, at random
    peers_fail   share of transfers of KV between workers that are lost
    check_rate   share of the events of an engine after which its books are checked
    """

    scenario: Scenario
    pools: tuple[str, ...]
    faults: Faults
    is_shared: bool = True
    poison: str = ""
    shape: Shape = NO_DELAY
    limit_s: float = 2.0
    grace_s: float = 0.0
    splits: str = "never"
    migration: str = "off"
    copies: bool = False
    peers_fail: float = 0.0
    check_rate: float = 0.05


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """`faults`: how many of each kind; `num_left`: links that were lost or let go, `num_let_go`: of those, the ones of
    silent workers; `num_moved`: requests that went to another worker, `num_pulled`: blocks of KV that they took along;
    `num_copied`: prefixes that came to another worker's cache, `num_uncopied`: that did not;
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
    ends: tuple[tuple[str, int], ...]
    duration_s: float


def make_deaths(seed: int) -> Cluster:
    """Engines that crash, at steps and moments of the seed's choice; in some runs one request is poison."""
    rng = random.Random(f"deaths {seed}")
    scenario = replace(make_scenario(seed), failure_rate=0.0)
    poison = ""
    lasting = [request for request in scenario.requests if refusal(request, scenario.config, 0) is None]
    if lasting and rng.random() < 0.3:
        poison = rng.choice(lasting).id
        scenario = replace(scenario, arrivals=tuple(_poisoned(arrival, poison) for arrival in scenario.arrivals))
    number = rng.choice([0, 0, 1]) if poison else rng.choice([1, 2, 3, 3, 10])
    return Cluster(
        scenario, ("mixed",) * rng.choice([1, 1, 2, 3]), Faults(number, (CRASH,)), rng.random() < 0.7, poison
    )


def make_faults(seed: int) -> Cluster:
    """Faults of all kinds, on a network with delays."""
    rng = random.Random(f"cluster {seed}")
    shape = Shape(rng.choice([0.0, 0.0002, 0.003]), rng.choice([0.0, 0.001]), rng.choice([0.0, 0.05]), 0.2)
    scenario = make_scenario(seed)
    costs = scenario.costs._replace(step_s=rng.choice([0.002, 0.01, 0.03]))
    return Cluster(
        replace(scenario, failure_rate=0.0, costs=costs),
        ("mixed",) * rng.choice([1, 2, 3, 4]),
        Faults(rng.choice([1, 3, 6, 12]), gap_s=rng.choice([0.05, 0.3, 0.6])),
        rng.random() < 0.7,
        shape=shape,
        limit_s=rng.choice([0.8, 2.0]),
        grace_s=rng.choice([0.0, 0.5, 5.0]),
    )


def make_zombies(seed: int) -> Cluster:
    """Workers stand still until they are let go, and a little longer; what they say then comes through."""
    rng = random.Random(f"zombies {seed}")
    scenario = make_scenario(seed)
    return Cluster(
        replace(scenario, failure_rate=0.0, costs=scenario.costs._replace(step_s=0.03)),
        ("mixed",) * rng.choice([2, 3, 4]),
        Faults(12, (FREEZE, HOLD), 0.2, (0.7, 0.8, 0.9)),
        limit_s=0.8,
        grace_s=5.0,
    )


def make_splits(seed: int) -> Cluster:
    """Prompts are computed by some workers and answers by others, one each or two."""
    rng = random.Random(f"splits {seed}")
    number = rng.choice([1, 2])
    pools = ("prefill",) * number + ("decode",) * number + ("mixed",) * rng.choice([0, 0, 1])
    quiet = Faults(rng.choice([0, 0, 2, 5]))
    return replace(make_faults(seed), pools=pools, faults=quiet, splits="always", peers_fail=rng.choice([0.0, 0.1]))


def make_moves(seed: int) -> Cluster:
    """Requests change workers at random steps, some several times."""
    rng = random.Random(f"moves {seed}")
    made = make_faults(seed)
    return replace(
        made,
        scenario=_roomy(made.scenario, rng.choice([1, 4, 10])),
        pools=("mixed",) * rng.choice([2, 3, 4]),
        faults=Faults(rng.choice([0, 0, 2, 5])),
        migration=rng.choice(["random", "random", "on"]),
        peers_fail=rng.choice([0.0, 0.1, 0.5]),
    )


def make_mixed(seed: int) -> Cluster:
    """Pools that change, splits, moves, drains and faults of all kinds at once."""
    rng = random.Random(f"mixed {seed}")
    pools = tuple(rng.choice(["prefill", "decode", "mixed"]) for _ in range(rng.choice([2, 3, 5])))
    made = make_faults(seed)
    return replace(
        made,
        scenario=_roomy(made.scenario, rng.choice([1, 4, 10])),
        pools=pools,
        faults=Faults(rng.choice([3, 6, 12]), (*KINDS, FLIP, FLIP, LEAVE)),
        splits=rng.choice(["always", "cost"]),
        migration=rng.choice(["random", "random", "on"]),
        copies=True,
        peers_fail=rng.choice([0.0, 0.1, 0.5]),
    )


MAKERS: dict[str, Callable[[int], Cluster]] = {
    "deaths": make_deaths,
    "faults": make_faults,
    "zombies": make_zombies,
    "splits": make_splits,
    "moves": make_moves,
    "mixed": make_mixed,
}


def _roomy(scenario: Scenario, times: int) -> Scenario:
    """With more blocks and rows, so that requests find room where they go, and slow steps, so that they go in time."""
    config = scenario.config
    groups = tuple(replace(group, num_blocks=group.num_blocks * times) for group in config.groups)
    config = replace(config, groups=groups, max_num_seqs=config.max_num_seqs * times)
    return replace(scenario, config=config, costs=scenario.costs._replace(step_s=0.03))


def _poisoned(arrival: Arrival, request_id: str) -> Arrival:
    requests = (replace(each, seed=POISON_SEED) if each.id == request_id else each for each in arrival.requests)
    return Arrival(arrival.at_s, tuple(requests))


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


def run_cluster(cluster: Cluster, seed: int) -> ClusterReport:
    """Run to the end of every request and check everything; an AssertionError or a Violation tells what is wrong."""
    loop = VirtualLoop(limit_s=_LIMIT_S)
    scenario, counts = cluster.scenario, Counter[str]()
    stored = None if scenario.stored is None else dict(scenario.stored)  # outlives workers, and they share it
    clients = _Clients(scenario, loop, {} if stored is None else stored)
    front = Front(loop, clients.hear, limit_s=cluster.limit_s, grace_s=cluster.grace_s)
    gateway = front.gateway
    gateway.is_shared = cluster.is_shared
    gateway.pools.decision = decision_named(cluster.splits)
    at_random = Wanderlust(random.Random(f"moves {seed}"))
    gateway.reviews.policy = at_random if cluster.migration == "random" else policy_named(cluster.migration)
    gateway.reviews.replication = Copycat(random.Random(f"copies {seed}")) if cluster.copies else None
    peers = ToyNetwork(seed, cluster.peers_fail)

    def begin(address: str, incarnation: str) -> tuple[Executor, tuple[Event, ...]]:
        executor = ToyExecutor(
            scenario.config,
            loop,
            vocab_size=VOCAB_SIZE,
            costs=scenario.costs,
            network=peers,
            address=address,
            incarnation=incarnation,
        )
        if stored is None:
            return executor, ()
        executor.store.blocks = stored
        return executor, (executor.store.opened(),)

    async def main() -> None:
        build = Build(scenario.config, begin, peers, cluster.check_rate)
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
        await clients.done.wait()
        striking.cancel()
        await _settle(workers, _SETTLE_S if cluster.faults.number else _SETTLE_QUIET_S)

    loop.run(main())
    assert not gateway.num_open and not gateway.desk.num_tokens and not gateway.desk.num_waiting
    assert not front.refused, front.refused
    ends = Counter(_check(stream, cluster, front.num_left) for stream in clients.streams.values())
    if cluster.poison and not cluster.faults.number:
        assert front.num_left <= 5, f"{front.num_left} engines died of one request"
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
        peers.num_pulled,
        clients.num_copied,
        clients.num_uncopied,
        tuple(sorted(ends.items())),
        loop.time(),
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
    parser = argparse.ArgumentParser(prog="python -m tokenmill.sim.cluster", description="Let a cluster fail.")
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
            f"{report.num_copied} prefixes copied, {report.num_uncopied} not; "
            f"{report.num_resumed} resumed, {report.num_poisoned} given up, {report.duration_s:.3f} s virtual; "
            + ", ".join(f"{number} {end}" for end, number in report.ends)
        )


if __name__ == "__main__":
    main()
