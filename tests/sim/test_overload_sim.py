"""Overload on virtual time: the real front end, engine and scheduler under more than they can serve. Every request is
answered or refused, and what is served stays what was served at the rate that can be held."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field, replace

import pytest

from queueing import Paced, hash_of, make_ready
from tokenmill.cluster.request_queue import newcomer
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, work_of
from tokenmill.core.errors import Overloaded
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import PlanRow, StepPlan, StepResult
from tokenmill.core.terms import Terms
from tokenmill.engine.build import build_engine, local_link
from tokenmill.server.client import EngineClient
from tokenmill.server.config import ServerConfig
from tokenmill.server.limits import Limits
from tokenmill.sim.loop import VirtualLoop

CONFIG = EngineConfig(groups=full_groups(8000), max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=576)
COSTS = Costs(step_s=0.004, row_s=0.001, token_s=0.001, position_s=4e-7, context_s=1e-6)
TPOT_S = 0.1


@dataclass
class Machine:
    """Steps take what the costs say, and up to a tenth more or less."""

    rng: random.Random

    def of(self, plan: StepPlan) -> float:
        return COSTS.predict(work_of(plan.rows)) * self.rng.uniform(0.9, 1.1)


class HeldUp(Paced):
    """Between its steps goes by three tenths of what they tell to have taken, as where others use the same cores."""

    async def execute(self, plan: StepPlan) -> StepResult:
        result = await super().execute(plan)
        return replace(result, duration_s=result.duration_s / 1.3)


def alone_s(num_prompt: int) -> float:
    starts = range(0, num_prompt, 512)
    return sum(COSTS.predict(work_of([PlanRow(0, at, (7,) * min(512, num_prompt - at))])) for at in starts)


@dataclass
class Seen:
    ttft_target_s: float
    end: str = ""
    retry_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def is_met(self) -> bool:
        return self.end in ("stop", "length") and self.ttft_s <= self.ttft_target_s and self.tpot_s <= TPOT_S


@dataclass
class OverloadSettings:
    """One seed at a rate. `forecasts`: (told, took) of first tokens."""

    rate: float
    seed: int
    num: int = 90
    seen: list[Seen] = field(default_factory=list)
    forecasts: list[tuple[float, float]] = field(default_factory=list)
    num_left: int = -1
    executor: type[Paced] = Paced

    def run(self) -> OverloadSettings:
        loop = VirtualLoop(limit_s=3600.0)
        loop.run(self._main(loop))
        return self

    async def _main(self, loop: VirtualLoop) -> None:
        rng = random.Random(f"overload {self.seed}")
        engine_end, front_end = local_link()
        client = EngineClient()
        client.gateway.is_shared = True
        limits = Limits(ServerConfig(("m",), max_queue_s=60.0), client, loop)
        client.attach(front_end)
        executor = self.executor(Machine(rng))  # type: ignore[arg-type]
        engine = loop.spawn(build_engine(CONFIG, executor, engine_end, loop).run(), "engine")
        await engine_end.send(make_ready(CONFIG))
        while client.ready is None:
            await asyncio.sleep(0)
        handle = client._handle

        def noting(event):  # type: ignore[no-untyped-def]
            effects = handle(event)
            self.forecasts += effects.forecasts
            return effects

        client._handle = noting  # type: ignore[method-assign]
        calls = []
        for number in range(self.num):
            await asyncio.sleep(rng.expovariate(self.rate_of(number)))
            calls.append(loop.create_task(self._call(client, limits, loop, f"c{number}", *self.sizes(rng))))
        await asyncio.gather(*calls)
        self.num_left = client.num_open
        client.close("over")
        front_end.close()
        await engine

    def rate_of(self, number: int) -> float:
        return self.rate

    def sizes(self, rng: random.Random) -> tuple[int, int]:
        return min(1500, int(rng.lognormvariate(5.6, 0.8)) + 12), 1 + int(rng.expovariate(1 / 40))

    async def _call(
        self, client: EngineClient, limits: Limits, loop: VirtualLoop, name: str, num_prompt: int, num_output: int
    ) -> Seen:
        now = loop.time()
        own_s = alone_s(num_prompt)
        seen = Seen(0.5 + 2 * own_s)
        self.seen.append(seen)
        terms = Terms(ttft_s=seen.ttft_target_s, tpot_s=TPOT_S, queue_s=0.5 + own_s)
        head = hash_of(name)
        prompt = (*head, *(1 + i % 61 for i in range(num_prompt)))[:num_prompt]
        request = Request(name, prompt, SamplingParams(max_tokens=num_output), num_output, 0, terms=terms)
        request = replace(request, arrival_s=now)
        try:
            stream = client.open([request], name, 1, limits.admit(newcomer(name, [request], now)))
        except Overloaded as error:
            assert error.retry_after_s >= 0 and error.message
            seen.end, seen.retry_s = "refused", error.retry_after_s
            return seen
        num = 0
        while True:
            for delta in await stream.take():
                if delta.tokens and not num:
                    seen.ttft_s = loop.time() - now
                num += len(delta.tokens)
                if delta.finish_reason is not None:
                    seen.end = delta.error_kind or delta.finish_reason
                    seen.tpot_s = (loop.time() - now - seen.ttft_s) / max(1, num - 1)
                    return seen

    @property
    def goodput(self) -> float:
        return sum(each.is_met for each in self.seen) / len(self.seen) * self.rate


@dataclass
class Decoding(OverloadSettings):
    """Short prompts: what binds is the time of a token, which is longer than steps tell."""

    executor: type[Paced] = HeldUp

    def sizes(self, rng: random.Random) -> tuple[int, int]:
        return 32 + rng.randrange(64), 1 + int(rng.expovariate(1 / 60))


@dataclass
class RetryOutcome(OverloadSettings):
    """Four times the rate that can be held for a while, then half of it. Who is refused comes back once, as told."""

    num_pressing: int = 240
    pressed_s: float = 0.0
    returned: list[tuple[Seen, float]] = field(default_factory=list)

    def rate_of(self, number: int) -> float:
        return (4.0 if number < self.num_pressing else 0.5) * self.rate

    async def _call(
        self, client: EngineClient, limits: Limits, loop: VirtualLoop, name: str, num_prompt: int, num_output: int
    ) -> Seen:
        if name == f"c{self.num_pressing}":
            self.pressed_s = loop.time()
        seen = await super()._call(client, limits, loop, name, num_prompt, num_output)
        if seen.end == "refused":
            await asyncio.sleep(max(1, math.ceil(seen.retry_s)))
            now = loop.time()
            again = await super()._call(client, limits, loop, f"{name}again", num_prompt, num_output)
            self.returned.append((again, now))
        return seen


@pytest.fixture(scope="module")
def courses() -> dict[float, list[OverloadSettings]]:
    """By the rate, of which 1 can be held, three seeds each."""
    return {rate: [OverloadSettings(rate, seed).run() for seed in range(3)] for rate in (1.0, 2.0, 4.0)}


def test_every_request_is_answered_or_refused_and_none_is_left(courses: dict[float, list[OverloadSettings]]) -> None:
    for settings in (each for some in courses.values() for each in some):
        assert {each.end for each in settings.seen} <= {"length", "stop", "refused", "overloaded_error"}
        assert len(settings.seen) == settings.num and settings.num_left == 0


def test_goodput_stays_where_it_was_at_twice_and_four_times_the_rate(
    courses: dict[float, list[OverloadSettings]],
) -> None:
    """At a rate that can be held nearly all are served in time; above it, no fewer a second are."""
    calm, *loaded = (sum(settings.goodput for settings in some) / len(some) for some in courses.values())
    assert calm >= 0.85
    assert min(loaded) >= calm, (calm, loaded)


def test_those_who_are_let_in_are_served_in_time_however_many_are_not(
    courses: dict[float, list[OverloadSettings]],
) -> None:
    """At twice and four times the rate most of those that are computed keep their targets, once it is known what steps
    cost."""
    for rate in (2.0, 4.0):
        known = [each for settings in courses[rate] for each in settings.seen[20:]]
        served = [each for each in known if each.end in ("stop", "length")]
        assert sum(each.is_met for each in served) > 0.85 * len(served), rate


def test_tokens_that_come_more_slowly_than_steps_tell_cost_no_goodput() -> None:
    """Capacity is the most that is served within both targets a second at a rate that nine of ten are; at twice and
    four times that rate at least 85 % of it is. What answers really took is learned as they end. Two seeds."""

    def goodput(rate: float) -> float:
        return sum(Decoding(rate, seed, int(60 * rate)).run().goodput for seed in range(2)) / 2

    capacity, at_twice, at_four_times = map(goodput, (5.0, 10.0, 20.0))
    assert capacity >= 0.9 * 5.0
    assert min(at_twice, at_four_times) >= 0.85 * capacity, (capacity, at_twice, at_four_times)


def test_those_who_come_back_when_they_are_told_find_room() -> None:
    """Four of five, of those that come when no more is asked for than can be served; they are most. Three seeds."""
    num_returned, later = 0, []
    for settings in (RetryOutcome(1.0, seed, 420).run() for seed in range(3)):
        num_returned += len(settings.returned)
        later += [each for each, at_s in settings.returned if at_s > settings.pressed_s]
    assert len(later) > 240 and len(later) > 0.6 * num_returned
    assert sum(each.end in ("stop", "length") for each in later) >= 0.8 * len(later)


def test_forecasts_of_first_tokens_come_true(courses: dict[float, list[OverloadSettings]]) -> None:
    """Of those above 50 ms half are off by less than 15 %, up to twice the rate; most by less than half."""
    pairs = [pair for rate in (1.0, 2.0) for settings in courses[rate] for pair in settings.forecasts]
    errors = sorted(abs(told - took) / took for told, took in pairs if took > 0.05)
    assert len(errors) > 100
    assert errors[len(errors) // 2] < 0.15 and errors[int(0.9 * len(errors))] < 0.55


def main() -> None:
    """Print what docs/operate/overload.md says of four seeds."""
    for rate in (1.0, 2.0, 4.0):
        some = [OverloadSettings(rate, seed, 120).run() for seed in range(4)]
        errors = sorted(abs(told - took) / took for each in some for told, took in each.forecasts if took > 0.05)
        median, tenth = errors[len(errors) // 2], errors[int(0.9 * len(errors))]
        goodput = sum(each.goodput for each in some) / len(some)
        print(f"{rate:g} a second: {goodput:.2f} met their targets; errors: median {median:.0%}, tenth {tenth:.0%}")


if __name__ == "__main__":
    main()
