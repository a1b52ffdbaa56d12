"""Modelled engines under the real gateway: every token comes once whatever moves, and moving gains what it is for."""

from __future__ import annotations

import random
from dataclasses import replace

from modelled import Ask, Cluster, Law, percentile
from reschedule_load import LAW, load, serve

from tokenmill.cluster.events import Leaves, Pooled
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.moves import STAGING_S
from tokenmill.cluster.pools import decision_named
from tokenmill.cluster.rescheduling import policy_named
from tokenmill.core.cost import Costs


def test_moving_running_requests_makes_room_before_others_lose_theirs() -> None:
    """The load of `reschedule_load`, on four engines with less room."""
    cost_model = replace(LAW, room=5000)
    asks = load(1, 500, 128, 128, 25.0, 1.0)
    asks = [replace(ask, num_prompt=min(ask.num_prompt, 1500), num_answer=min(ask.num_answer, 1500)) for ask in asks]
    seen = {}
    for migration in ("off", "on"):
        served, cluster = serve(asks, migration, cost_model, 4)
        assert (cluster.report.num_moved > 10) == (migration == "on")
        seen[migration] = cluster.report.num_preempted, percentile([each.ttft_s for each in served], 0.99)
    assert 2 * seen["on"][0] <= seen["off"][0] > 0 and seen["on"][1] <= seen["off"][1]


def test_two_engines_that_are_full_of_each_others_answers_do_not_wait_for_ever() -> None:
    """Pools change places while a prompt is computed. Each engine then keeps room for the answer to the other's prompt,
    and neither prompt has enough left."""
    cost_model = Law(Costs(0.01, 1e-4, 2e-4, 1e-8, 1e-7), 16, 256, 1000)

    def configure(gateway: Gateway) -> None:
        gateway.pools.decision = decision_named("always")

    cluster = Cluster([cost_model] * 2, ["prefill", "decode"], configure)
    changes = [(0.01, Pooled(0, "decode")), (0.01, Pooled(1, "prefill"))]
    served = cluster.run([Ask(0.0, 590, 40), Ask(0.02, 590, 40)], changes)
    assert STAGING_S < served[1].first_s < served[0].first_s < STAGING_S + 1


def test_engines_drain_and_change_pools_under_load_and_nothing_is_lost() -> None:
    """Each request ends with all of its tokens, none twice, and all KV is given back (Cluster.run)."""
    rng = random.Random(5)
    cost_model = Law(Costs(0.01, 1e-4, 2e-4, 1e-8, 1e-7), 16, 256, 6000)
    num_split = 0
    for seed in range(6):
        asks = [Ask(rng.uniform(0, 10), rng.randint(1, 900), rng.randint(1, 200), 256) for _ in range(120)]
        asks.sort(key=lambda ask: ask.at_s)
        pools = ("prefill", "decode", "mixed", "odd name")
        changes = [(rng.uniform(0, 10), Pooled(rng.randrange(4), rng.choice(pools))) for _ in range(20)]

        def configure(gateway: Gateway, seed: int = seed) -> None:
            gateway.is_shared = seed % 2 == 0
            gateway.reviews.policy = policy_named("on")
            gateway.pools.decision = decision_named(("cost", "always")[seed % 2])

        cluster = Cluster([cost_model] * 4, ["prefill", "decode", "decode", "mixed"], configure)
        served = cluster.run(asks, [*changes, (5.0, Leaves(seed % 4))])
        assert all(each.end_s > 0 for each in served)
        assert not cluster.gateway.num_open_at(seed % 4)
        num_split += cluster.report.num_split
    assert num_split > 50
