"""The calls of one tenant that wait for slots, in one class: round robin over clients, then over a client's calls.

Rounds are the start tags of fair queueing (Goyal et al., 1996): a newcomer joins the present round, and a client that
was served moves to the next. Priorities come before rounds; within a round the choice that is due first goes first
(`core.work.due`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ..core.request import Request


@dataclass(frozen=True, slots=True)
class Ticket:
    """One choice in the book. `cost`: prompt tokens that must be computed for it, as far as known. `class_`: in which
    it is served (`core.fairness.class_of`)."""

    request: Request
    client: str
    due: int
    cost: int
    class_: int


@dataclass(slots=True, eq=False)
class WaitingCall:
    """Choices of one call that have had no slot, in order; those that ended are passed over when their turn comes."""

    tickets: deque[Ticket]
    num_waiting: int


@dataclass(slots=True, eq=False)
class _Line:
    """The calls of one client at one priority.

    round       in which it is served next
    call_round  in which a call of it was served last
    calls       heap of (round, due, number, call)
    entry       its slot in the heap of lines; an older one is void
    """

    client: str
    priority: int
    round: int
    call_round: int = 0
    calls: list[tuple[int, int, int, WaitingCall]] = field(default_factory=list)
    num_calls: int = 0
    num_waiting: int = 0
    cost_waiting: int = 0
    entry: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _Ring:
    """The lines of one priority, as long as anybody waits in one. `round`: the present one."""

    round: int = 0
    num_waiting: int = 0
    lines: dict[str, _Line] = field(default_factory=dict)


class RoundRobinQueue:
    """Choices that wait. `calls`: those of all tenants, by request, for the book that has this one to look them up."""

    def __init__(self, calls: dict[str, WaitingCall]) -> None:
        self._calls = calls
        self.num_waiting = 0
        self.cost_waiting = 0
        self._rings: dict[int, _Ring] = {}
        self._heap: list[tuple[tuple[int, ...], _Line]] = []
        self._num_lines = 0
        self._number = 0

    def join(self, tickets: deque[Ticket]) -> None:
        """The choices of one call, in their order; one client, priority and due."""
        call, first = WaitingCall(tickets, len(tickets)), tickets[0]
        ring = self._rings.setdefault(first.request.priority, _Ring())
        line = ring.lines.get(first.client)
        if line is None:
            line = ring.lines[first.client] = _Line(first.client, first.request.priority, ring.round)
            self._num_lines += 1
        elif not line.num_waiting:
            line.round = max(line.round, ring.round)
        for ticket in tickets:
            self._calls[ticket.request.id] = call
            line.cost_waiting += ticket.cost
            self.cost_waiting += ticket.cost
        line.num_calls += 1
        line.num_waiting += len(tickets)
        ring.num_waiting += len(tickets)
        self.num_waiting += len(tickets)
        self._queue_call(line, line.call_round, call)
        self._queue_line(line)

    def choose(self, may_take: Callable[[Ticket], bool]) -> Ticket | None:
        """Take the next choice out that may have a slot."""
        passed: list[_Line] = []
        chosen = None
        while self._heap and chosen is None:
            entry, line = heappop(self._heap)
            if entry is not line.entry or (ticket := self._head(line)) is None:
                continue
            passed.append(line)
            if may_take(ticket):
                self._take(line, ticket)
                chosen = ticket
        for line in passed:
            ring = self._rings.get(line.priority)
            if ring is not None:  # a line that may not be served saves nothing up
                line.round = max(line.round, ring.round)
                self._queue_line(line)
        return chosen

    def drop(self, ticket: Ticket) -> None:
        """A choice that waits is over."""
        self._stop_waiting(ticket, self._calls[ticket.request.id])

    def forget(self, client: str) -> None:
        """The client has nothing open any more."""
        for ring in self._rings.values():
            self._num_lines -= ring.lines.pop(client, None) is not None

    def ahead(self, client: str, priority: int, due: int) -> tuple[int, int]:
        """(choices, prompt tokens to compute for them) that come before the first choice of a call of this tenant that
        joined now: of its own line what is before it; and of each other one as many."""
        before = self.before(client, priority, due)
        number, cost = len(before), sum(call.tickets[0].cost for call in before)
        turn = 1 + len(before)
        for line in self._lines():
            is_urgent, is_equal = line.priority < priority, line.priority == priority and line.client != client
            if line.num_waiting and (is_urgent or is_equal):
                count = line.num_waiting if is_urgent else min(turn, line.num_waiting)
                number += count
                cost += line.cost_waiting * count // line.num_waiting
        return number, cost

    def before(self, client: str, priority: int, due: int) -> list[WaitingCall]:
        """Calls of the client that have a choice served before the first of one that joined now."""
        ring = self._rings.get(priority)
        line = None if ring is None else ring.lines.get(client)
        if line is None:
            return []
        now = (line.call_round, due)
        return [call for round_, due_, _, call in line.calls if call.num_waiting and (round_, due_) <= now]

    def _lines(self) -> Iterator[_Line]:
        return (line for ring in self._rings.values() for line in ring.lines.values())

    def _head(self, line: _Line) -> Ticket | None:
        """The choice of the line that is next."""
        while line.calls:
            call = line.calls[0][3]
            while call.num_waiting:
                if call.tickets[0].request.id in self._calls:
                    return call.tickets[0]
                call.tickets.popleft()
            heappop(line.calls)
        return None

    def _take(self, line: _Line, ticket: Ticket) -> None:
        """The head of the line gets a slot; the rest of its call has its next turn in the next round."""
        ring = self._rings[line.priority]
        ring.round = max(ring.round, line.round)
        line.round += 1
        line.call_round, _, _, call = heappop(line.calls)
        call.tickets.popleft()
        self._stop_waiting(ticket, call)
        if call.num_waiting:
            self._queue_call(line, line.call_round + 1, call)

    def _stop_waiting(self, ticket: Ticket, call: WaitingCall) -> None:
        del self._calls[ticket.request.id]
        ring = self._rings[ticket.request.priority]
        line = ring.lines[ticket.client]
        line.num_waiting -= 1
        line.cost_waiting -= ticket.cost
        self.cost_waiting -= ticket.cost
        ring.num_waiting -= 1
        self.num_waiting -= 1
        call.num_waiting -= 1
        if not call.num_waiting:
            call.tickets.clear()
            line.num_calls -= 1
            if len(line.calls) > 2 * line.num_calls + 16:  # most of them are over
                line.calls = [entry for entry in line.calls if entry[3].num_waiting]
                heapify(line.calls)
        if not ring.num_waiting:
            del self._rings[ticket.request.priority]
            self._num_lines -= len(ring.lines)

    def _queue_call(self, line: _Line, round_: int, call: WaitingCall) -> None:
        while call.tickets[0].request.id not in self._calls:
            call.tickets.popleft()
        self._number += 1
        heappush(line.calls, (round_, call.tickets[0].due, self._number, call))

    def _queue_line(self, line: _Line) -> None:
        """Let the line stand where its head belongs."""
        ticket = self._head(line)
        if ticket is not None:
            self._number += 1
            line.entry = (line.priority, line.round, ticket.due, self._number)
            heappush(self._heap, (line.entry, line))
        if len(self._heap) > 2 * self._num_lines + 64:  # most of them are void
            self._heap = [(entry, line) for entry, line in self._heap if entry is line.entry and line.num_waiting]
            heapify(self._heap)
