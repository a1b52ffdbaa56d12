"""What happens in a simulated cluster, by kind and seed: its workers, its load, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from simtest.faults import CRASH, FLIP, FREEZE, HOLD, KINDS, LEAVE, Faults
from tokenmill.sched.admission import refusal
from tokenmill.sim.network import NO_DELAY, Shape
from tokenmill.sim.worker import POISON_SEED
from tokenmill.sim.workload import Arrival, Scenario, make_scenario


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
    stores, lies   machines with KV stores (0: none), and share of what they tell that is wrong
    are_linked   whether workers reach each other
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
    stores: int = 0
    lies: float = 0.0
    are_linked: bool = True


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


def make_tiers(seed: int) -> Cluster:
    """As mixed, with KV stores that crash, fail and lie, and workers that may have no other way to each other."""
    rng = random.Random(f"tiers {seed}")
    made = make_mixed(seed)
    arrivals = tuple(
        Arrival(each.at_s, tuple(replace(request, handoff="") for request in each.requests))
        for each in made.scenario.arrivals
    )
    return replace(
        made,
        scenario=replace(made.scenario, arrivals=arrivals, stored=None),
        stores=rng.choice([1, 2, 3]),
        lies=rng.choice([0.0, 0.0, 0.2]),
        are_linked=rng.random() < 0.5,
    )


MAKERS: dict[str, Callable[[int], Cluster]] = {
    "deaths": make_deaths,
    "faults": make_faults,
    "zombies": make_zombies,
    "splits": make_splits,
    "moves": make_moves,
    "mixed": make_mixed,
    "tiers": make_tiers,
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
