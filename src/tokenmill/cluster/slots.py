"""Whose choice gets the next slot in the engine: classes first, then the tenant that has received least service for
its weight (`core.fairness`), then that tenant's clients and calls in turn (`fair_queueing`).

There are as many slots as the engine has rows, and a few more that stand by for the next free row. Further choices
wait here, so that one call of a thousand choices does not fill the engine's queue. Pure: the caller reports what
happened and carries the decisions out.

    join     choices of a call wait
    choose   the next choice to be submitted, or None
    settle   charge what was drawn since
    start    a choice has its first token (it waits no more)
    end      a choice is over, wherever it was

An eighth of the rows is closed to a tenant, or a client without one, that holds all others, and a sixteenth more to a
call of many choices, which may hold theirs for long, so that the tenant's next call finds one. What it has under way
without a first token may be only as many prompt tokens as the engine computes in a few steps. Choices of a lower class
keep no slot from those of a higher one, to whom the engine gives their rows. Those of the lowest priority, whoever's
they are, are the lowest class, and have slots as long as there are rows for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..core.fairness import IDLE_CLASS, OUTPUT_SERVICE, PROMPT_SERVICE, TOLERANCE_STEPS, Shares, class_of_call
from ..core.request import Request
from ..core.terms import USUAL, Terms
from .fair_queueing import RoundRobinQueue, Ticket, WaitingCall

STEPS_AHEAD = 4
"""What a tenant may have under way, in full steps: two are in flight, and messages take their time."""

_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class Room:
    """num_rows     sequences that all engines run at once
    step_tokens  most tokens of a step of one
    num_engines  that serve
    """

    num_rows: int
    step_tokens: int
    num_engines: int = 1

    @property
    def num_ahead(self) -> int:
        """Prompt tokens of one tenant that may be on their way at once."""
        return STEPS_AHEAD * self.step_tokens * self.num_engines

    @property
    def num_slots(self) -> int:
        """The rows, and some to step in at once where rows come free."""
        return self.num_rows + max(1, self.num_rows // 16)

    @property
    def num_kept(self) -> int:
        """Rows kept for tenants that have fewer than their share, so that they find one at once."""
        return max(self.num_rows // 8, int(self.num_rows >= 4))

    @property
    def most_of_one(self) -> int:
        """FairSlots that one tenant may hold."""
        num_closed = self.num_rows // 8
        return self.num_rows - num_closed if num_closed else self.num_slots


@dataclass(slots=True, eq=False)
class _Holder:
    """A tenant, or a client of nobody's. placed: its choices with a slot, by class. arriving: those without a first
    token; cost_arriving: what these cost together."""

    placed: list[int] = field(default_factory=lambda: [0] * (IDLE_CLASS + 1))
    arriving: dict[str, Ticket] = field(default_factory=dict)
    cost_arriving: int = 0


_HolderKey = tuple[str, str]


class FairSlots:
    """All open choices. Without `room` every choice has a slot at once. `num_drawn` tells how many tokens
    of a choice have come."""

    def __init__(self, num_drawn: Callable[[str], int] = lambda request_id: 0) -> None:
        self.room: Room | None = None
        self.num_placed = 0
        self.num_accounts = 0
        self._num_drawn = num_drawn
        self._placed = [0] * (IDLE_CLASS + 1)
        self._holders: dict[_HolderKey, _Holder] = {}
        self._num_open: dict[str, int] = {}
        self._tickets: dict[str, Ticket] = {}
        self._calls: dict[str, list[int]] = {}  # [choices of its call with a slot], one list a call
        self._waiting: dict[str, WaitingCall] = {}
        self._turns: dict[tuple[int, str], RoundRobinQueue] = {}
        self._shares: dict[int, Shares] = {}
        self._charged: dict[str, int] = {}
        self._usual_output = 0.0

    @property
    def num_waiting(self) -> int:
        """Choices without a slot."""
        return len(self._waiting)

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have something open in one class, or in several."""
        return self.num_accounts > 1

    @property
    def cost_arriving(self) -> int:
        """Of all choices with a slot and without a first token."""
        return sum([holder.cost_arriving for holder in self._holders.values()])

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def waits_for(self, adapter: str) -> bool:
        """Whether a choice without a slot names the adapter."""
        return any(self._tickets[request_id].request.adapter == adapter for request_id in self._waiting)

    def num_open_of(self, client: str) -> int:
        """Choices of the client, waiting or not."""
        return self._num_open.get(client, 0)

    def served(self) -> dict[tuple[int, str], float]:
        """By class and tenant that has something open: service received for its weight, from the same start for all of
        a class."""
        names = {(ticket.class_, ticket.request.terms.tenant) for ticket in self._tickets.values()}
        return {(class_, tenant): self._shares[class_][tenant].served for class_, tenant in names}

    def join(self, tickets: Iterable[Ticket]) -> None:
        """The choices of one call, in their order; one client, due, and terms."""
        waiting = deque(tickets)
        first = waiting[0]
        terms, class_ = first.request.terms, first.class_
        shares = self._shares.get(class_)
        if shares is None:
            shares = self._shares[class_] = Shares()
        turns = self._turns.get((class_, terms.tenant))
        if turns is None:
            turns = self._turns[class_, terms.tenant] = RoundRobinQueue(self._waiting)
        call = [0]
        for ticket in waiting:
            self._tickets[ticket.request.id] = ticket
            self._calls[ticket.request.id] = call
            num_accounts = shares.num_open
            shares.open(terms.tenant, terms.weight)
            self.num_accounts += shares.num_open - num_accounts
        if self.is_shared:
            self.settle()
        for _ in waiting:
            shares.wait(terms.tenant)
        self._num_open[first.client] = self.num_open_of(first.client) + len(waiting)
        turns.join(waiting)

    def choose(self) -> Request | None:
        """Give the next slot away; None where there is none, or nobody who may have it."""
        if not self._waiting:
            return None
        if len(self._turns) == 1:
            (((class_, tenant), turns),) = self._turns.items()
            return self._choose_of(class_, tenant, turns)
        for class_ in sorted(self._shares):
            if self.room is not None and not self._has_place(class_, self.room):
                continue
            for tenant, turns in self._in_order(class_):
                if (request := self._choose_of(class_, tenant, turns)) is not None:
                    return request
        return None

    def settle(self) -> None:
        """Charge the output of choices that have a slot, where there is anybody to compare with."""
        num_drawn = self._num_drawn
        for request_id, charged in self._charged.items():
            num = num_drawn(request_id)
            if num > charged:
                self._charge_output(self._tickets[request_id], num)

    def start(self, request_id: str, num_cached: int = 0) -> None:
        """The choice has its first token; so many of its prompt's tokens were cached."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            request = ticket.request
            num_computed = len(request.prompt_tokens) - num_cached
            self._shares[ticket.class_].charge(request.terms.tenant, PROMPT_SERVICE * (num_computed - ticket.cost))
            self._arrive(self._holders[_holder_key(ticket)], request_id)

    def end(self, request_id: str, num_output: int = 0) -> bool:
        """The choice is over after so many tokens; whether it still waited for a slot."""
        ticket = self._tickets[request_id]
        request, class_ = ticket.request, ticket.class_
        tenant, shares = request.terms.tenant, self._shares[class_]
        was_waiting = request_id in self._waiting
        if was_waiting:
            self._turns[class_, tenant].drop(ticket)
            shares.stop_waiting(tenant)
        else:
            self._charge_output(ticket, num_output)
            self._usual_output += _WEIGHT * (num_output - self._usual_output)
            del self._charged[request_id]
            self._calls[request_id][0] -= 1
            self.num_placed -= 1
            self._placed[class_] -= 1
            key = _holder_key(ticket)
            holder = self._holders[key]
            holder.placed[class_] -= 1
            self._arrive(holder, request_id)
            if not any(holder.placed):
                del self._holders[key]
        del self._tickets[request_id], self._calls[request_id]
        num_accounts = shares.num_open
        shares.close(tenant)
        self.num_accounts += shares.num_open - num_accounts
        if not shares.num_open:
            del self._shares[class_]
        self._forget(class_, tenant, ticket.client)
        return was_waiting

    def ahead(
        self,
        client: str,
        priority: int,
        due: int,
        terms: Terms = USUAL,
        passes: Callable[[Ticket], bool] | None = None,
    ) -> tuple[int, int]:
        """(choices, prompt tokens to compute for them) that come before the first choice of a call that joined now:
        what is on its way and has the better rank, where `passes` may stand for being due sooner; of its own tenant
        what is before it; all that waits in higher classes; of each other tenant in its class as much as keeps both
        level."""
        class_, tenant = class_of_call(priority, terms), terms.tenant
        own = self._turns.get((class_, tenant))
        number, cost = (0, 0) if own is None else own.ahead(client, priority, due)
        served = self._served_then(class_, tenant, number, cost, terms.weight)
        for holder in self._holders.values():
            for ticket in holder.arriving.values():
                is_sooner = ticket.due <= due if passes is None else passes(ticket)
                if self._comes_before(ticket, class_, tenant, served, priority, is_sooner):
                    number += 1
                    cost += ticket.cost
        for (other_class, other), turns in self._turns.items():
            if other_class < class_:
                number += turns.num_waiting
                cost += turns.cost_waiting
            elif other_class == class_ and other != tenant and turns.num_waiting:
                count = self._num_until(class_, other, turns, served)
                number += count
                cost += turns.cost_waiting * count // turns.num_waiting
        return number, cost

    def ahead_of_own(self, client: str, priority: int, due: int, terms: Terms = USUAL) -> int:
        """Of those, how many are the client's own."""
        class_ = class_of_call(priority, terms)
        holder = self._holders.get((terms.tenant, "" if terms.tenant else client))
        num_arriving = 0
        if holder is not None:
            place = (class_, priority, due)
            for each in holder.arriving.values():
                num_arriving += (each.class_, each.request.priority, each.due) <= place
        turns = self._turns.get((class_, terms.tenant))
        return num_arriving + (0 if turns is None else len(turns.before(client, priority, due)))

    # ---- whose turn it is ----

    def _in_order(self, class_: int) -> list[tuple[str, RoundRobinQueue]]:
        """Those of a class in which somebody waits: who has received least first; of equal ones, as who has just come
        back is to others, who has fewest slots for its weight."""
        shares = self._shares[class_]
        least = shares.least()
        waiting = []
        for (each, tenant), turns in self._turns.items():
            if each == class_ and turns.num_waiting:
                holder = self._holders.get((tenant, ""))
                num_placed = 0 if holder is None else holder.placed[class_]
                waiting.append((shares.debt(tenant, least), num_placed / shares[tenant].weight, tenant, turns))
        return [entry[2:] for entry in sorted(waiting, key=lambda entry: entry[:3])]

    def _choose_of(self, class_: int, tenant: str, turns: RoundRobinQueue) -> Request | None:
        if self.room is not None:
            is_closed = bool(tenant) and self._is_closed((tenant, ""), class_, self.room)
            if is_closed or not self._has_place(class_, self.room):
                return None
        ticket = turns.choose(self._may_take)
        if ticket is None:
            return None
        request = ticket.request
        self._shares[class_].stop_waiting(tenant)
        self._shares[class_].charge(tenant, PROMPT_SERVICE * ticket.cost)
        self._charged[request.id] = len(request.output_tokens)
        self.num_placed += 1
        self._calls[request.id][0] += 1
        self._placed[class_] += 1
        holder = self._holders.setdefault(_holder_key(ticket), _Holder())
        holder.placed[class_] += 1
        holder.arriving[request.id] = ticket
        holder.cost_arriving += ticket.cost
        return request

    def _has_place(self, class_: int, room: Room) -> bool:
        """Whether a choice of the class finds one: those of lower classes keep none from it."""
        if class_ == IDLE_CLASS and self.num_placed >= room.num_rows:
            return False
        return sum(self._placed[: min(class_ + 1, IDLE_CLASS)]) < room.num_slots

    def _may_take(self, ticket: Ticket) -> bool:
        room, holder = self.room, self._holders.get(_holder_key(ticket))
        if room is None or holder is None:
            return True
        class_ = ticket.class_
        if self._is_closed(_holder_key(ticket), class_, room):
            return False
        if self._calls[ticket.request.id][0] >= room.most_of_one - room.num_rows // 16:
            return False
        if holder.cost_arriving < room.num_ahead:
            return True
        place = (class_, ticket.due)
        before = (other.cost for other in holder.arriving.values() if (other.class_, other.due) <= place)
        return sum(before) < room.num_ahead

    def _is_closed(self, key: _HolderKey, class_: int, room: Room) -> bool:
        """Whether a tenant, or a client of nobody's, gets no further place for this class, whatever waits."""
        holder = self._holders.get(key)
        if holder is None:
            return False
        num_placed = sum(holder.placed[: class_ + 1])
        return num_placed >= room.most_of_one or (self.is_shared and self._is_over(key[0], class_, num_placed, room))

    def _is_over(self, tenant: str, class_: int, num_placed: int, room: Room) -> bool:
        """Whether a tenant that has its share of the rows would take one of those that are kept for the others, of whom
        one has not received more by more than the tolerance."""
        if not room.num_kept or sum(self._placed[: class_ + 1]) < room.num_rows - room.num_kept:
            return False
        shares = self._shares[class_]
        account = shares[tenant]
        is_over = num_placed * shares.weight_open >= room.num_rows * account.weight
        tolerance = TOLERANCE_STEPS * room.step_tokens * room.num_engines
        return is_over and account.served + tolerance >= shares.least_open_beside(tenant)

    # ---- what was received ----

    def _charge_output(self, ticket: Ticket, num_output: int) -> None:
        request = ticket.request
        num_new = num_output - self._charged[request.id]
        if num_new > 0:
            self._charged[request.id] = num_output
            self._shares[ticket.class_].charge(request.terms.tenant, OUTPUT_SERVICE * num_new)

    def _served_then(self, class_: int, tenant: str, number: int, cost: int, weight: float) -> float:
        """What the tenant will have received when so many choices more of it have been served."""
        shares = self._shares.get(class_)
        if shares is None:
            return 0.0
        served = shares[tenant].served if tenant in shares else 0.0
        if (class_, tenant) not in self._turns or not self._turns[class_, tenant].num_waiting:
            served = max(served, shares.least())
        return served + (PROMPT_SERVICE * cost + OUTPUT_SERVICE * self._usual_output * number) / weight

    def _num_until(self, class_: int, tenant: str, turns: RoundRobinQueue, served: float) -> int:
        """Choices of the tenant that come before it has received as much as `served`."""
        account = self._shares[class_][tenant]
        of_one = PROMPT_SERVICE * turns.cost_waiting / turns.num_waiting + OUTPUT_SERVICE * self._usual_output
        missing = (served - account.served) * account.weight
        return min(turns.num_waiting, math.ceil(missing / of_one)) if missing > 0 and of_one else 0

    def _comes_before(
        self, ticket: Ticket, class_: int, tenant: str, served: float, priority: int, is_sooner: bool
    ) -> bool:
        other = ticket.request
        if ticket.class_ != class_:
            return ticket.class_ < class_
        if other.terms.tenant != tenant and self._shares[class_][other.terms.tenant].served > served:
            return False
        return other.priority < priority or (other.priority == priority and is_sooner)

    def _arrive(self, holder: _Holder, request_id: str) -> None:
        ticket = holder.arriving.pop(request_id, None)
        if ticket is not None:
            holder.cost_arriving -= ticket.cost

    def _forget(self, class_: int, tenant: str, client: str) -> None:
        """One choice less of the client, and what is empty then."""
        self._num_open[client] -= 1
        if not self._num_open[client]:
            del self._num_open[client]
            for turns in self._turns.values():
                turns.forget(client)
        shares = self._shares.get(class_)
        if shares is None or tenant not in shares or not shares[tenant].num_open:
            del self._turns[class_, tenant]


def _holder_key(ticket: Ticket) -> _HolderKey:
    tenant = ticket.request.terms.tenant
    return (tenant, "" if tenant else ticket.client)
