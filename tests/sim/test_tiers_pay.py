"""Fetch or compute, on virtual time: a tier that is slower than computing costs next to nothing, whatever it said of
itself, and a fast one saves what it can; between both, the head is computed while the tail loads. The same prompts come
again and again, and the pool holds two of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.effects import StoreOpened
from tokenmill.core.events import Drain, EngineStats, StepOutputs, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tiers import DISK, HOST, TierFacts
from tokenmill.engine.build import build_engine, local_link
from tokenmill.kv.connector.scheduler import load_or_recompute
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.sim.executor import ToyExecutor
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.tier_store import ToyMachine
from tokenmill.sim.tiers import Medium, Pace

BLOCK_BYTES = 368_640
COSTS = Costs(step_s=0.02, token_s=0.001, position_s=1e-7)
NUM_PROMPTS, NUM_TURNS, NUM_TOKENS = 8, 20, 480
CONFIG = EngineConfig(full_groups(64, BLOCK_BYTES), max_model_len=1024)
SAID = (TierFacts(HOST, 0, 0.0005, 3e9), TierFacts(DISK, 0, 0.001, 5e8))


def mean_ttft_s(pace: Pace | None) -> tuple[float, EngineStats]:
    """Of the prompts that have come before; without tiers where there is no pace of the disk."""
    loop, rng = VirtualLoop(limit_s=1e5), random.Random(3)
    machine = None
    if pace is not None:
        config = TierConfig(
            CONFIG.numerics_id, (BLOCK_BYTES,), 80 * BLOCK_BYTES, (DISK,), 1 << 40, admissions={DISK: "all"}
        )
        medium = Medium(1 << 40, (BLOCK_BYTES,), pace=pace)
        machine = ToyMachine(config, {DISK: medium}, loop, rng)
    executor = ToyExecutor(CONFIG, loop, costs=COSTS, machine=machine, incarnation="worker")
    engine_end, front_end = local_link()
    first = [StoreOpened(tiers=SAID)] if machine is not None else []
    shell = build_engine(CONFIG, executor, engine_end, loop, first=first)
    prompts = [tuple(rng.choices(range(1, 64), k=NUM_TOKENS)) for _ in range(NUM_PROMPTS)]
    ttfts: list[float] = []

    async def ask(name: str, prompt: tuple[int, ...]) -> None:
        begun_s, first_s = loop.time(), -1.0
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        await front_end.send(Submit((Request(name, prompt, sampling, 8, 0, arrival_s=begun_s),)))
        while True:
            message = await front_end.receive()
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                first_s = first_s if first_s >= 0 else loop.time() - begun_s
                if output.finish_reason is not None:
                    ttfts.append(first_s)
                    return

    async def main() -> None:
        if machine is not None:
            machine.start()
        engine = loop.spawn(shell.run(), "engine")
        for turn in range(NUM_TURNS):
            for nth, prompt in enumerate(prompts):
                await ask(f"{turn}/{nth}", prompt)
                await asyncio.sleep(0.3)
        await front_end.send(Drain())
        await engine

    loop.run(main())
    again = ttfts[NUM_PROMPTS:]
    return sum(again) / len(again), shell.core.stats()


@pytest.fixture(scope="module")
def computed_s() -> float:
    return mean_ttft_s(None)[0]


@pytest.mark.parametrize("bytes_s", [1e6, 1e7, 2.2e7])
def test_a_tier_slower_than_computing_costs_next_to_nothing(bytes_s: float, computed_s: float) -> None:
    """It said that it was up to 500 times as fast; what it costs to learn the truth is in these times."""
    ttft_s, stats = mean_ttft_s(Pace(0.01, bytes_s))
    assert ttft_s < 1.05 * computed_s and stats.external_recomputed > 0.3 * NUM_PROMPTS * NUM_TURNS * NUM_TOKENS


@pytest.mark.parametrize(("bytes_s", "share"), [(1e8, 0.5), (1e9, 0.2)])
def test_a_faster_one_saves_what_it_can(bytes_s: float, share: float, computed_s: float) -> None:
    ttft_s, stats = mean_ttft_s(Pace(0.001, bytes_s))
    assert ttft_s < share * computed_s and stats.external_recomputed < 0.1 * NUM_PROMPTS * NUM_TURNS * NUM_TOKENS


@pytest.mark.parametrize(("bytes_s", "share"), [(1e7, 0.85), (2.2e7, 0.65), (3e7, 0.65)])
def test_where_both_take_about_as_long_each_does_a_part(
    bytes_s: float, share: float, computed_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clearly less than fetching or computing all of it, whichever is better."""
    both_s, stats = mean_ttft_s(Pace(0.01, bytes_s))
    assert both_s < share * computed_s and stats.external_hits
    monkeypatch.setattr(load_or_recompute, "CLEARLY", 0.0)
    either_s, _ = mean_ttft_s(Pace(0.01, bytes_s))
    assert both_s < 0.95 * either_s
