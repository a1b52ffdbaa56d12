"""Idle work, the requests of the lowest priority: it never shares a step with a prompt of others, and all is done."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.engine.journal import Planned
from tokenmill.sched.budget import EVERY
from tokenmill.sim.run import run_scenario
from tokenmill.sim.workload import Arrival, Scenario, make_scenario

SEEDS_PER_TEST = 40


def some_idle(scenario: Scenario, seed: int) -> Scenario:
    rng = random.Random(f"idle {seed}")
    share = rng.choice([0.3, 0.6, 0.9])
    arrivals = tuple(
        Arrival(each.at_s, tuple(replace(request, priority=priority) for request in each.requests))
        for each in scenario.arrivals
        for priority in [IDLE_PRIORITY if rng.random() < share else each.requests[0].priority]
    )
    return replace(scenario, arrivals=arrivals)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("first", range(0, 160, SEEDS_PER_TEST))
def test_idle_work_takes_no_time_from_prompts(first: int) -> None:
    """Whatever comes when: each request ends as it would alone; idle rows are in steps of their own, and in one of some
    steps in which others draw one token each."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario = some_idle(make_scenario(seed), seed)
        report = run_scenario(scenario, failure_seed=seed)
        totals["preemptions"] += report.stats.num_preemptions
        idle_seeds = {request.seed for request in scenario.requests if request.priority == IDLE_PRIORITY}
        is_idle: dict[int, bool] = {}
        for entry in report.journal:
            if isinstance(entry, Planned) and entry.plan is not None:
                for row in entry.plan.rows:
                    if row.intro is not None:
                        is_idle[row.seq] = row.intro.seed in idle_seeds
                kinds = {is_idle[row.seq] for row in entry.plan.rows}
                if len(kinds) == 2:
                    others = [row for row in entry.plan.rows if not is_idle[row.seq]]
                    assert max(row.num_tokens for row in others) == 1, f"seed {seed}: step {entry.plan.step}"
                    assert not entry.plan.step % EVERY, f"seed {seed}: step {entry.plan.step} has idle rows"
                totals["both" if len(kinds) == 2 else "idle" if True in kinds else "others"] += 1
    assert min(totals["idle"], totals["others"], totals["both"], totals["preemptions"]) > 10, totals
