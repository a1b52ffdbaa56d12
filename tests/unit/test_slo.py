"""Objectives: what a request may say of them, whose word counts, and what a machine of a given speed can hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tokenmill.api.common_fields import read_wish, with_headers
from tokenmill.api.fields import Fields
from tokenmill.control.slo import objectives as objectives_module
from tokenmill.control.slo.objectives import ENOUGH_STEPS, Measuring, Objectives
from tokenmill.core.cost import Costs
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.events import Ready
from tokenmill.core.request import Request
from tokenmill.core.slo import NO_WISH, PROFILES, Targets, Wish, raised, unloaded
from tokenmill.core.terms import Terms

COSTS = Costs(step_s=0.004, row_s=0.001, token_s=0.001, position_s=1e-7)


def _objectives(mode: str = "off", costs: Costs = COSTS) -> Objectives:
    return Objectives(mode, lambda: costs, lambda: 512)


def test_a_body_names_a_profile_or_targets() -> None:
    """The field slo is a name, or an object whose parts may each be left out."""
    assert read_wish(Fields({})) == NO_WISH
    assert read_wish(Fields({"slo": "rag"})) == Wish("rag")
    assert read_wish(Fields({"slo": {"ttft_ms": 250}})) == Wish("", 0.25)
    assert read_wish(Fields({"slo": {"ttft_ms": 3000.0, "tpot_ms": 12}})) == Wish("", 3.0, 0.012)
    assert read_wish(Fields({"slo": {"profile": "chat", "tpot_ms": 30}})) == Wish("chat", 0.0, 0.03)


@pytest.mark.parametrize("prefix", ["x-slo-", "x-llm-d-slo-", "x-gateway-inference-slo-"])
def test_headers_count_more_than_the_body(prefix: str) -> None:
    """Targets of gateways' headers take the place of the body's, one by one."""
    name = prefix.encode()
    headers = [(b"host", b"x"), (name + b"ttft-ms", b"300"), (name + b"profile", b"code"), (b"x-slow", b"1")]
    assert with_headers(Wish("chat", 1.0, 2.0), headers) == Wish("code", 0.3, 2.0)


@pytest.mark.parametrize(
    ("header", "value"), [("x-slo-ttft-ms", "soon"), ("x-slo-tpot-ms", "0"), ("x-slo-ttft-ms", "nan")]
)
def test_a_bad_header_is_named(header: str, value: str) -> None:
    """A header that is no number in range is refused under its own name."""
    with pytest.raises(InvalidRequest) as caught:
        with_headers(NO_WISH, [(header.encode(), value.encode())])
    assert caught.value.param == header


@pytest.mark.parametrize(
    ("value", "param"),
    [({"profile": "x"}, "slo.profile"), ({"ttft_ms": 0}, "slo.ttft_ms"), ({"tpot_ms": "x"}, "slo.tpot_ms"),
     ({"tpot_ms": 4_000_000}, "slo.tpot_ms"), ({"ttft_m": 3}, "slo.ttft_m")],
)  # fmt: skip
def test_a_bad_part_of_a_body_is_named(value: object, param: str) -> None:
    """What is wrong inside the object is refused under its own name, misspelled names too."""
    with pytest.raises(InvalidRequest) as caught:
        read_wish(Fields({"slo": value}))
    assert caught.value.param == param


def test_what_a_request_says_comes_first() -> None:
    """A request's own target, then its profile, then the tenant's target, then the tenant's profile, then --slo."""
    fast = Costs(token_s=1e-6)
    tenant = Terms(tenant="t", profile="rag", ttft_s=0.7)
    each = _objectives("content", fast)
    assert each.terms(tenant, NO_WISH, 10)[4:7] == ("rag", 0.7, 0.05)
    assert each.terms(tenant, Wish("chat"), 10)[4:7] == ("chat", 0.2, 0.02)
    assert each.terms(tenant, Wish("chat", 0.3), 10)[4:7] == ("chat", 0.3, 0.02)
    assert each.terms(tenant, Wish("", 0.3), 10)[4:7] == ("rag", 0.3, 0.05)
    assert each.terms(tenant, Wish("batch"), 10)[4:7] == ("batch", 0.0, 0.0)
    assert each.terms(Terms(), NO_WISH, 10)[4:7] == ("content", 2.0, 0.1)
    assert _objectives("auto", fast).terms(Terms(), NO_WISH, 10, "edge")[4:7] == ("edge", 0.25, 0.1)
    assert _objectives("off", fast).terms(Terms(), NO_WISH, 10, "edge") == Terms()


def test_profiles_have_no_targets_while_the_machine_is_measured() -> None:
    """Those that a request or tenant states count also then."""
    num_steps = [ENOUGH_STEPS - 1]
    each = Objectives("chat", lambda: COSTS, lambda: 512, lambda: num_steps[0])
    assert each.terms(Terms(), NO_WISH, 10)[4:7] == ("chat", 0.0, 0.0)
    assert each.terms(Terms(tpot_s=0.1), Wish("", 0.3), 10)[4:7] == ("chat", 0.3, 0.1)
    num_steps[0] = ENOUGH_STEPS
    assert each.terms(Terms(), NO_WISH, 10).ttft_s > 2.0


class _Machine:
    """An engine whose requests make so many steps each."""

    def __init__(self, steps_each: int) -> None:
        self.steps_each = steps_each
        self.num_steps = 2  # of two requests that came first
        self.num_requests = 0
        self.objectives = Objectives("auto", lambda: COSTS, lambda: 512, lambda: self.num_steps)

    async def wait_ready(self, longest_s: float) -> Ready:
        return Ready("m", 10_000, 100, (), "numerics", 16, 4)

    async def compute(self, request: Request, client: str) -> None:
        self.num_requests += 1
        self.num_steps += self.steps_each
        await asyncio.sleep(0 if self.steps_each else 3600)

    def measure(self, until: Callable[[], bool]) -> None:
        async def run() -> None:
            measuring = Measuring(self, self.objectives, SimpleNamespace(now=lambda: 0.0), lambda kind: kind)
            measuring.open()
            async with asyncio.timeout(20):
                while not until():
                    await asyncio.sleep(0.001)
            await measuring.close()

        asyncio.run(run())


def test_two_requests_tell_no_targets(caplog: pytest.LogCaptureFixture) -> None:
    """They may come before the server begins to measure; it does so all the same, and then tells what it raised."""
    caplog.set_level(logging.INFO)
    machine = _Machine(steps_each=19)
    machine.measure(lambda: "Profile agent, raised" in caplog.text)
    assert machine.num_requests == 3 and machine.num_steps >= ENOUGH_STEPS


def test_a_machine_too_slow_to_be_measured_says_so_and_tells_targets_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(objectives_module, "_MOST_S", 0.0)
    monkeypatch.setattr(objectives_module, "_LOOK_S", 0.0)
    machine = _Machine(steps_each=0)

    def until() -> bool:
        if "no targets until 48 steps" in caplog.text:
            assert "raised" in caplog.text or machine.num_steps == 2
            machine.num_steps = ENOUGH_STEPS  # clients made them
        return "raised" in caplog.text

    machine.measure(until)
    assert caplog.text.index("no targets until 48 steps") < caplog.text.index("raised")


def test_targets_are_raised_to_what_the_machine_can_hold() -> None:
    """No target of a profile is below twice what its median prompt takes alone; slack targets stay as they are."""
    each = _objectives()
    for name, profile in PROFILES.items():
        alone = unloaded(COSTS, profile.num_prompt, 512)
        if name == "batch":
            assert each.effective[name] == Targets()
            continue
        assert each.effective[name].ttft_s == max(profile.targets.ttft_s, 2 * alone.ttft_s)
        assert each.effective[name].tpot_s == max(profile.targets.tpot_s, 2 * alone.tpot_s)
    assert each.effective["chat"].ttft_s > 2.0, "a prompt of 1,035 tokens takes 1 s on this machine"
    assert each.effective["content"].tpot_s == 0.1


def test_a_long_prompt_gets_what_it_takes() -> None:
    """A prompt beyond its profile's median has twice its own time, so that none is late before it came."""
    each = _objectives("chat")
    assert each.terms(Terms(), NO_WISH, 4000).ttft_s == 2 * unloaded(COSTS, 4000, 512).ttft_s > 8
    assert each.terms(Terms(), NO_WISH, 20).ttft_s == each.effective["chat"].ttft_s


def test_a_prompt_alone_is_computed_in_chunks() -> None:
    """The unloaded time counts every step and every position once."""
    alone = unloaded(COSTS, 1000, 512)
    positions = 1000 * 999 // 2
    assert alone.ttft_s == pytest.approx(2 * 0.005 + 1000 * 0.001 + positions * 1e-7)
    assert alone.tpot_s == pytest.approx(0.004 + 0.001 + 0.001 + 1000 * 1e-7)
    assert unloaded(Costs(), 1000, 512) == Targets()
    assert raised(Targets(0.2, 0.02), Targets()) == Targets(0.2, 0.02)


def test_targets_follow_the_machine() -> None:
    """New costs give new targets once they differ by more than a tenth."""
    costs = [COSTS]
    each = Objectives("off", lambda: costs[0], lambda: 512)
    before = each.effective
    costs[0] = COSTS._replace(token_s=0.00105)
    assert each.effective is before
    costs[0] = COSTS._replace(token_s=0.002)
    assert each.effective["chat"].ttft_s > 1.5 * before["chat"].ttft_s
