"""What each policy is for, shown on the whole engine: fixed loads, exact figures."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import work_of
from tokenmill.core.events import Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepResult
from tokenmill.engine.core import EngineCore
from tokenmill.sim.executor import TOY_COSTS
from tokenmill.sim.run import Report, run_scenario
from tokenmill.sim.workload import Arrival, Scenario

CONFIG = EngineConfig(
    full_groups(40), max_model_len=400, block_size=16, max_num_batched_tokens=128, max_num_seqs=4, steps_in_flight=1
)


def document(name: str, num_tokens: int) -> tuple[int, ...]:
    rng = random.Random(name)
    return tuple(rng.randrange(1, 64) for _ in range(num_tokens))


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 2) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), max_tokens, 0)


def run(config: EngineConfig, arrivals: Iterable[Arrival]) -> Report:
    return run_scenario(Scenario(config, TOY_COSTS, 0.0, tuple(arrivals), ()))


def questions(seed: int, num_documents: int, num_each: int) -> list[Request]:
    """About documents of 256 tokens, in no order; the cache holds two documents."""
    names = [name for name in range(num_documents) for _ in range(num_each)]
    random.Random(seed).shuffle(names)
    return [ask(f"q{i}", (*document(f"d{n}", 256), *document(f"q{i}", 20))) for i, n in enumerate(names)]


@pytest.mark.parametrize("seed", range(3))
def test_lpm_computes_documents_fewer_times(seed: int) -> None:
    """64 questions about eight documents arrive at once, mixed. Longest prefix match first has them answered document
    by document; in order of arrival, or by what was to be computed as they came, documents drive each other out."""
    arrivals = [Arrival(0.0, tuple(questions(seed, 8, 8)))]
    computed = {
        policy: run(replace(CONFIG, scheduling_policy=policy), arrivals).stats.prompt_tokens_computed
        for policy in ("lpm", "fcfs", "short-prompts-first")
    }
    least = 8 * 256 + 64 * 20
    assert least <= computed["lpm"] < 1.5 * least, computed
    assert computed["fcfs"] > 2.5 * computed["lpm"] and computed["short-prompts-first"] > 2.5 * computed["lpm"]


def test_lfu_keeps_a_system_prompt_through_bursts() -> None:
    """A busy assistant's calls begin alike; between them come long documents, each asked about once. By frequency the
    system prompt is computed once or twice, by age after every burst."""
    system = document("system", 256)
    arrivals = []
    for turn in range(12):
        calls = [ask(f"call {turn} {i}", (*system, *document(f"call {turn} {i}", 20))) for i in range(4)]
        arrivals.append(Arrival(turn, tuple(calls)))
        burst = [ask(f"once {turn} {i}", document(f"once {turn} {i}", 200)) for i in range(8)]
        arrivals.append(Arrival(turn + 0.5, tuple(burst)))
    config = replace(CONFIG, groups=full_groups(80))
    hits = {
        policy: run(replace(config, eviction_policy=policy), arrivals).stats.prefix_hits for policy in ("lru", "lfu")
    }
    assert hits["lru"] <= 12 * 3 * 256
    assert hits["lfu"] >= (12 * 4 - 2) * 256


def test_an_engine_measures_what_its_steps_take() -> None:
    """Durations of steps tell what a position costs, and what of the next step can be predicted."""
    core = EngineCore(CONFIG)
    core.handle(Submit(tuple(ask(f"r{i}", document(f"r{i}", 300), 1) for i in range(6))), 0.0)
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        work = work_of(plan.rows)
        rows = tuple(RowResult(row.seq, (1,) if row.sample else ()) for row in plan.rows)
        took_s = 1e-4 * (plan.num_tokens + 0.002 * work.num_positions)
        predicted_s = core.stats().costs.predict(work)
        core.commit(StepResult(plan.step, rows, took_s), 0.0)
    assert core.state.costs.attention == pytest.approx(16 * 0.002, rel=0.15)
    assert predicted_s == pytest.approx(took_s, rel=0.15) and core.stats().cost_error < 0.3
