"""Services on shared links, cores and tiers under faults of every kind, by seed: nothing is lost, and runs repeat."""

from __future__ import annotations

import asyncio
import random
from hashlib import blake2b
from typing import Any

import pytest

from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.pools import decision_named
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.fault_script import KINDS, read_faults
from tokenmill.sim.fields import Fields
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.parts import ColdStart, CorePlan, FrontCosts, PartsPlan
from tokenmill.sim.service import Service
from tokenmill.sim.tier_plan import read_tiers
from tokenmill.sim.topology import read_topology

MB = 1_000_000
NUM_REQUESTS, NUM_OUTPUT = 40, 24


def deploy(seed: int) -> Deployment:
    rng = random.Random(seed)
    config = EngineConfig(
        groups=full_groups(rng.choice([64, 256]), MB),
        max_model_len=512,
        max_num_batched_tokens=rng.choice([64, 512]),
    )
    nodes = [{"count": 2, "nic_bytes_s": rng.choice([1e7, 1e9])}, {"name": "store", "has_workers": False}]
    topology = read_topology({"nodes": nodes, "spine": {"nodes_per_rack": 1, "oversubscription": 2}})
    tables: list[dict[str, Any]] = [
        {"kind": "host", "bytes": rng.choice([40, 400]) * MB},
        {"kind": "disk", "bytes": "1GB", "admission": "all", "queue_depth": rng.choice([0, 2])},
        {"kind": "remote", "bytes": "1GB", "admission": "all", "node": "store"},
    ]
    tiers = read_tiers(Fields({"tiers": tables}), nodes=list(topology.nodes)) if rng.random() < 0.7 else None
    faults: list[dict[str, Any]] = [{"kind": "crash", "target": "n0", "at_s": 5.0}]
    for kind in KINDS:
        if rng.random() < 0.6 and (tiers is not None or kind != "corrupt"):
            fault = {"kind": kind, "mean_time_between_s": rng.choice([1.0, 4.0]), "until_s": 12.0, "seed": seed}
            has_end = kind in ("freeze", "slow", "partition", "flap", "corrupt")
            faults.append(fault | ({"for_s": rng.choice([0.2, 1.0, 3.0])} if has_end else {}))
    front = FrontCosts(0.001, 0.0, 0.0001, 0.0001) if rng.random() < 0.5 else None
    pools = rng.choice([("mixed",) * 3, ("prefill", "decode", "decode"), ("prefill", "mixed", "decode")])
    workers = tuple(
        WorkerPlan(
            f"w{number}", pool, config, Costs(step_s=0.01, token_s=1e-4), node=f"n{number % 2}", threads=2,
            cold=ColdStart(rng.choice([0.0, 0.5]), 10 * MB, weights_node="store"),
        )
        for number, pool in enumerate(pools)
    )  # fmt: skip
    read = read_faults(Fields({"faults": faults}))
    return Deployment(workers, parts=PartsPlan(topology, tiers, read, CorePlan(rng.choice([0, 2]), front)))


def run(seed: int) -> str:
    """A digest of what clients heard, and when. Raises AssertionError where a request was lost."""
    made = deploy(seed)
    rng, loop, digest = random.Random(f"clients {seed}"), VirtualLoop(limit_s=2000), blake2b(digest_size=8)

    def set_up(gateway: Gateway) -> None:
        if made.workers[0].pool == "prefill":
            gateway.pools.decision = decision_named("always")

    service = Service(made, loop, seed=seed, set_up=set_up)
    counts, ends = [0] * NUM_REQUESTS, dict[str, str]()

    def hear(output: Output) -> None:
        digest.update(f"{loop.time()!r} {output.request_id} {output.tokens}\n".encode())
        counts[int(output.request_id)] += len(output.tokens)
        if output.finish_reason is not None:
            ends[output.request_id] = output.error or output.finish_reason

    async def main() -> None:
        await service.start()
        for number in range(NUM_REQUESTS):
            tokens = tuple((number % 15 * 7 + place) % 200 for place in range(96 + 32 * (number % 4)))
            sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
            request = Request(str(number), tokens, sampling, NUM_OUTPUT, number, arrival_s=loop.time())
            service.open(request, "client", hear)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        while len(ends) < NUM_REQUESTS:
            await asyncio.sleep(1.0)
        await service.stop()

    loop.run(main())
    for name, end in ends.items():
        # Who was alone on engines that crash again and again is given up, as live.
        assert end == "length" or end.startswith("The engine ended each time"), (name, end)
        assert counts[int(name)] <= NUM_OUTPUT and (end != "length" or counts[int(name)] == NUM_OUTPUT), (name, counts)
    assert list(ends.values()).count("length") >= NUM_REQUESTS - 2
    assert service.report.faults
    return digest.hexdigest()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_whatever_fails(seed: int) -> None:
    """Each request ends at its length, with its tokens, each once; but for one that has ended too many engines."""
    run(seed)


def test_a_seed_is_one_history() -> None:
    """Faults, links and tiers included, to the last bit of every time."""
    assert run(1) == run(1) != run(2)
