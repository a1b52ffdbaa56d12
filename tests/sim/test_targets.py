"""Requests with targets among others and idle work: sizes of steps and order change, tokens and ends do not."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.terms import Terms
from tokenmill.sim.run import run_scenario
from tokenmill.sim.workload import Arrival, Scenario, make_scenario

SEEDS_PER_TEST = 30
TTFT_S, TPOT_S = (0.0, 0.01, 0.1, 2.0), (0.0, 0.002, 0.01, 0.1)


def with_targets(scenario: Scenario, seed: int) -> Scenario:
    rng = random.Random(f"targets {seed}")
    arrivals = []
    for each in scenario.arrivals:
        terms = Terms(tenant=rng.choice("ab"), ttft_s=rng.choice(TTFT_S), tpot_s=rng.choice(TPOT_S))
        priority = IDLE_PRIORITY if rng.random() < 0.2 else each.requests[0].priority
        arrivals.append(
            Arrival(each.at_s, tuple(replace(request, priority=priority, terms=terms) for request in each.requests))
        )
    return replace(scenario, arrivals=tuple(arrivals))


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("first", range(0, 60, SEEDS_PER_TEST))
def test_targets_change_no_token(first: int) -> None:
    """Whatever comes with which targets, with failures and preemption: each request ends as it would alone."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario = make_scenario(seed)
        report = run_scenario(with_targets(scenario, seed), failure_seed=seed)
        totals["preemptions"] += report.stats.num_preemptions
        totals["steps"] += report.stats.num_steps
        if not seed % 6:
            plain = run_scenario(scenario, failure_seed=seed)
            totals["other plans"] += report.stats.num_steps != plain.stats.num_steps
    assert totals["other plans"] > 2 and totals["preemptions"] > 10, totals
