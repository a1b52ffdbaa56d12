"""The shell on a virtual loop: when it plans, what it sends, how it ends, and that it sleeps when idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.events import Abort, Drain, Output, StepOutputs, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.engine.build import LocalFrontEnd, build_engine, local_link
from tokenmill.engine.journal import Entry, Handled, Planned
from tokenmill.engine.replay import Replayed, replay
from tokenmill.engine.shell import Pace
from tokenmill.sim.executor import ToyExecutor
from tokenmill.sim.loop import Deadlock, VirtualLoop
from tokenmill.sim.toy_model import solo_answer

CONFIG = EngineConfig(
    groups=full_groups(32), max_model_len=64, block_size=4, max_num_batched_tokens=16, steps_in_flight=2
)
STEP_S = 0.01


class WatchedExecutor:
    """The toy model, noting when each plan is submitted; the steps in `failing` raise."""

    slow: tuple[int, ...] = ()  # steps that claim to have taken half a second

    def __init__(self, loop: VirtualLoop, failing: tuple[int, ...] = ()) -> None:
        self._toy = ToyExecutor(CONFIG, loop, costs=Costs(STEP_S))
        self._loop = loop
        self._failing = failing
        self.started: list[tuple[int, float]] = []

    async def execute(self, plan: StepPlan) -> StepResult:
        self.started.append((plan.step, round(self._loop.now(), 6)))
        result = await self._toy.execute(plan)
        if plan.step in self._failing:
            raise RuntimeError("the model is on fire")
        return replace(result, duration_s=0.5) if plan.step in self.slow else result


def make_request(name: str, max_tokens: int = 3, num_prompt: int = 5) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, tuple(range(1, num_prompt + 1)), sampling, max_tokens, 0)


Script = Callable[[LocalFrontEnd], Awaitable[None]]


def serve(script: Script, failing: tuple[int, ...] = (), journal: list[Entry] | None = None) -> WatchedExecutor:
    """Run a shell beside `script`, which plays the front end, until both have ended."""
    loop = VirtualLoop()
    executor = WatchedExecutor(loop, failing)

    async def main() -> None:
        engine_end, front_end = local_link()
        record = None if journal is None else journal.append
        engine = loop.spawn(build_engine(CONFIG, executor, engine_end, loop, record).run(), "engine")
        await script(front_end)
        await engine

    loop.run(main())
    return executor


async def receive(front_end: LocalFrontEnd) -> StepOutputs:
    message = await front_end.receive()
    assert isinstance(message, StepOutputs)
    return message


async def receive_until_end(front_end: LocalFrontEnd, num_ends: int = 1) -> list[Output]:
    outputs: list[Output] = []
    while sum(1 for output in outputs if output.finish_reason) < num_ends:
        outputs += (await receive(front_end)).outputs
    return outputs


def test_steps_overlap_and_every_step_is_reported() -> None:
    """Two steps are submitted at once, then one whenever one ends; each is one message, with its time and stats."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a"),)))
        messages = [await receive(front_end) for _ in range(3)]
        assert [len(message.outputs) for message in messages] == [1, 1, 1]
        assert [round(message.now_s, 6) for message in messages] == [STEP_S, 2 * STEP_S, 3 * STEP_S]
        tokens = [token for message in messages for output in message.outputs for token in output.tokens]
        assert tuple(tokens) == solo_answer(make_request("a"), 64).tokens
        assert messages[-1].stats.num_steps == 3 and messages[-1].stats.num_held_blocks == 0
        await front_end.send(Drain())

    executor = serve(script)
    assert executor.started == [(0, 0.0), (1, 0.0), (2, STEP_S)]


def test_a_request_starts_at_once_when_a_step_may_be_added() -> None:
    """A message that arrives in the middle of a step does not wait for its end."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a", max_tokens=1),)))
        await asyncio.sleep(STEP_S / 2)
        await front_end.send(Submit((make_request("b", max_tokens=1),)))
        await receive_until_end(front_end, 2)
        await front_end.send(Drain())

    assert serve(script).started == [(0, 0.0), (1, STEP_S / 2)]


def test_a_request_joins_the_step_after_the_one_it_arrives_in() -> None:
    """Once the pace is known, a step is planned when half of the one before is over: in time, and no sooner."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a", max_tokens=9),)))
        await asyncio.sleep(4.4 * STEP_S)
        await front_end.send(Submit((make_request("b", max_tokens=2),)))
        starts = {}
        while len(starts) < 2:
            message = await receive(front_end)
            starts |= {output.request_id: round(message.now_s, 6) for output in message.outputs if output.timing}
        assert starts == {"a": STEP_S, "b": 6 * STEP_S}
        await receive_until_end(front_end, 2)
        await front_end.send(Drain())

    started = serve(script).started
    assert started[:6] == [(0, 0.0), (1, 0.0), (2, STEP_S), (3, 0.025), (4, 0.035), (5, 0.045)]


def test_the_pace_errs_on_the_short_side() -> None:
    """It follows a shorter step at once and a longer one slowly; what is unknown or short is not waited for. Steps that
    have not been seen are judged by those of fewer and of more tokens."""
    pace = Pace()
    assert pace.predict(8) == pace.delay(8) == 0
    pace.note(8, 0.012)
    assert [round(pace.predict(count), 6) for count in (1, 4, 7, 8, 15, 16)] == [0.0015, 0.006, 0.0105] + [0.012] * 3
    assert [round(pace.delay(count), 6) for count in (1, 4, 7, 8, 15)] == [0, 0.003, 0.00525, 0.006, 0.006]
    pace.note(1, 0.008)
    assert [round(pace.predict(count), 6) for count in (2, 4, 7)] == [0.008, 0.008, 0.0105]
    pace.note(9, 0.1)
    assert round(pace.predict(9), 6) == 0.015
    assert round(pace.predict(8), 6) == round(0.015 * 8 / 9, 6), "fewer tokens take less"
    pace.note(9, 0.004)
    assert pace.predict(9) == 0.004 and pace.delay(9) == 0
    pace.note(512, 0.08)
    assert round(pace.delay(512), 6) == 0.065


def test_refusals_and_aborts_need_no_step() -> None:
    """They are answered at once, while nothing runs; an unknown id is not answered at all."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("long", num_prompt=100),)))
        (output,) = (await receive(front_end)).outputs
        assert (output.request_id, output.finish_reason) == ("long", "error")
        await front_end.send(Submit((make_request("a"),)))
        await front_end.send(Abort(("nobody", "a")))
        (output,) = (await receive(front_end)).outputs
        assert (output.request_id, output.finish_reason) == ("a", "abort")
        await front_end.send(Drain())

    assert serve(script).started == []


def test_an_abort_is_in_effect_at_the_next_step_border() -> None:
    """No token comes after the abort was answered, and the engine goes on with the others."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a", 20), make_request("b", 4))))
        await receive(front_end)
        await front_end.send(Abort(("a",)))
        outputs = await receive_until_end(front_end, 2)
        assert [output.finish_reason for output in outputs if output.request_id == "a"] == ["abort"]
        assert sum(len(output.tokens) for output in outputs if output.request_id == "b") == 3
        await front_end.send(Drain())

    serve(script)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The error reaches the client with its cause, is logged, and the next request is served."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a"),)))
        (output,) = await receive_until_end(front_end)
        assert output.finish_reason == "error" and "RuntimeError: the model is on fire" in output.error
        await front_end.send(Submit((make_request("b"),)))
        outputs = await receive_until_end(front_end)
        tokens = [token for output in outputs for token in output.tokens]
        assert tuple(tokens) == solo_answer(make_request("b"), 64).tokens
        await front_end.send(Drain())

    with caplog.at_level(logging.ERROR):
        serve(script, failing=(0,))
    assert "Step 0 of 1 rows failed." in caplog.text


def test_draining_finishes_what_was_admitted_and_refuses_the_rest() -> None:
    """The shell returns when the last request has ended."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a"),)))
        await front_end.send(Drain())
        await front_end.send(Submit((make_request("late"),)))
        outputs = await receive_until_end(front_end, 2)
        ends = {output.request_id: output for output in outputs if output.finish_reason}
        assert ends["late"].error_kind == "unavailable_error" and ends["a"].finish_reason == "length"

    serve(script)


def test_the_shell_ends_when_the_front_end_is_gone() -> None:
    """It waits for the steps in flight and starts no more."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a", 50),)))
        await receive(front_end)
        front_end.close()

    assert len(serve(script).started) <= 3


def test_an_idle_shell_sleeps() -> None:
    """With nothing to do it arms no timer and polls nothing: the virtual loop sees a deadlock, not a busy loop."""

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a"),)))
        await receive_until_end(front_end)
        await front_end.receive()

    with pytest.raises(Deadlock):
        serve(script)


def test_a_recorded_run_replays_to_the_same_plans() -> None:
    """Plan parity: a fresh core gives the recorded plans; with one request missing, or other settings, it does not."""
    journal: list[Entry] = []

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a"), make_request("b", 5, 20))))
        await receive_until_end(front_end, 2)
        await front_end.send(Drain())

    executor = serve(script, journal=journal)
    assert replay(CONFIG, journal) == Replayed(len(executor.started))
    only_a = Handled(Submit((make_request("a"),)), 0.0)
    without_b = [
        only_a if isinstance(entry, Handled) and isinstance(entry.event, Submit) else entry for entry in journal
    ]
    difference = replay(CONFIG, without_b).difference
    assert difference is not None and difference.recorded is not None and difference.replayed is not None
    assert (len(difference.recorded.rows), len(difference.replayed.rows)) == (2, 1)
    assert any(isinstance(entry, Planned) and entry.plan is not None for entry in journal)


def test_a_broken_link_ends_the_shell_with_its_error() -> None:
    """Only EOFError means that the front end left; anything else comes out of run()."""
    loop = VirtualLoop()

    class BrokenLink:
        async def receive(self) -> Submit:
            raise ValueError("undecodable")

        async def send(self, message: object) -> None:
            raise AssertionError(message)

    shell = build_engine(CONFIG, WatchedExecutor(loop), BrokenLink(), loop)
    with pytest.raises(ValueError, match="undecodable"):
        loop.run(shell.run())


def test_long_steps_say_what_they_are(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """At debug, against steps of their size; not the first of a size, of which nothing was expected."""
    monkeypatch.setattr(WatchedExecutor, "slow", (0, 4))

    async def script(front_end: LocalFrontEnd) -> None:
        await front_end.send(Submit((make_request("a", 8),)))
        await front_end.send(Drain())
        while not any(output.finish_reason for output in (await receive(front_end)).outputs):
            pass

    with caplog.at_level(logging.DEBUG, logger="tokenmill.engine.shell"):
        serve(script)
    (said,) = (record.getMessage() for record in caplog.records if "took" in record.getMessage())
    assert said == "Step 4 took 500 ms instead of 10: 1 rows (0 of them new, 1 drawing), 1 tokens."
