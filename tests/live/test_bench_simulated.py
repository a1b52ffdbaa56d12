"""One load, on a live server and on a simulated service: the same requests, the same counts, the same plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from test_bench_serve import load, serving, target

from synthetic_server import Script
from tokenmill.bench.load import datasets
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.plan import Plan
from tokenmill.bench.load.run import Load, run_load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.result import RequestRow, Run
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.plan.play import About, simulate
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.service import Service

CONFIG = EngineConfig(groups=full_groups(512), max_model_len=4096, max_num_batched_tokens=256)
Make = Callable[[int, int], Plan]


def talks(num: int, seed: int) -> Plan:
    return datasets.conversations(num, seed, Lengths(16, 4), 3, think_time_s=0.01)


def groups(num: int, seed: int) -> Plan:
    return datasets.shared_prefixes(num, seed, Lengths(16, 8), 3, 32)


def live(chosen: Load) -> Run:
    async def go() -> Run:
        async with serving(Script(ttft_s=0.002, itl_s=0.001)) as (port, _):
            return await run_load(target(port), chosen)

    return asyncio.run(go())


def simulated(chosen: Load) -> Run:
    def begin(loop: VirtualLoop, seed: int) -> Service:
        return Service(Deployment((WorkerPlan("w0", "mixed", CONFIG, Costs(step_s=0.001)),)), loop, seed=seed)

    return simulate(begin, chosen, About()).run


def asked(row: RequestRow) -> tuple[Any, ...]:
    """What was asked of a service, and what it gave, times aside."""
    lengths = row.wanted_input_tokens, row.wanted_output_tokens, row.input_tokens, row.output_tokens
    return row.index, row.session, row.turn, row.tenant, row.group, *lengths, row.ok, row.finish_reason


@pytest.mark.parametrize(
    ("schedule", "make"),
    [(Schedule(request_rate=100.0), None), (Schedule(concurrency=4), groups), (Schedule(concurrency=2), talks)],
    ids=["open", "closed", "multi-turn"],
)
def test_a_load_is_the_same_live_and_simulated(schedule: Schedule, make: Make | None) -> None:
    """Equal sets of requests, lengths and counts, by equal definitions; an open loop's due times agree as well."""
    chosen = load(schedule, 30, make)
    real, virtual = live(chosen), simulated(chosen)
    assert real.dataset["plan_digest"] == virtual.dataset["plan_digest"]
    assert sorted(map(asked, real.requests)) == sorted(map(asked, virtual.requests))
    for name in ("num_requests", "num_ok", "input_tokens", "output_tokens", "num_retries", "schedule"):
        assert getattr(real, name) == getattr(virtual, name), name
    assert set(real.to_json()) == set(virtual.to_json())
    if not schedule.is_closed:
        due = [sorted(row.due_s for row in run.requests) for run in (real, virtual)]
        assert due[0] == pytest.approx(due[1], abs=1e-6)
