"""Many clients at one engine: one of them cannot shut the others out, and what cannot be served in time is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from queueing import CONFIG, Ask, Costs, Replay, percentile
from tokenmill.core.block import full_groups
from tokenmill.core.step import StepPlan
from tokenmill.core.terms import Terms


def singles(
    rng: random.Random, rate: float, until_s: float, num_prompt: int, max_tokens: int, **more: Any
) -> list[Ask]:
    """Calls of one choice at a Poisson rate."""
    return [
        Ask(at_s, round(rng.uniform(0.5, 1.5) * num_prompt), round(rng.uniform(0.5, 1.5) * max_tokens), **more)
        for at_s in poisson(rng, rate, until_s)
    ]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("hog", ["1,024 prompts", "many calls", "long prompts"])
@pytest.mark.parametrize("seed", range(3))
def test_a_client_that_asks_for_everything_leaves_the_others_served(hog: str, seed: int) -> None:
    """Others have their first token within half a second, whatever one client has open."""
    rng = random.Random(seed)
    if hog == "1,024 prompts":
        asks = [Ask(0.0, 1, 250, num_choices=1024, name="hog", client="a")]
    elif hog == "many calls":
        asks = [Ask(0.001 * number, 20, 250, name="hog", client="a") for number in range(500)]
    else:
        asks = [Ask(0.001 * number, 500, 50, name="hog", client="a") for number in range(300)]
    others = singles(rng, 2.0, 20.0, 30, 20, name="other", client="b")
    replay = Replay().run([*asks, *others])
    assert not replay.refused
    ttfts = [seen.ttft_s for seen in replay.seen if seen.call.startswith("other")]
    assert percentile(ttfts, 0.99) < 0.5
    hogs = [seen for seen in replay.seen if seen.call.startswith("hog")]
    assert all(seen.end_s > 0 for seen in hogs)


def test_the_bound_is_what_keeps_them_served() -> None:
    """The same load with every choice sent to the engine at once: the others wait for all of it."""
    hog = Ask(0.0, 1, 250, num_choices=1024, name="hog", client="a")
    replay = Replay(is_shared=False).run([hog, *(Ask(1.0 + at, 30, 4, name="other", client="b") for at in range(5))])
    assert min(seen.ttft_s for seen in replay.seen if seen.call.startswith("other")) > 10


# Where rows, prompts or blocks are short: prompt, output, calls a second that the engine can serve, and p99 TTFT. Where
# blocks run out, sequences are preempted, and what that costs is known only afterwards.
KV = replace(CONFIG, groups=full_groups(600), max_num_seqs=128)
OVERLOADS = {
    "prompts": (CONFIG, 600, 16, 7.4, 13.0),
    "rows": (CONFIG, 40, 200, 9.0, 13.0),
    "both": (CONFIG, 300, 100, 8.9, 13.0),
    "blocks": (KV, 100, 300, 4.5, 17.0),
}


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OVERLOADS)
def test_under_four_times_the_load_those_let_in_are_served_in_time_and_the_engine_is_not_idle(
    name: str, seed: int
) -> None:
    """p99 TTFT stays near the bound of 10 s, and as many tokens come as without a bound."""
    config, num_prompt, max_tokens, rate, most_s = OVERLOADS[name]
    rng = random.Random(seed)
    asks = [
        Ask(at_s, num_prompt, round(rng.uniform(0.5, 1.5) * max_tokens), client=str(number % 5))
        for number, at_s in enumerate(poisson(rng, 4 * rate, 60.0))
    ]
    bounded = Replay(config=config, max_queue_s=10.0).run(asks)
    unbounded = Replay(config=config, is_shared=False).run(asks)
    ttfts = [seen.ttft_s for seen in bounded.seen if seen.at_s > 15]
    assert percentile(ttfts, 0.99) < most_s
    assert percentile(ttfts, 0.5) > 6.0, "refused although there was room"
    assert ends_between(bounded, 15, 60) >= 0.95 * ends_between(unbounded, 15, 60)


@pytest.mark.parametrize("name", ["prompts", "rows"])
def test_those_who_are_refused_and_come_back_when_told_are_served(name: str) -> None:
    """A burst of four times the load that comes back as it is told: most are let in at their first or second return,
    and nobody is told to come back sooner than there is room. As they return the engine is busy for as much of the time
    as they are given, the rest being for new calls."""
    config, num_prompt, max_tokens, rate, _ = OVERLOADS[name]
    asks = [Ask(at_s, num_prompt, max_tokens, returns=True) for at_s in poisson(random.Random(2), 4 * rate, 15.0)]
    replay = Replay(config=config, max_queue_s=10.0).run(asks)
    assert len(replay.seen) == len(asks)
    refusals: dict[int, list[tuple[float, float]]] = {}
    for at_s, ask, error in replay.refused:
        refusals.setdefault(id(ask), []).append((at_s, error.retry_after_s))
    assert len(refusals) > len(asks) / 4, "the load does not press"
    assert percentile([len(each) for each in refusals.values()], 0.75) <= 2
    told = [each[0][1] for each in refusals.values()]
    real = [each[-1][0] + each[-1][1] - each[0][0] for each in refusals.values()]
    assert percentile(real, 0.5) < 2 * percentile(told, 0.5)
    assert max(told) < 120 and replay.busy_s > 0.4 * replay.duration_s


def poisson(rng: random.Random, rate: float, until_s: float) -> list[float]:
    times, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        times.append(at_s)
    return times


def ends_between(replay: Replay, start_s: float, end_s: float) -> int:
    return sum(start_s <= seen.at_s + seen.end_s < end_s for seen in replay.seen)


class Warming:
    """The first two steps of a process take twenty times as long."""

    num_steps = 0

    def of(self, plan: StepPlan) -> float:
        self.num_steps += 1
        return Costs().of(plan) * (20 if self.num_steps <= 2 else 1)


def test_a_cold_server_refuses_nobody_for_what_nobody_has_measured() -> None:
    """A burst on four rows comes while the first steps take long; all of it is served within seconds."""
    burst = [Ask(0.08 * i, 68, 64, name=f"a{i}") for i in range(16)]
    replay = Replay(
        config=replace(CONFIG, max_num_seqs=4),
        costs=Warming(),  # type: ignore[arg-type]
        max_queue_s=10.0,
    ).run(burst)
    assert not replay.refused and max(each.ttft_s for each in replay.seen) < 3.0


def test_a_tenants_own_call_does_not_wait_for_its_call_of_a_thousand_prompts() -> None:
    """All of its answers draw for as long as they may, so that no row comes free for half a minute."""
    config = replace(CONFIG, max_num_seqs=256)
    many = Ask(0.0, 20, 400, num_choices=1024, name="many", client="a", terms=Terms("a"))
    own = [Ask(1.0 + 5 * i, 20, 4, name=f"own{i}", client="a", terms=Terms("a")) for i in range(6)]
    replay = Replay(config=config, max_queue_s=10.0).run([many, *own])
    waits_s = [each.ttft_s for each in replay.seen if each.call.startswith("own")]
    assert len(waits_s) == len(own) and max(waits_s) < 1.0, waits_s
