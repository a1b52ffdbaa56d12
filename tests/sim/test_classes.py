"""Tenants and classes in the real engine shell: whatever comes when, answers are what they are alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from simtest.cluster import run_cluster
from simtest.cluster_kinds import make_deaths
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.terms import Terms
from tokenmill.sim.run import run_scenario
from tokenmill.sim.workload import Arrival, Scenario, make_scenario

SEEDS_PER_TEST = 50


def with_terms(scenario: Scenario, seed: int) -> Scenario:
    """Several tenants, in classes, with weights and shares of the KV; some of it is idle work."""
    rng = random.Random(f"terms {seed}")
    tenants = [
        Terms(name, rng.choice([0, 1, 1, 2]), rng.choice([0.5, 1.0, 4.0]), rng.choice([1.0, 1.0, 0.1, 0.5]))
        for name in "abc"
    ]
    arrivals = []
    for each in scenario.arrivals:
        terms, idle = rng.choice(tenants), rng.random() < 0.1
        requests = tuple(
            replace(request, terms=terms, priority=IDLE_PRIORITY if idle else request.priority)
            for request in each.requests
        )
        arrivals.append(Arrival(each.at_s, requests))
    return replace(scenario, arrivals=tuple(arrivals))


@pytest.mark.sampled(1 / 5)
@pytest.mark.parametrize("first", range(0, 250, SEEDS_PER_TEST))
def test_every_request_ends_as_it_would_alone(first: int) -> None:
    """With preemption between classes, held-back rows, shares of KV, failed steps, windows and stores."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_scenario(with_terms(make_scenario(seed), seed), failure_seed=seed)
        totals["preemptions"] += report.stats.num_preemptions
        totals["failures"] += report.num_failures
    assert min(totals["preemptions"], totals["failures"]) > 20, totals


def test_engines_die_and_no_tenant_loses_a_request() -> None:
    """One engine or several behind the gateway: places by tenant and class are given back and out again."""
    totals: Counter[str] = Counter()
    for seed in range(60):
        deaths = make_deaths(seed)
        report = run_cluster(replace(deaths, scenario=with_terms(deaths.scenario, seed)), seed)
        totals.update(deaths=report.num_left, resumed=report.num_resumed)
    assert min(totals["deaths"], totals["resumed"]) > 20, totals
