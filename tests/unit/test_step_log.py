"""The step log: what a live shell writes is read back, its file is bounded and kept, and bad files are told apart."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tokenmill.cli.engine_process import num_blocks_of
from tokenmill.core.block import WINDOW, KVGroupSpec, full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import work_of
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import Drain, Submit
from tokenmill.core.flight import SIZE as FLIGHT_SIZE
from tokenmill.core.flight import FlightWriter, read_flight
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.speculation import SpeculationConfig
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.core.step_records import (
    MAGIC,
    NUM_REQUESTS,
    NUM_STEPS,
    SIZE,
    VERSION,
    LogFacts,
    StepWriter,
    TimedRequest,
    TimedStep,
    read_steps,
)
from tokenmill.engine.build import build_engine, local_link
from tokenmill.engine.recorders import FlightRecorder, StepLog
from tokenmill.net.mapped_files import NUM_STEP_LOGS, step_file
from tokenmill.sim.executor import NO_DRAFTER, ToyDrafter, ToyExecutor
from tokenmill.sim.loop import VirtualLoop

FACTS = LogFacts("toy", "id", "cpu", "avx2", 2, 16, 100, 8, 64, 0.25)


def step(number: int) -> TimedStep:
    return TimedStep(number, 1.0, 1.1, 1.5, 0.3, 1.6, 3, 2, 18, 2, 3, 1, 50, 0, 400, 90, 60)


def test_what_is_written_is_read_back() -> None:
    data = bytearray(SIZE)
    writer = StepWriter(data, FACTS)
    request = TimedRequest(4, 1.0, 1.1, 1.5, 2.0, 20, 4, 9, 1)
    writer.step(step(0))
    writer.request(request)
    found = read_steps(bytes(data), "log")
    assert (found.facts, found.steps, found.requests, found.num_lost) == (FACTS, (step(0),), (request,), 0)


def test_the_last_steps_and_requests_are_kept() -> None:
    """A ring: its bytes do not grow, and the reader says how many steps are gone."""
    data = bytearray(SIZE)
    writer = StepWriter(data, FACTS)
    for number in range(NUM_STEPS + 5):
        writer.step(step(number))
    for number in range(NUM_REQUESTS + 3):
        writer.request(TimedRequest(number, 1.0, 1.1, 1.5, number, 20, 4, 9, 1))
    found = read_steps(bytes(data), "log")
    assert found.num_lost == 5 and len(found.steps) == NUM_STEPS
    assert (found.steps[0].number, found.steps[-1].number) == (5, NUM_STEPS + 4)
    assert (found.requests[0].seq, len(found.requests)) == (3, NUM_REQUESTS)


def test_a_log_tells_the_blocks_that_long_prompts_need() -> None:
    """Pools of windows hold the last positions alone, whatever their size."""
    windows = KVGroupSpec(WINDOW, 500, window=64), KVGroupSpec(WINDOW, 40, window=32)
    assert num_blocks_of(full_groups(100)) == num_blocks_of((*full_groups(100), *windows)) == 100
    assert num_blocks_of(windows) == 500


def test_files_of_earlier_starts_are_kept_and_others_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    for life in range(NUM_STEP_LOGS + 2):
        with step_file(str(path), FACTS) as writer:
            assert writer is not None
            writer.step(step(life))
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["steps", *(f"steps.{number}" for number in range(1, NUM_STEP_LOGS + 1))]
    assert [read_steps((tmp_path / name).read_bytes(), name).steps[0].number for name in names] == [4, 3, 2, 1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size == SIZE
    dear = tmp_path / "thesis"
    dear.write_text("dear")
    with step_file(str(dear), FACTS) as writer:
        assert writer is None
    assert dear.read_text() == "dear"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"dear", "is no step log"),
        (MAGIC + (VERSION + 1).to_bytes(4, "little") + bytes(SIZE - 12), f"of version {VERSION + 1}"),
        (MAGIC + VERSION.to_bytes(4, "little") + bytes(SIZE - 12), "damaged"),
    ],
)
def test_a_bad_log_is_one_line(data: bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_steps(data, "some.log")
    assert "some.log" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("drafter", [NO_DRAFTER, ToyDrafter(most=3)])
def test_a_shell_logs_the_work_and_times_of_its_steps(drafter: ToyDrafter) -> None:
    """Chunks of prompts beside decodes, which may have drafts: each record has the sums that its plan's rows come to,
    and the executor's times; what a flight recorder is told stays the same."""
    speculation = SpeculationConfig(num_speculative_tokens=3, adaptive=False) if drafter.most else None
    config = EngineConfig(
        groups=full_groups(64), max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, speculation=speculation
    )
    loop = VirtualLoop(limit_s=1e4)
    data, flown = bytearray(SIZE), bytearray(FLIGHT_SIZE)
    recorder = FlightRecorder(FlightWriter(flown, pid=1, began_s=0.0, unix_s=0.0, model="toy"))
    executor = _Watched(config, loop, drafter)
    end, front = local_link()
    shell = build_engine(config, executor, end, loop, flight=StepLog(StepWriter(data, FACTS), recorder))

    async def run() -> None:
        running = loop.spawn(shell.run(), "engine")
        await front.send(Submit(tuple(_request(number) for number in range(5))))
        await front.send(Drain())
        await running

    loop.run(run())
    found = read_steps(bytes(data), "log")
    plans = executor.plans
    assert [each.number for each in found.steps] == [plan.step for plan in plans]
    for each, plan in zip(found.steps, plans, strict=True):
        assert each.work == work_of(plan.rows)
        ones = [row.start for row in plan.rows if row.num_tokens - len(row.drafts) == 1]
        assert (each.num_decode_rows, each.num_decode_context) == (len(ones), sum(ones))
        assert 0 <= each.planned_s <= each.submitted_s <= each.ended_s <= each.committed_s and each.duration_s > 0
    assert any(each.num_decode_rows not in (0, each.num_rows) for each in found.steps), "no mixed step"
    assert any(each.num_drawn > each.num_rows for each in found.steps) == (drafter.most > 0)
    assert sorted((one.num_prompt, one.num_output) for one in found.requests) == [(30 + n, 6) for n in range(5)]
    assert all(one.arrival_s <= one.scheduled_s < one.first_token_s <= one.ended_s for one in found.requests)
    flight = read_flight(bytes(flown)).steps
    assert [(one.number, one.ended_s, one.duration_s) for one in flight] == [
        (one.number, one.ended_s, one.duration_s) for one in found.steps
    ]


class _Watched(ToyExecutor):
    plans: list[StepPlan]

    def __init__(self, config: EngineConfig, loop: VirtualLoop, drafter: ToyDrafter) -> None:
        super().__init__(config, loop, vocab_size=50, drafter=drafter)
        self.plans = []

    async def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return await super().execute(plan)


def _request(number: int) -> Request:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    return Request(f"r-{number}", (number + 3,) * (30 + number), sampling, 6, seed=number)
