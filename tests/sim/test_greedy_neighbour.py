"""A tenant that sends ten times its share, beside one that keeps to its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from greedy_neighbour import felt

from queueing import CONFIG, Ask, Costs, Replay, percentile
from tokenmill.core.terms import Terms
from tokenmill.sched.service import PromptShares


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", ["rows", "prompts"])
def test_a_greedy_tenant_is_hardly_felt_by_another(name: str) -> None:
    """The other's p99 TTFT rises by less than half, whether rows or the engine's time is what is short."""
    seen = felt(name, 0.8, range(3))
    assert seen.ratio < 1.5, seen.ratio


def test_it_is_the_shares_that_do_it() -> None:
    """The same load of callers that cannot be told apart: all wait for the greedy one's queue."""
    seen = felt("rows", 0.8, range(1), are_told_apart=False)
    assert seen.ratio > 3.0 or seen.num_refused > 20, (seen.ratio, seen.num_refused)


def test_a_short_call_hardly_waits_beside_another_tenants_long_prompts() -> None:
    """Full steps take 150 ms, and 64 prompts come at once: nine in ten first tokens take less, and the prompts end
    at most a twentieth later than beside calls of their own tenant, for which nothing is made shorter."""
    config = replace(CONFIG, max_num_seqs=256)
    costs = Costs(0.008, 0.0004, 0.00025)
    ends_s, ttfts_s = [], []
    for tenant in ("short", "long"):
        rng = random.Random(1)
        asks = [Ask(0.5, 800, 16, name=f"long{number}", client="long", terms=Terms("long")) for number in range(64)]
        at_s = 1.0
        while (at_s := at_s + rng.uniform(0.15, 0.4)) < 13.0:
            asks.append(Ask(at_s, 26, 4, name=f"short{at_s}", client="short", terms=Terms(tenant)))
        seen = Replay(config, costs).run(asks).seen
        ends_s.append(max(each.at_s + each.end_s for each in seen if each.call.startswith("long")) - 0.5)
        ttfts_s.append(percentile([each.ttft_s for each in seen if each.call.startswith("short")], 0.9))
    assert ttfts_s[0] < 0.15 < ttfts_s[1], ttfts_s
    assert ends_s[0] < 1.05 * ends_s[1], ends_s


def test_steps_that_are_short_for_others_are_paid_for() -> None:
    """After a few in a row, one for as many tokens as it costs; who was last served long ago is there no more."""
    shares = PromptShares(1000)
    shares.note("a", 10_000)
    assert [shares.pay(100.0) for _ in range(10)] == [True] * 9 + [False]
    shares.note("a", 250)
    assert [shares.pay(100.0) for _ in range(4)] == [True, True, False, False]
    assert not shares.is_shared(["a"])
    shares.note("b", 1)
    assert shares.is_shared(["a"]) and shares.had("a") > shares.had("b")
    shares.note("a", 1001)
    assert not shares.is_shared(["a"])
