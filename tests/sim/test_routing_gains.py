"""What routing is for: on conversations over simulated nodes, prefixes and queues together beat either alone."""

from __future__ import annotations

from random import Random

from route_mooncake import COSTS, Line, run

from scale import Ask, run_scale
from tokenmill.cluster.events import Effects
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.replication import replication_named
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig


def conversations(num_requests: int) -> list[Line]:
    """Sessions of several turns, each of which repeats the one before; a third begin with one of three documents."""
    random, at_s, lines = Random(5), 0.0, []
    sessions: list[tuple[int, ...]] = []
    for number in range(num_requests):
        at_s += random.expovariate(3.0)
        if sessions and random.random() < 0.7:
            begun = sessions.pop(random.randrange(len(sessions)))
        else:
            begun = tuple(range(50 * random.randrange(3), 50 * random.randrange(1, 4))) if random.random() < 0.3 else ()
        hashes = (*begun, *(1000 * (number + 1) + each for each in range(random.randrange(4, 24))))
        sessions.append(hashes)
        lines.append(Line(at_s, 512 * len(hashes) + 100, random.randrange(50, 400), hashes))
    return lines


def test_a_predicted_first_token_comes_sooner_than_by_load_or_by_prefix() -> None:
    """The simulation is exact: same lines, same result. Least load is saturated there, the others are not."""
    lines = conversations(500)
    made = {policy: run(lines, policy, 8, 0.7) for policy in ("least_load", "cache_aware", "kv_aware", "round_robin")}
    best = made["kv_aware"]
    assert best.ttft_s < made["cache_aware"].ttft_s and best.p99_s * 1.2 < made["cache_aware"].p99_s, made
    assert best.ttft_s * 3 < made["least_load"].ttft_s and best.ttft_s * 3 < made["round_robin"].ttft_s, made
    assert best.hit > 2 * made["least_load"].hit and best.balance < 1.1, made


def hot_prompt(seed: int, low: float, high: float, for_s: float) -> list[Ask]:
    """One system prompt of 4,096 tokens before each request, at a rate that rises."""
    random, at_s, asks = Random(seed), 0.0, list[Ask]()
    while at_s < for_s:
        at_s += random.expovariate(low + (high - low) * at_s / for_s)
        asks.append(Ask(at_s, ((0, 4096), (len(asks) + 1, random.randint(150, 450))), 60))
    return asks


def test_a_hot_prompt_is_where_it_is_needed_before_requests_wait_for_it() -> None:
    """Real engines on virtual time, 320 KB of KV a token, 10 GB a second between nodes."""
    (group,) = full_groups(8192, 16 * 320 * 1024)
    config = EngineConfig(groups=(group,), max_model_len=16384, max_num_batched_tokens=2048, max_num_seqs=64)
    made = {}
    for policy in ("prefix_affinity", "kv_aware"):
        for replication in ("off", "on"):
            copied = []

            def set_up(gateway: Gateway, policy: str = policy, replication: str = replication, copied=copied) -> None:
                gateway.router.choose_by(policy)
                gateway.reviews.replication = replication_named(replication)
                handle = gateway.handle

                def listening(event, now: float) -> Effects:
                    effects = handle(event, now)
                    copied.extend(effects.copied)
                    return effects

                gateway.handle = listening  # type: ignore[method-assign]

            report = run_scale(hot_prompt(0, 3.0, 20.0, 10.0), config, COSTS, ["mixed"] * 6, set_up)
            good = [each for each in copied if not each.error]
            assert all(each.num_tokens == 4096 for each in good) and len(copied) <= 20
            made[policy, replication] = report.mean("ttft_s"), report.percentile("ttft_s", 0.95), len(good)
    pinned, spread = made["prefix_affinity", "off"], made["prefix_affinity", "on"]
    assert spread[2] > 3 and spread[1] * 2 < pinned[1] and spread[0] * 1.15 < pinned[0], made
    fetching, both = made["kv_aware", "off"], made["kv_aware", "on"]
    assert both[0] <= fetching[0] and both[1] <= fetching[1], made
