"""When an engine counts as lost though its link is open: soon after it stops, and never while it gets on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tokenmill.cluster.failures import LIMIT_S, LOOK_S, STEP_SHARE, Liveness
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.effects import Job
from tokenmill.core.events import Beat, EngineStats, FromEngine, Ready, StepOutputs, Submit
from tokenmill.core.ports import Executor
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.engine import background as beats
from tokenmill.engine.background import HEARTBEAT_S, send_heartbeats
from tokenmill.engine.build import build_engine, local_link
from tokenmill.net.system import MonotonicClock
from tokenmill.server.client import EngineClient
from tokenmill.sim.executor import ToyExecutor

FOREVER_S = 1e9
MESSAGES_LATE_S = 0.2


def messages(rng: random.Random, until_s: float, hangs_s: float) -> Iterator[tuple[float, FromEngine]]:
    """Times and messages of an engine with steps of 1 ms to 60 s, known to a factor of two, which stops at `until_s`
    and whose kernels hang from `hangs_s` on. They arrive up to MESSAGES_LATE_S late, in order."""
    now = ended_s = beaten_s = 0.0
    num_steps = 0
    duration_s = expected_s = 0.0
    arrived_s = 0.0
    while now < until_s:
        if now >= ended_s and now < hangs_s:
            num_steps += 1
            duration_s = 10 ** rng.uniform(-3, 1.8)
            expected_s = duration_s * rng.uniform(0.5, 2)
            ended_s = now + duration_s
            message: FromEngine = StepOutputs((), EngineStats(num_steps=num_steps, in_flight_s=expected_s), now)
        else:
            message = Beat(int(min(now, hangs_s) * 1e3), 1, expected_s)
            beaten_s = now
        arrived_s = max(arrived_s, now + rng.uniform(0, MESSAGES_LATE_S))
        yield arrived_s, message
        next_s = beaten_s + HEARTBEAT_S
        now = min(next_s, ended_s) if ended_s > now and now < hangs_s else next_s


def lost_at(rng: random.Random, until_s: float, hangs_s: float, end_s: float, stalls: bool) -> tuple[float, float]:
    """When it counts as lost, FOREVER_S for not before `end_s`, and what its last steps should have taken. stalls: the
    watcher is held up for up to 20 s now and then, and hears at a look what has come by then."""
    liveness, coming = Liveness(LIMIT_S), messages(rng, until_s, hangs_s)
    next_ = next(coming, None)
    now = expected_s = 0.0
    while now < end_s:
        if liveness.look(now, has_work=True):
            return now, expected_s
        while next_ is not None and next_[0] <= now:
            liveness.hear(next_[1])
            expected_s = getattr(next_[1], "in_flight_s", expected_s)
            next_ = next(coming, None)
        now += rng.uniform(1, 20) if stalls and rng.random() < 0.02 else LOOK_S
    return FOREVER_S, expected_s


@pytest.mark.parametrize("seed", range(40))
def test_an_engine_that_gets_on_is_never_lost(seed: int) -> None:
    """Steps of up to a minute, whatever was expected of them, messages late, the watcher late."""
    rng = random.Random(seed)
    assert lost_at(rng, FOREVER_S, FOREVER_S, 300.0, stalls=seed % 2 == 0)[0] == FOREVER_S


@pytest.mark.parametrize("seed", range(40))
def test_one_that_stops_is_lost_within_two_seconds_however_long_its_step(seed: int) -> None:
    rng = random.Random(seed)
    stopped_s = rng.uniform(1, 60)
    found_s, _ = lost_at(rng, stopped_s, FOREVER_S, 300.0, stalls=False)
    assert stopped_s < found_s <= stopped_s + LIMIT_S + MESSAGES_LATE_S


@pytest.mark.parametrize("seed", range(40))
def test_one_whose_kernels_hang_is_lost_within_five_times_its_step(seed: int) -> None:
    rng = random.Random(seed)
    hung_s = rng.uniform(1, 60)
    found_s, expected_s = lost_at(rng, FOREVER_S, hung_s, 1000.0, stalls=False)
    assert hung_s < found_s <= hung_s + max(LIMIT_S, STEP_SHARE * expected_s) + MESSAGES_LATE_S + 2 * HEARTBEAT_S


def test_what_is_idle_or_not_watched_is_never_lost() -> None:
    for liveness, has_work in ((Liveness(LIMIT_S), False), (Liveness(0.0), True)):
        assert not any(liveness.look(look * LOOK_S, has_work) for look in range(1000))


def test_time_without_work_does_not_count_against_the_work_that_comes() -> None:
    liveness = Liveness(LIMIT_S)
    liveness.look(0.0, has_work=True)
    liveness.look(LOOK_S, has_work=False)
    assert not liveness.look(3600.0, has_work=True) and not liveness.look(3600.0 + LOOK_S, has_work=True)


@pytest.mark.parametrize(
    "beat", [Beat(None, 1, 0.1), Beat(7, 0, 0.0), Beat(7, 1, 0.0), Beat(7, 1, 0.1, 1)],
    ids=["kernels that tell nothing", "no step under way", "costs unknown", "a job may hold the step up"],
)  # fmt: skip
def test_one_that_beats_is_not_stuck_unless_it_must_have_got_on(beat: Beat) -> None:
    liveness = Liveness(LIMIT_S)
    for look in range(600):
        liveness.hear(beat)
        assert not liveness.look(look * LOOK_S, has_work=True)


class Held:
    """An executor whose steps are held up before they begin."""

    def __init__(self, executor: Executor) -> None:
        self.step_s = 0.05
        self._executor = executor

    async def execute(self, plan: StepPlan) -> StepResult:
        await asyncio.sleep(self.step_s)
        return await self._executor.execute(plan)

    async def run(self, job: Job) -> str:
        return await self._executor.run(job)


def test_a_client_lets_go_of_an_engine_that_hangs_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real shell on a real loop: it beats through a step that takes longer than the limit; then its kernels hang."""
    monkeypatch.setattr(beats, "HEARTBEAT_S", 0.05)

    async def main() -> None:
        config, clock = EngineConfig(groups=full_groups(16), max_model_len=64, steps_in_flight=1), MonotonicClock()
        client, broken = EngineClient(liveness_s=0.6), asyncio.Event()
        engine, front = local_link()
        client.attach(front, on_broken=broken.set)
        await engine.send(Ready("m", 64, 128, (), "numerics", 16, 8))
        executor = Held(ToyExecutor(config, clock))
        shell = build_engine(config, executor, engine, clock)
        ticks = iter(range(10**9))
        is_hung = False
        serving = asyncio.create_task(shell.run())
        beating = asyncio.create_task(send_heartbeats(shell, engine, lambda: 7 if is_hung else next(ticks)))
        await client.wait_ready(5.0)
        executor.step_s = 0.9  # longer than the limit, and than was expected
        client.open([Request("slow", (1, 2, 3), SamplingParams(), 2, seed=1, arrival_s=clock.now())])
        while client.num_open:
            assert client.ready is not None and not broken.is_set()
            await asyncio.sleep(0.05)
        executor.step_s, is_hung = 1000.0, True
        shell.core.state.costs.costs = Costs(step_s=0.1)
        client.open([Request("lost", (1, 2, 3), SamplingParams(), 2, seed=1, arrival_s=clock.now())])
        await asyncio.wait_for(broken.wait(), 30)
        assert client.ready is None and client.num_open == 1, "it waits for another engine"
        client.close("over")
        serving.cancel()
        beating.cancel()

    asyncio.run(main())


def test_an_idle_engine_does_not_beat() -> None:
    async def main() -> None:
        config, clock = EngineConfig(groups=full_groups(16), max_model_len=64), MonotonicClock()
        engine, front = local_link()
        shell = build_engine(config, ToyExecutor(config, clock), engine, clock)
        serving = asyncio.create_task(shell.run())
        beating = asyncio.create_task(send_heartbeats(shell, engine, lambda: None))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(front.receive(), 3 * HEARTBEAT_S)
        await front.send(Submit((Request("r", (1,), SamplingParams(), 2, seed=1, arrival_s=clock.now()),)))
        assert await front.receive()
        serving.cancel()
        beating.cancel()

    asyncio.run(main())
