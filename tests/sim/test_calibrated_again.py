"""A cost model that a simulated engine runs by is found again from the step log of that engine: what is logged, fitted
and simulated means the same."""

from __future__ import annotations

import asyncio
import random

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Work
from tokenmill.core.events import Drain, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step_records import SIZE, LogFacts, Machine, StepRecords, StepWriter, read_steps
from tokenmill.engine.build import build_engine, local_link
from tokenmill.engine.recorders import StepLog
from tokenmill.plan.fit.logs import fit
from tokenmill.sim.calibrated import Calibrated, Curve, Line
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.network import Network, Shape
from tokenmill.sim.peers import ToyNetwork
from tokenmill.sim.timed import TimedExecutor

CONFIG = EngineConfig(full_groups(2000), max_model_len=2048, max_num_seqs=24, max_num_batched_tokens=256)
LAW = Calibrated(
    Machine(),
    step_s=0.004,
    position_s=3e-8,
    context_s=5e-7,
    tokens=Curve((0, 16, 128), (0.0001, 0.0004, 0.0003)),
    rows=Curve((0,), (0.0003,)),
    drawn=Curve((0,), (0.0,)),
    gap=Line(0.0006, 0.00002, 9),
)


def _run(cost_model: Calibrated) -> StepRecords:
    """Sixty requests, some of them alone, some in bursts."""
    loop, rng, data = VirtualLoop(limit_s=1e4), random.Random(4), bytearray(SIZE)
    executor = TimedExecutor(CONFIG, cost_model, {}, loop, Network(loop, Shape(), rng), ToyNetwork(1), "w", "w1")
    end, front = local_link()
    shell = build_engine(CONFIG, executor, end, loop, flight=StepLog(StepWriter(data, LogFacts("toy"))))

    async def drive() -> None:
        running = loop.spawn(shell.run(), "engine")
        for number in range(60):
            prompt = tuple(rng.choices(range(3, 200), k=rng.randrange(5, 700)))
            sampling = SamplingParams(ignore_eos=True)
            request = Request(f"r-{number}", prompt, sampling, rng.randrange(10, 80), seed=number)
            await front.send(Submit((request,)))
            await asyncio.sleep(rng.choice((0.01, 0.05, 0.2, 1.5)))
        await front.send(Drain())
        await running

    loop.run(drive())
    return read_steps(bytes(data), "log")


def test_the_cost_model_of_a_simulated_engine_is_found_again() -> None:
    log = _run(LAW)
    found, slowness = fit([log])
    assert len(log.steps) > 500 and max(slowness) < 1.03 > 1 / min(slowness)
    for step in log.steps:
        assert abs(found.predict(step.work) / LAW.predict(step.work) - 1) < 0.05, (step.work, found.predict(step.work))
    unseen = sum(not found.is_seen(step.work) for step in log.steps)  # mixtures that came once or twice
    assert unseen < 0.03 * len(log.steps), unseen
    for num_rows in (2, 6, 12):
        work = Work(num_rows, num_rows, 0)
        assert abs(found.gap_s(work) / LAW.gap_s(work) - 1) < 0.1, (num_rows, found.gap_s(work), LAW.gap_s(work))


def test_a_simulation_by_the_found_cost_model_ends_when_the_first_did() -> None:
    """Within 1 %: the errors of single steps do not add up."""
    log = _run(LAW)
    again = _run(fit([log]).cost_model)
    assert abs(again.steps[-1].ended_s / log.steps[-1].ended_s - 1) < 0.01
    busy, busy_again = (sum(step.duration_s for step in each.steps) for each in (log, again))
    assert abs(busy_again / busy - 1) < 0.02
