"""Who is turned away, and with which reason, from what is open alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tokenmill.cluster.admission import BoundedWait, Everybody
from tokenmill.core.policy import Newcomer

POLICY = BoundedWait(max_open=80, max_tokens=800, max_wait_s=10.0)


@dataclass
class Calls:
    """A fake of what a gateway has open."""

    num_open: int = 0
    num_tokens: int = 0
    choice_s: float = 2.0
    waits_s: float = 0.0
    own: dict[str, tuple[int, int]] = field(default_factory=dict)

    def num_open_of(self, client: str) -> int:
        return self.own.get(client, (0, 0))[0]

    def num_tokens_of(self, client: str) -> int:
        return self.own.get(client, (0, 0))[1]

    def wait_s(self, newcomer: Newcomer, now: float) -> float:
        return self.waits_s


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
    refusal = POLICY.refusal(newcomer, calls, 0.0)
    assert (refusal.reason, refusal.retry_s) == (reason, retry_s) if refusal else not reason
    assert Everybody().refusal(newcomer, calls, 0.0) is None
