"""The simulated service: clients hear what the live gateway says, when it says it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tokenmill.cluster.admission import BoundedWait
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.errors import Overloaded
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.fault_script import read_faults
from tokenmill.sim.fields import Fields
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.parts import PartsPlan
from tokenmill.sim.service import Service
from tokenmill.sim.timed import END_TOKEN

CONFIG = EngineConfig(groups=full_groups(512), max_model_len=4096, max_num_batched_tokens=256)
COSTS = Costs(step_s=0.01, token_s=0.0001)


def deployment(num_workers: int = 1) -> Deployment:
    return Deployment(tuple(WorkerPlan(f"w{number}", "mixed", CONFIG, COSTS) for number in range(num_workers)))


def request(number: int, num_prompt: int = 100, most: int = 20) -> Request:
    sampling = SamplingParams(max_tokens=most, temperature=0.0)
    return Request(f"r{number}", (number % 256,) * num_prompt, sampling, most, number, eos_token_ids=(END_TOKEN,))


class Heard:
    """(when, output) of one request."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.heard: list[tuple[float, Output]] = []
        self.end = asyncio.Event()

    def __call__(self, output: Output) -> None:
        self.heard.append((self.loop.time(), output))
        if output.finish_reason is not None:
            self.end.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for _, output in self.heard)


def test_a_client_hears_tokens_when_steps_end() -> None:
    """One step for 100 tokens and 19 for one each; an end token ends it one step later, which is planned before."""
    loop = VirtualLoop()
    service = Service(deployment(), loop)

    async def main() -> tuple[Heard, Heard]:
        await service.start()
        full, short = Heard(loop), Heard(loop)
        began_s = loop.time()
        service.open(request(0), "a", full)
        await full.end.wait()
        assert loop.time() - began_s == pytest.approx(0.02 + 19 * 0.0101, rel=0.02)
        service.open(request(1), "a", short, num_output=5)
        await short.end.wait()
        await service.stop()
        return full, short

    full, short = loop.run(main())
    assert full.num_tokens == 20 and full.heard[-1][1].finish_reason == "length"
    assert short.num_tokens == 4 and short.heard[-1][1].finish_reason == "stop"
    report = service.report
    assert report.steps == {"w0": 26} and report.busy_s["w0"] == pytest.approx(26 * 0.01 + 224 * 0.0001)
    assert not report.unseen and report.queues


def test_who_gives_up_hears_no_more() -> None:
    loop = VirtualLoop()
    service = Service(deployment(), loop)

    async def main() -> Heard:
        await service.start()
        heard = Heard(loop)
        service.open(request(0, most=1000), "a", heard)
        await asyncio.sleep(0.1)
        service.give_up("r0")
        service.give_up("r0")
        num = len(heard.heard)
        await asyncio.sleep(1.0)
        assert num == len(heard.heard) and not service.gateway.num_open
        await service.stop()
        return heard

    heard = loop.run(main())
    assert 0 < heard.num_tokens < 15
    assert service.report.steps["w0"] < 20


def test_calls_that_may_not_enter_are_told_when_to_come_back() -> None:
    loop = VirtualLoop()

    def set_up(gateway: Gateway) -> None:
        gateway.admission = BoundedWait(max_open=8, max_tokens=10**6, max_wait_s=1e9)

    service = Service(deployment(), loop, set_up=set_up)
    refused: list[Overloaded] = []

    async def main() -> list[Heard]:
        await service.start()
        heards = [Heard(loop) for _ in range(10)]
        for number, heard in enumerate(heards[:9]):
            service.open(request(number), f"client {number}", heard, refuse=refused.append)
        service.open(request(9), "client 9", heards[9])
        for heard in heards[:8]:
            await heard.end.wait()
        await service.stop()
        return heards

    heards = loop.run(main())
    assert [heard.num_tokens for heard in heards] == [20] * 8 + [0, 0]
    assert refused[0].retry_after_s > 0 and refused[0].reason == "choices"
    assert heards[9].heard[0][1].error_kind == "overloaded_error"
    assert service.report.refused == {"choices": 2}


def test_steps_beyond_what_a_cost_model_was_measured_on_are_counted() -> None:
    class Law:
        def predict(self, work: Work) -> float:
            return 0.01

        def is_seen(self, work: Work) -> bool:
            return work.num_tokens <= 64

    loop = VirtualLoop()
    plan = deployment()
    service = Service(replace(plan, workers=(replace(plan.workers[0], cost_model=Law()),)), loop)

    async def main() -> None:
        await service.start()
        heard = Heard(loop)
        service.open(request(0), "a", heard)
        await heard.end.wait()
        await service.stop()

    loop.run(main())
    assert service.report.unseen == {(1, 128): 1}


def test_preemptions_of_all_lives_are_counted() -> None:
    """A worker without room for what its requests grow to has as many whether it dies afterwards or not."""

    def num_preemptions(*tables: dict[str, object]) -> int:
        loop = VirtualLoop()
        worker = WorkerPlan("w0", "mixed", replace(CONFIG, groups=full_groups(16), max_model_len=256), COSTS)
        faults = read_faults(Fields({"faults": list(tables)}))
        service = Service(Deployment((worker,), parts=PartsPlan(faults=faults)), loop)

        async def main() -> None:
            await service.start()
            heards = [Heard(loop) for _ in range(4)]
            for number, heard in enumerate(heards):
                service.open(request(number, num_prompt=48, most=100), "a", heard)
            for heard in heards:
                await heard.end.wait()
            assert loop.time() < 20.0
            await asyncio.sleep(30.0 - loop.time())
            await service.stop()

        loop.run(main())
        assert len(service.report.faults) == len(tables)
        return service.report.num_preemptions

    crash = {"kind": "crash", "target": "w0", "at_s": 20.0}
    assert num_preemptions(crash) == num_preemptions() > 0


def test_a_cold_start_keeps_its_worker_away() -> None:
    """The first worker serves alone until the second is ready."""
    loop = VirtualLoop()
    plan = deployment(2)
    cold = replace(plan.workers[1], start_s=5.0)
    service = Service(replace(plan, workers=(plan.workers[0], cold)), loop)

    async def main() -> None:
        await service.start()
        assert loop.time() < 0.1
        for number in range(40):
            service.open(request(number), "a", Heard(loop))
            await asyncio.sleep(0.25)
        await asyncio.sleep(1.0)
        await service.stop()

    loop.run(main())
    assert 0 < service.report.steps["w1"] < service.report.steps["w0"]
