"""With fast forward over decode steps or without it: clients hear the same tokens at the same times, to the last
bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tokenmill.cluster.admission import BoundedWait
from tokenmill.cluster.events import Effects, GatewayEvent, Opened
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.pools import decision_named
from tokenmill.cluster.rescheduling import policy_named
from tokenmill.cluster.router import ROUTING_POLICIES
from tokenmill.cluster.routing import Route
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import USUAL, Terms
from tokenmill.sim.deployment import LAN, Deployment, WorkerPlan
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.network import Shape
from tokenmill.sim.service import Service
from tokenmill.sim.timed import DRAWN, END_TOKEN


def heard(seed: int, *, fast_path: bool) -> tuple[list[Any], int]:
    """All that happens in a service under a random load, and the steps in fast forward."""
    rng = random.Random(seed)
    cost_model = Costs(*rng.choice([(0.012, 0.0003, 0.00012, 1e-8, 2e-7), (0.002, 0.0001, 0.00002, 1e-9, 1e-7)]))
    config = EngineConfig(
        full_groups(rng.choice([60, 100, 1000])),
        max_model_len=600,
        max_num_batched_tokens=rng.choice([64, 256]),
        max_num_seqs=rng.choice([3, 8, 64]),
        steps_in_flight=rng.choice([1, 2, 2, 2, 3]),
    )
    kinds = rng.choice([["mixed"], ["mixed"] * 2, ["mixed"] * 5, ["prefill", "decode", "decode"]])
    routing, migration = rng.choice(ROUTING_POLICIES), rng.choice(["off", "off", "on"])
    is_bounded, terms = rng.random() < 0.3, rng.choice([USUAL, Terms(ttft_s=2.0), Terms(ttft_s=0.3, tpot_s=0.05)])
    loop = VirtualLoop()
    log: list[Any] = []

    def set_up(gateway: Gateway) -> None:
        gateway.router.choose_by(routing)
        choose, policy = gateway.router.choose, gateway.router._routing

        def watched(request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
            """Also what the choice was made by."""
            route = choose(request, links, now)
            ranking = getattr(getattr(policy, "_by_cost", policy), "_ranking", None)
            order = list(ranking.order) if ranking is not None and len(links) > 1 else []
            levels = [(level.num_blocks, sorted(level.links)) for level in gateway.router.index.levels(request.keys)]
            log.append(
                (
                    "chosen",
                    request.id,
                    *route[1:],
                    order,
                    levels,
                    gateway.request_queue.choice_s,
                    gateway.request_queue._work,
                )
            )
            return route

        gateway.router.choose = watched  # type: ignore[method-assign]
        if is_bounded:
            gateway.admission = BoundedWait(1000, 10**6, 1.0)
        if "prefill" in kinds:
            gateway.pools.decision = decision_named("always")
        if len(kinds) > 1:
            gateway.reviews.policy = policy_named(migration)

    plans = tuple(WorkerPlan(f"w{number}", kind, config, cost_model) for number, kind in enumerate(kinds))
    shape = rng.choice([LAN, Shape(latency_s=0.03)])

    def watch(event: GatewayEvent, effects: Effects) -> None:
        if isinstance(event, Opened):
            log.append(("opened", event.requests[0].id, event.verdict))
        if effects.routes:
            log.append(("routes", *effects.routes))

    service = Service(Deployment(plans, shape), loop, set_up=set_up, fast_path=fast_path, watch=watch)

    async def main() -> None:
        await service.start()
        open_ids: set[str] = set()

        def hear(output: Output) -> None:
            log.append((loop.time(), output))
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)

        shared = [[rng.randrange(256) for _ in range(100)] for _ in range(3)]
        begun: list[tuple[int, ...]] = []
        for number in range(40):
            await asyncio.sleep(rng.expovariate(rng.choice([1.0, 4.0, 40.0])))
            prompt = (*rng.choice(shared)[: rng.randrange(1, 100)], *rng.randbytes(rng.randrange(60)))
            if begun and rng.random() < 0.3:  # goes on where an answer has begun, or will have
                prompt = (*rng.choice(begun[-4:]), *(DRAWN,) * rng.randrange(80))[:400]
            begun.append(prompt)
            most = rng.randint(1, 150)
            request = Request(
                f"r{number}", prompt, SamplingParams(max_tokens=most), most, number, eos_token_ids=(END_TOKEN,),
                arrival_s=loop.time(), terms=terms,
            )  # fmt: skip
            open_ids.add(request.id)
            service.open(request, f"c{number % 3}", hear, num_output=rng.choice([0, rng.randint(1, most)]))
            if rng.random() < 0.1:
                service.give_up(request.id)
                open_ids.discard(request.id)
            elif rng.random() < 0.1:
                loop.call_later(rng.uniform(0.0, 1.0), open_ids.discard, request.id)
                loop.call_later(rng.uniform(0.0, 1.0), service.give_up, request.id)
        while open_ids:
            await asyncio.sleep(0.5)
        await asyncio.sleep(2.0)  # those that were given up end, too
        await service.stop()

    loop.run(main())
    report = service.report
    # What is heard late is logged late, at its own time.
    log.sort(key=lambda each: each[0] if isinstance(each[0], float) else -1.0)
    ends = [report.busy_s, report.steps, report.queues, report.num_preemptions, report.num_moved, report.duration_s]
    ends += [[worker.core.stats() for worker in service.workers], service.gateway.totals.stats]
    return [*log, *ends], report.num_fast_forwarded


LOOKED_AT = (24, 56, 225)
"""Where something would be chosen otherwise if what is looked at (`Router.looks_at`, `DeferredOutputs.younger`) were
not told."""


@pytest.mark.sampled(2 / 5)
@pytest.mark.parametrize(
    "seeds", [*(range(first, first + 4) for first in range(0, 16, 4)), pytest.param(LOOKED_AT, id="looked_at")]
)
def test_leaps_change_nothing_that_is_heard(seeds: Sequence[int]) -> None:
    total = 0
    for seed in seeds:
        plain, none = heard(seed, fast_path=False)
        fast, num_fast_forwarded = heard(seed, fast_path=True)
        assert none == 0
        assert fast == plain, f"seed {seed}"
        total += num_fast_forwarded
    assert total > 300, "hardly a step"
