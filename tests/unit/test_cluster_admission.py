"""Who is turned away, and with which reason, from what is open alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tokenmill.cluster.admission import BoundedWait, Everybody
from tokenmill.core.policy import Forecast, Newcomer
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.terms import Terms

POLICY = BoundedWait(max_open=80, max_tokens=800, max_wait_s=10.0)


@dataclass
class Calls:
    """A fake of what a gateway has open."""

    num_open: int = 5
    num_tokens: int = 0
    choice_s: float = 2.0
    waits_s: float = 0.0
    tpot_s: float = 0.02
    tightest_s: float = 0.0
    shed_from: int = 3
    own: dict[str, tuple[int, int]] = field(default_factory=dict)

    def num_open_of(self, client: str) -> int:
        return self.own.get(client, (0, 0))[0]

    def num_tokens_of(self, client: str) -> int:
        return self.own.get(client, (0, 0))[1]

    def forecast(self, newcomer: Newcomer, now: float) -> Forecast:
        ttft_s = self.waits_s + 0.1
        return Forecast(self.waits_s, ttft_s, self.tpot_s, 1.1 * ttft_s, 1.25 * self.tpot_s)

    def wait_s(self, newcomer: Newcomer, now: float) -> float:
        return self.waits_s

    def tpot_target_s(self, terms: Terms) -> float:
        return self.tightest_s or terms.tpot_s

    def shed_s(self, priority_class: int, now: float) -> float:
        return 3.0 if priority_class >= self.shed_from else 0.0


@pytest.mark.parametrize(
    ("calls", "newcomer", "reason", "retry_s"),
    [
        (Calls(79), Newcomer("a"), "", 0),
        (Calls(80), Newcomer("a"), "choices", 2.0),
        (Calls(75, own={"a": (69, 0)}), Newcomer("a"), "", 0),
        (Calls(75, own={"a": (70, 0)}), Newcomer("a"), "choices", 2.0),
        (Calls(0), Newcomer("a", num_choices=1000), "", 0),
        (Calls(4, 799), Newcomer("a", num_held=1), "", 0),
        (Calls(4, 799), Newcomer("a", num_held=2), "tokens", 4.0),
        (Calls(4, 710, own={"a": (4, 700)}), Newcomer("a", num_held=1), "tokens", 4.0),
        (Calls(0, 0), Newcomer("a", num_held=5000), "", 0),
        (Calls(waits_s=10.0), Newcomer("a"), "", 0),
        (Calls(waits_s=12.5), Newcomer("a"), "wait", 2.5),
    ],
)
def test_a_call_enters_or_hears_why_not(calls: Calls, newcomer: Newcomer, reason: str, retry_s: float) -> None:
    refusal = POLICY.judge(newcomer, calls, 0.0).refusal
    assert (refusal.reason, refusal.retry_s) == (reason, retry_s) if refusal else not reason
    assert Everybody().judge(newcomer, calls, 0.0).refusal is None


SOON = Newcomer("a", terms=Terms(ttft_s=1.0, tpot_s=0.05))


@pytest.mark.parametrize(
    ("calls", "newcomer", "reason", "retry_s", "need"),
    [
        (Calls(waits_s=0.8), SOON, "", 0, 0.99),
        (Calls(waits_s=1.4), SOON, "ttft", 0.65, 1.65),
        (Calls(waits_s=0.8), SOON._replace(since_s=0.3), "ttft", 0.29, 1.29),
        (Calls(waits_s=0.85), SOON, "ttft", 0.045, 1.045),
        (Calls(tpot_s=0.08), SOON, "tpot", 5.0, 2.0),
        (Calls(tpot_s=0.041), SOON, "tpot", 10 * (1 - 1 / 1.025), 1.025),
        (Calls(tpot_s=0.04), SOON, "", 0, 1.0),
        (Calls(tpot_s=0.032, tightest_s=0.02), SOON, "tpot", 5.0, 2.0),
        (Calls(waits_s=9.0), Newcomer("a"), "", 0, 0.9),
        (Calls(shed_from=1), Newcomer("a"), "shed", 3.0, 0.0),
        (Calls(shed_from=2), Newcomer("a"), "", 0, 0.0),
        (Calls(0, waits_s=5.0, tpot_s=9.0), SOON, "", 0, 0.5),
        (Calls(waits_s=50.0), Newcomer("a", IDLE_PRIORITY, terms=Terms(ttft_s=1.0)), "", 0, 0.0),
    ],
)
def test_a_call_that_would_miss_its_targets_hears_which_and_when_it_would_not(
    calls: Calls, newcomer: Newcomer, reason: str, retry_s: float, need: float
) -> None:
    """Also one that would slow others below theirs; calls without targets are judged by their wait alone."""
    verdict = POLICY.judge(newcomer, calls, 0.0)
    told = verdict.refusal
    assert (told.reason, pytest.approx(told.retry_s)) == (reason, retry_s) if told else not reason
    assert verdict.need == pytest.approx(need)
    plain = replace(POLICY, keeps_targets=False).judge(newcomer, calls, 0.0).refusal
    assert plain is None or plain.reason == "wait"


def test_a_target_that_cannot_be_met_is_told_with_what_raises_it() -> None:
    """In the request, and for a tenant's own; another's target is not the caller's to raise."""
    terms = Terms("alice", profile="chat", ttft_s=0.05)
    refusal = POLICY.judge(Newcomer("a", terms=terms), Calls(), 0.0).refusal
    assert refusal is not None and refusal.message == (
        "The first token would come after 110 ms, and is wanted within 50 ms (profile chat); to raise the target, "
        'send "slo": {"ttft_ms": 120}, or type `tokenmill tenants set alice --ttft-ms 120`'
    )
    refusal = POLICY.judge(Newcomer("a", terms=Terms(tpot_s=0.02)), Calls(), 0.0).refusal
    assert refusal is not None and refusal.message.endswith('to raise the target, send "slo": {"tpot_ms": 30}')
    refusal = POLICY.judge(Newcomer("a", terms=Terms(tpot_s=0.05)), Calls(tightest_s=0.01), 0.0).refusal
    assert refusal is not None and refusal.message.endswith("wanted within 10 ms")
