"""Who may come in: bounds on what is open, shared by clients, on the wait, and what calls say they need. Pure policies
(core.policy)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.policy import ENTERS, Admission, Forecast, Newcomer, OpenCalls, Refusal, Verdict
from ..core.request import IDLE_PRIORITY
from ..core.terms import Terms
from .request_queue import RequestQueue

_PARTS = 8
"""A client may have all of so many parts but one, of open choices and of their tokens."""
_SHORT = 0.1
"""A call without targets whose wait is roughly less than this of what it may be enters without a forecast."""
PREDICTED = ("wait", "ttft", "tpot", "shed")
"""Reasons that follow from predictions."""


class Everybody:
    """Nobody is turned away: the one program that uses the engine knows what it asks for."""

    def judge(self, newcomer: Newcomer, calls: OpenCalls, now: float) -> Verdict:
        return ENTERS


@dataclass(frozen=True, slots=True)
class BoundedWait:
    """A call is turned away when what is open, of all clients or of its own, would exceed a bound, or when its first
    choice would wait too long, unless it has the lowest priority. A call larger than a bound runs alone.

    Where `keeps_targets`, also one with a target that the upper quantile of its forecast misses, or that would make
    those miss theirs for further tokens that draw already; and one of a class below another that is not served in
    time. With nothing open a call enters whatever is expected: what steps take is known from steps alone.

    max_open    choices
    max_tokens  their prompt tokens together
    max_wait_s  predicted wait of a call for its first choice
    """

    max_open: int
    max_tokens: int
    max_wait_s: float
    keeps_targets: bool = True

    def judge(self, newcomer: Newcomer, calls: OpenCalls, now: float) -> Verdict:
        refusal = self._too_much(newcomer, calls)
        if refusal is not None:
            return Verdict(refusal)
        if newcomer.priority >= IDLE_PRIORITY:
            return ENTERS
        terms = newcomer.terms
        if terms.ttft_s or terms.tpot_s or calls.wait_s(newcomer, now) > _SHORT * self.max_wait_s:
            seen = calls.forecast(newcomer, now)
        else:
            seen = Forecast()
        need = seen.wait_s / self.max_wait_s
        if seen.wait_s > self.max_wait_s:
            message = f"The wait would be {seen.wait_s:.1f} s, and at most {self.max_wait_s:g} s are allowed"
            refusal = Refusal("wait", message, seen.wait_s - self.max_wait_s, in_turn=True)
            return Verdict(refusal, seen, need)
        if not self.keeps_targets or not calls.num_open:
            return Verdict(None, seen, need)
        shed_s = calls.shed_s(terms.priority_class, now)
        if shed_s:
            message = f"Requests of class P{terms.priority_class} give way to better ones"
            return Verdict(Refusal("shed", message, shed_s), seen, need)
        if terms.ttft_s:
            told_s = newcomer.since_s + seen.ttft_upper_s
            need = max(need, told_s / terms.ttft_s)
            if told_s > terms.ttft_s:
                message = (
                    f"The first token would come after {1e3 * told_s:.0f} ms, "
                    f"and is wanted within {1e3 * terms.ttft_s:.0f} ms{_raising(terms, 'ttft_ms', told_s)}"
                )
                refusal = Refusal("ttft", message, told_s - terms.ttft_s, in_turn=True)
        tpot_s, told_s = calls.tpot_target_s(terms), seen.tpot_upper_s
        if tpot_s:
            need = max(need, told_s / tpot_s)
            if refusal is None and told_s > tpot_s:
                message = f"Tokens would come every {1e3 * told_s:.0f} ms, and are wanted within {1e3 * tpot_s:.0f} ms"
                if tpot_s == terms.tpot_s:  # else it is a target of those that draw already
                    message += _raising(terms, "tpot_ms", told_s)
                retry_s = (1 - tpot_s / told_s) * calls.num_open * calls.choice_s
                refusal = Refusal("tpot", message, retry_s, in_turn=True)
        return Verdict(refusal, seen, need)

    def _too_much(self, newcomer: Newcomer, calls: OpenCalls) -> Refusal | None:
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
        return None


def _raising(terms: Terms, name: str, told_s: float) -> str:
    """Whose target it is, and what raises it to one that this machine meets: a field of the request, or a flag of the
    command that sets the tenant's."""
    wanted_ms = 10 * math.ceil(1e3 * told_s / 10)
    profile = f" (profile {terms.profile})" if terms.profile else ""
    tenant = f", or type `tokenmill tenants set {terms.tenant} --{name.replace('_', '-')} {wanted_ms}`"
    how = f'send "slo": {{"{name}": {wanted_ms}}}{tenant if terms.tenant else ""}'
    return f"{profile}; to raise the target, {how}"


def judged(admission: Admission, newcomer: Newcomer, request_queue: RequestQueue, now: float) -> Verdict:
    """What the admission says. Those who are told to come back by a predicted wait come one after another, as there
    will be room for them; the request queue is told of predictions that keep calls out."""
    verdict = admission.judge(newcomer, request_queue, now)
    refusal = verdict.refusal
    if refusal is None:
        return verdict
    if refusal.reason in PREDICTED:
        request_queue.pressure.note(newcomer.terms.priority_class, verdict.need, now)
    if not refusal.in_turn:
        return verdict
    retry_s = request_queue.retry_after.tell(now, refusal.retry_s, newcomer.num_choices, request_queue.choice_s)
    return verdict._replace(refusal=refusal._replace(retry_s=retry_s))


def _but_one_part(most: int) -> int:
    return most - most // _PARTS
