"""Hundreds of seeded simulations of the real engine: exact streams, conservation, liveness, determinism."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.policy import Running
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine import state
from tokenmill.kv.blocks.eviction import EVICTIONS
from tokenmill.sched.policies import ORDERS, pick
from tokenmill.sim.executor import TOY_COSTS
from tokenmill.sim.run import Report, run_scenario, run_seed
from tokenmill.sim.workload import Arrival, Scenario, known_blocks, make_scenario

SEEDS_PER_TEST = 25
NUM_SEEDS = 300
SRC = Path(__file__).resolve().parents[2] / "src"


def run_seed_or_tell(seed: int) -> Report:
    """With policies drawn by the seed: what must hold holds for all of them."""
    rng = random.Random(f"policies of {seed}")
    policies = {"scheduling_policy": rng.choice(sorted(ORDERS)), "eviction_policy": rng.choice(sorted(EVICTIONS))}
    try:
        return run_seed(seed, **policies)
    except BaseException as error:
        flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in policies.items())
        error.add_note(f"Replay: PYTHONPATH=src python -m tokenmill.sim.run --seed {seed}{flags}")
        raise


def with_grammars(seed: int) -> Scenario:
    """Half of the calls follow one of a few grammars, so that some wait for the same."""
    rng, scenario = random.Random(f"grammars of {seed}"), make_scenario(seed)
    arrivals = []
    for arrival in scenario.arrivals:
        grammar = rng.choice(["", "", "a", "b", "c"])
        samplings = [replace(request.sampling, grammar=grammar) for request in arrival.requests]
        pairs = zip(arrival.requests, samplings, strict=True)
        arrivals.append(Arrival(arrival.at_s, tuple(replace(one, sampling=sampling) for one, sampling in pairs)))
    changed = replace(scenario, arrivals=tuple(arrivals))
    if changed.stored is None:
        return changed
    known = known_blocks(changed)
    return replace(changed, stored={place: slots for place, slots in changed.stored.items() if place in known})


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("first", range(0, 75, SEEDS_PER_TEST))
def test_requests_with_grammars_hold(first: int) -> None:
    """They wait for their grammar, are cancelled meanwhile, preempted, resumed and lose steps, and each ends as alone.
    The executor checks that no row runs before its grammar is ready."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_scenario(with_grammars(seed), failure_seed=seed)
        totals.update(dict(report.ends))
        totals["preemptions"] += report.stats.num_preemptions
        totals["failures"] += report.num_failures
        totals["constrained"] += report.stats.num_constrained
        assert report.stats.num_held_blocks == 0
    assert all(totals[name] for name in ("stop", "length", "abort", "preemptions", "failures", "constrained")), totals


@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_seed_holds(first: int) -> None:
    """Every request of every seed ends once, as it would alone; a failure prints the command that repeats it."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        report = run_seed_or_tell(seed)
        totals.update(dict(report.ends))
        totals["preemptions"] += report.stats.num_preemptions
        totals["hits"] += report.stats.prefix_hits
        totals["failures"] += report.num_failures
        totals["fetched"] += report.num_fetched
        totals["exported"] += report.num_exported
        assert report.stats.num_held_blocks == 0
    idle = [
        name
        for name in ("stop", "length", "abort", "preemptions", "hits", "failures", "fetched", "exported")
        if not totals[name]
    ]
    assert not idle, f"seeds {first}... never exercised {idle}"


def test_a_second_life_finds_what_the_first_saved() -> None:
    """The same requests again, on an engine that starts with the store of the one before it."""
    num_saved = num_fetched = 0
    for seed in range(60):
        scenario = make_scenario(seed)
        if scenario.stored is None or scenario.failure_rate:
            continue
        first = run_scenario(replace(scenario, stored={}), failure_seed=seed)
        assert first.stored is not None
        second = run_scenario(replace(scenario, stored=first.stored), failure_seed=seed)
        assert set(first.stored) <= set(second.stored)
        num_saved += len(first.stored)
        num_fetched += second.num_fetched
    assert num_saved > 100 and num_fetched > 50


def test_runs_are_deterministic_under_any_hash_seed() -> None:
    """The digest of plans, outputs and times is equal in processes with different string hashing."""
    command = [sys.executable, "-m", "tokenmill.sim.run", "--seed", "4", "--count", "3"]
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert run_seed(4).digest in outputs[0]


CONFIG = EngineConfig(
    groups=full_groups(2048), max_model_len=2048, block_size=16, max_num_batched_tokens=512, steps_in_flight=2
)


def together(config: EngineConfig, requests: list[Request]) -> Report:
    return run_scenario(Scenario(config, TOY_COSTS, 0.0, (Arrival(0.0, tuple(requests)),), ()))


def shared_prefix_requests(num_requests: int, num_shared: int, num_own: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    shared = tuple(1 + i % 61 for i in range(num_shared))
    return [
        Request(f"r{i}", (*shared, *(1 + (i + j * 5) % 63 for j in range(num_own))), sampling, 4, seed=i)
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_clients_that_arrive_together_compute_a_shared_prefix_once(steps_in_flight: int) -> None:
    """Sixteen prompts of 1,024 shared and 64 own tokens cost 1,024 + 16 * 64, though the budget cuts the prefix."""
    report = together(replace(CONFIG, steps_in_flight=steps_in_flight), shared_prefix_requests(16, 1024, 64))
    assert report.stats.prompt_tokens == 16 * 1088
    assert report.stats.prompt_tokens_computed == 1024 + 16 * 64


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    """The switch turns sharing off and nothing else."""
    report = together(replace(CONFIG, enable_prefix_caching=False), shared_prefix_requests(4, 100, 10))
    assert report.stats.prompt_tokens_computed == 4 * 110
    assert report.stats.num_cached_blocks == 0


def test_a_pool_of_one_request_serves_many() -> None:
    """With room for one request only, a crowd is served one by one and nobody is left out."""
    requests = [
        Request(f"r{i}", tuple(range(1, 30)), SamplingParams(max_tokens=20), 20, seed=i, priority=i % 3)
        for i in range(12)
    ]
    report = together(replace(CONFIG, groups=full_groups(3), block_size=16), requests)
    assert sum(number for _, number in report.ends) == 12
    assert dict(report.ends) == {"length": 12}


def test_a_hit_that_leaves_no_block_is_given_up() -> None:
    """Alone in a pool hardly larger than its window, a prompt goes on, though blocks of it that are cached fill what
    is left of the pool. (In this seed it waited for ever.)"""
    assert run_seed(5091, scheduling_policy="fcfs", eviction_policy="lfu").stats.num_steps > 0


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_whoever_gives_way_everybody_is_served(steps_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption may choose any junior, the one with most to lose too: a crowd in a small pool ends, each as alone."""

    class MostComputed:
        def victim(self, running: List[Running], asking: int) -> int:
            return max(range(asking + 1, len(running)), key=lambda index: (running[index].num_computed, index))

    monkeypatch.setattr(state, "pick", lambda config: replace(pick(config), preemption=MostComputed()))
    rng = random.Random(1)
    requests = []
    for i in range(40):
        prompt = tuple(rng.randrange(1, 64) for _ in range(rng.choice([20, 60, 200])))
        num_new = rng.choice([10, 60, 200])
        requests.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=num_new), num_new, seed=i))
    config = replace(CONFIG, groups=full_groups(40), max_num_batched_tokens=128, steps_in_flight=steps_in_flight)
    report = together(config, requests)
    assert report.stats.num_preemptions > 10
    assert sum(number for _, number in report.ends) == 40
