"""The cluster that only takes time: steps cost what the cost model says, lengths and latencies are what they must
be."""

from __future__ import annotations

import random

import pytest

from scale import Ask, power_law, run_scale, synthetic
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.pools import decision_named
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs

CONFIG = EngineConfig(groups=full_groups(512), max_model_len=4096, max_num_batched_tokens=256)
COSTS = Costs(step_s=0.01, token_s=0.0001)


@pytest.mark.parametrize("most", [0, 100])
def test_one_request_takes_its_steps(most: int) -> None:
    """300 prompt tokens are two steps, 20 tokens are 19 more; it ends there, whatever it may draw."""
    (seen,) = run_scale([Ask(1.0, ((7, 300),), 20, most)], CONFIG, COSTS, ["mixed"]).seen
    assert seen.ttft_s == pytest.approx(2 * 0.01 + 300 * 0.0001, abs=0.002)
    assert seen.tpot_s == pytest.approx(0.0101, rel=0.01)
    assert seen.latency_s == pytest.approx(seen.ttft_s + 19 * seen.tpot_s)


def test_equal_parts_are_equal_prefixes() -> None:
    asks = [Ask(float(number), ((1, 512), (10 + number, 64)), 4) for number in range(3)]
    report = run_scale(asks, CONFIG, COSTS, ["mixed"])
    assert [seen.num_cached for seen in report.seen] == [0, 512, 512]


def test_split_requests_pay_for_the_wire() -> None:
    """A prompt's KV goes to the worker that answers; the answer is as long as without."""

    def set_up(gateway: Gateway) -> None:
        gateway.pools.decision = decision_named("always")

    asks = synthetic(40, 4.0, power_law(200, 2000), power_law(50, 500), most=600)
    report = run_scale(asks, CONFIG, COSTS, ["prefill", "decode"], set_up)
    assert len(report.seen) == 40 and report.num_moved > 30 and not report.num_preemptions
    assert min(report.busy_s.values()) > 0


def test_lengths_of_a_power_law_have_their_mean() -> None:
    rng, length = random.Random(1), power_law(256, 4096)
    values = [length(rng) for _ in range(40000)]
    assert sum(values) / len(values) == pytest.approx(256, rel=0.06)
    assert max(values) == 4096 and sorted(values)[20000] < 128
