"""What sequences have received, by class, tenant and adapter: token service, as `core.fairness` counts it.

Prompts are charged as they are planned, output when somebody has to be compared: a step that nobody waits for pays
nothing. Each token is charged once, whatever becomes of the sequence, so that recomputation is free.

`PromptShares` tells who had most of the prompt tokens lately. What `Shares` counts does not: whoever comes back to wait
is lifted to the least of those that wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.fairness import IDLE_CLASS, MASK_SERVICE, OUTPUT_SERVICE, PROMPT_SERVICE, TOLERANCE_STEPS, Shares, class_of
from ..core.sequence import Sequence, Status

Rank = tuple[int, float, int, float, float, int]
"""Who is served next: by class, then the tenant that has received least, then by priority, then the adapter that has
received least, then as the order of service says (`due`), then by arrival. Idle work, whoever's it is, is a class of
its own behind all."""


def seniority(seq: Sequence) -> tuple[int, int, int]:
    """Who keeps its blocks: by class, then by priority, then by arrival. Numbers are unique, so no two are equal."""
    request = seq.request
    return (class_of(request), request.priority, seq.number)


_LATELY_STEPS = 16
"""A tenant is there lately until so many full steps of prompts have been computed since its last one."""
_BURST = 8
"""So many steps in a row may be short for whoever waits; on average, as many as their price allows."""


class PromptShares:
    """Prompt tokens of tenants, lately: what was computed longer ago counts less. `window`: of tokens, of which a third
    is still counted."""

    def __init__(self, window: float) -> None:
        self._window = max(1.0, window)
        self._now = 0.0  # tokens of all so far
        self._had: dict[str, tuple[float, float]] = {}  # tokens, as counted when the clock stood there
        self._paid = 0.0

    def note(self, tenant: str, num_tokens: int) -> None:
        had = self.had(tenant)
        self._now += num_tokens
        self._had.pop(tenant, None)
        self._had[tenant] = (had + num_tokens, self._now)
        while self._now - self._had[first := next(iter(self._had))][1] > self._window:
            del self._had[first]  # who had some longest ago

    def had(self, tenant: str) -> float:
        num_tokens, at = self._had.get(tenant, (0.0, 0.0))
        return num_tokens * math.exp((at - self._now) / self._window)

    def is_shared(self, tenants: Iterable[str]) -> bool:
        """Whether these, and those that had some lately, are several."""
        return len({*self._had, *tenants}) > 1

    def pay(self, price: float) -> bool:
        """Whether a step may be short that costs as much time as so many tokens; if so, it is one more."""
        paid = max(self._paid, self._now - _BURST * price)
        if paid > self._now:
            return False
        self._paid = paid + price
        return True


class Service:
    """The accounts of one engine. `step_tokens`: most tokens of a step. prompts: who had most of them lately; idle work
    does not count."""

    def __init__(self, step_tokens: int = 0) -> None:
        self._tolerance = TOLERANCE_STEPS * step_tokens
        self._tenants: dict[int, Shares] = {}
        self._adapters: dict[tuple[int, str], Shares] = {}
        self._charged: dict[int, int] = {}
        self._least: dict[int, float] = {}
        self._least_adapters: dict[tuple[int, str], float] = {}
        self.num_accounts = 0
        self.prompts = PromptShares(_LATELY_STEPS * step_tokens)

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share with."""
        return self.num_accounts > 1

    def open(self, seq: Sequence) -> None:
        """A sequence has come. Of one that goes on from another engine, that engine's work is not charged again."""
        request = seq.request
        class_, tenant = class_of(request), request.terms.tenant
        self._charged[seq.number] = len(seq.tokens) if request.output_tokens else 0
        tenants = self._tenants.get(class_)
        if tenants is None:
            tenants = self._tenants[class_] = Shares(self._tolerance)
        tenants.open(tenant, request.terms.weight)
        adapters = self._adapters.get((class_, tenant))
        if adapters is None:
            adapters = self._adapters[class_, tenant] = Shares(self._tolerance)
        num_open = adapters.num_open
        adapters.open(request.adapter)
        self.num_accounts += adapters.num_open - num_open

    def close(self, seq: Sequence) -> None:
        """It is over, and has left the queue."""
        self.settle((seq,))
        del self._charged[seq.number]
        request = seq.request
        class_, tenant = class_of(request), request.terms.tenant
        adapters = self._adapters[class_, tenant]
        num_open = adapters.num_open
        adapters.close(request.adapter)
        self.num_accounts += adapters.num_open - num_open
        if not adapters.num_open:
            del self._adapters[class_, tenant]
        tenants = self._tenants[class_]
        tenants.close(tenant)
        if not tenants.num_open:
            del self._tenants[class_]

    def wait(self, seq: Sequence) -> None:
        """It waits; all that was served before has been settled."""
        request = seq.request
        class_, tenant = class_of(request), request.terms.tenant
        self._tenants[class_].wait(tenant)
        self._adapters[class_, tenant].wait(request.adapter)

    def stop_waiting(self, seq: Sequence) -> None:
        request = seq.request
        class_, tenant = class_of(request), request.terms.tenant
        self._tenants[class_].stop_waiting(tenant)
        self._adapters[class_, tenant].stop_waiting(request.adapter)

    def note_prompt(self, seq: Sequence, start: int, end: int) -> None:
        """Known tokens are about to be computed, from position `start` to `end`."""
        charged, end = self._charged[seq.number], min(end, seq.num_prompt)
        if end > charged:
            self._charged[seq.number] = end
            request = seq.request
            account = (class_of(request), request.terms.tenant, request.adapter)
            self._charge(*account, PROMPT_SERVICE * (end - max(start, charged)))
            if account[0] != IDLE_CLASS:
                self.prompts.note(account[1], end - max(start, charged))

    def note_rejected(self, seq: Sequence, num_drafts: int) -> None:
        """So many drafts of it were computed and not accepted."""
        request = seq.request
        self._charge(class_of(request), request.terms.tenant, request.adapter, PROMPT_SERVICE * num_drafts)

    def note_masks(self, seq: Sequence, spent_s: float) -> None:
        """Its grammar took so much processor time: to be made, or for masks beyond what is usual. It may be over: the
        last mask is heard of later, and charged where the accounts are still there."""
        request, service = seq.request, MASK_SERVICE * spent_s
        class_, tenant = class_of(request), request.terms.tenant
        tenants, adapters = self._tenants.get(class_), self._adapters.get((class_, tenant))
        for shares, name in ((tenants, tenant), (adapters, request.adapter)):
            if shares is not None and name in shares:
                shares.charge(name, service)

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """Charge the output that they have drawn since."""
        charged = self._charged
        received: dict[tuple[int, str, str], int] = {}
        for seq in sequences:
            num_tokens, before = len(seq.tokens), charged[seq.number]
            if num_tokens > before and num_tokens > seq.num_prompt:
                charged[seq.number] = num_tokens
                request = seq.request
                account = (class_of(request), request.terms.tenant, request.adapter)
                received[account] = received.get(account, 0) + num_tokens - max(before, seq.num_prompt)
        for account, num_new in received.items():
            self._charge(*account, OUTPUT_SERVICE * num_new)

    def steps_served(self, seq: Sequence) -> int:
        """What its tenant has received in its class, as far as it is settled, in tolerances."""
        account = self._tenants[class_of(seq.request)][seq.request.terms.tenant]
        return int(account.served // max(1.0, self._tolerance))

    def begin_step(self, running: Iterable[Sequence], prefilling: Iterable[Sequence]) -> None:
        """Let ranks hold what was served up to now. Those in `prefilling` want service as those do that wait."""
        if not self.is_shared:
            return
        self.settle(running)
        tenants: dict[int, set[str]] = {}
        adapters: dict[tuple[int, str], set[str]] = {}
        for seq in prefilling:
            class_, tenant = class_of(seq.request), seq.request.terms.tenant
            tenants.setdefault(class_, set()).add(tenant)
            adapters.setdefault((class_, tenant), set()).add(seq.request.adapter)
        self._least = {name: each.least(tenants.get(name, ())) for name, each in self._tenants.items()}
        self._least_adapters = {name: each.least(adapters.get(name, ())) for name, each in self._adapters.items()}

    def rank(self, seq: Sequence) -> Rank:
        """Its place in the order of service, as the step began."""
        request = seq.request
        class_ = class_of(request)
        if not self.is_shared:
            return (class_, 0.0, request.priority, 0.0, seq.due, seq.number)
        tenant = request.terms.tenant
        tenants, adapters = self._tenants[class_], self._adapters[class_, tenant]
        return (
            class_,
            tenants.debt(tenant, self._least.get(class_, 0.0)),
            request.priority,
            adapters.debt(request.adapter, self._least_adapters.get((class_, tenant), 0.0)),
            seq.due,
            seq.number,
        )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these, all that have not ended, are who has accounts."""
        open_in: dict[tuple[int, str], list[Sequence]] = {}
        for seq in sequences:
            assert seq.number in self._charged, seq
            open_in.setdefault((class_of(seq.request), seq.request.terms.tenant), []).append(seq)
        assert len(self._charged) == sum(map(len, open_in.values()))
        assert set(self._adapters) == set(open_in)
        for (class_, tenant), theirs in open_in.items():
            account = self._tenants[class_][tenant]
            num_waiting = sum(seq.status is Status.WAITING for seq in theirs)
            assert (account.num_open, account.num_waiting) == (len(theirs), num_waiting), account
        num_accounts = sum(len({seq.request.adapter for seq in theirs}) for theirs in open_in.values())
        assert self.num_accounts == num_accounts, (self.num_accounts, num_accounts)

    def _charge(self, class_: int, tenant: str, adapter: str, service: int) -> None:
        self._tenants[class_].charge(tenant, service)
        self._adapters[class_, tenant].charge(adapter, service)
