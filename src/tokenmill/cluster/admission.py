"""Who may come in: bounds on what is open, shared by clients, and on the wait. Pure policies (core.policy)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.policy import Newcomer, OpenCalls, Refusal
from ..core.request import IDLE_PRIORITY

_PARTS = 8
"""A client may have all of so many parts but one, of open choices and of their tokens."""


class Everybody:
    """Nobody is turned away: the one program that uses the engine knows what it asks for."""

    def refusal(self, newcomer: Newcomer, calls: OpenCalls, now: float) -> Refusal | None:
        return None


@dataclass(frozen=True, slots=True)
class BoundedWait:
    """A call is turned away when what is open, of all clients or of its own, would exceed a bound, or when its first
    choice would wait too long, unless it has the lowest priority. A call larger than a bound runs alone.

    max_open    choices
    max_tokens  their prompt tokens together
    max_wait_s  predicted wait of a call for its first choice
    """

    max_open: int
    max_tokens: int
    max_wait_s: float

    def refusal(self, newcomer: Newcomer, calls: OpenCalls, now: float) -> Refusal | None:
        client, num_choices, num_held = newcomer.client, newcomer.num_choices, newcomer.num_held
        own_choices, own_tokens = calls.num_open_of(client), calls.num_tokens_of(client)
        num_all, num_own = calls.num_open + num_choices, own_choices + num_choices
        excess = max(num_all - self.max_open, num_own - _but_one_part(self.max_open))
        if excess > 0 and calls.num_open:
            return Refusal("choices", f"{calls.num_open} choices are open", excess * calls.choice_s)
        num_all, num_own = calls.num_tokens + num_held, own_tokens + num_held
        if calls.num_tokens and (num_all > self.max_tokens or num_own > _but_one_part(self.max_tokens)):
            message = f"{calls.num_tokens} prompt tokens are held for open choices"
            return Refusal("tokens", message, calls.num_open * calls.choice_s / 2)
        if newcomer.priority >= IDLE_PRIORITY:
            return None
        wait_s = calls.wait_s(newcomer, now)
        if wait_s > self.max_wait_s:
            message = f"The wait would be {wait_s:.0f} s"
            return Refusal("wait", message, wait_s - self.max_wait_s, kept_s=2 * self.max_wait_s)
        return None


def _but_one_part(most: int) -> int:
    return most - most // _PARTS
