"""Whose choice gets the next place in the engine: round robin over clients, then over a client's calls.

There are as many places as the engine has rows, and a few more that stand by for the next free row. Further choices
wait here, so that one call of a thousand choices does not fill the engine's queue. Pure: the caller reports what
happened and carries the decisions out. Rounds are the start tags of fair queueing (Goyal et al., 1996): a newcomer
joins the present round, and a client that was served moves to the next.

    join     choices of a call wait
    choose   the next choice to be submitted, or None
    start    a choice has its first token (it waits no more)
    end      a choice is over, wherever it was

Priorities come before rounds; within a round the choice that is due first goes first (`core.work.due`). An eighth of
the rows is closed to a client that holds all others. The choices of a client that have no first token yet may hold only
as many prompt tokens as the engine computes in a few steps, because others cannot overtake what is in the engine.
Choices of the lowest priority have places as long as there are rows for them, and keep none from others, to whom the
engine gives their rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ..core.request import IDLE_PRIORITY, Request

STEPS_AHEAD = 4
"""What a client may have under way, in full steps: two are in flight, and messages take their time."""


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
        """Prompt tokens of one client that may be on their way at once."""
        return STEPS_AHEAD * self.step_tokens * self.num_engines

    @property
    def num_places(self) -> int:
        """The rows, and some to step in at once where rows come free."""
        return self.num_rows + max(1, self.num_rows // 16)

    @property
    def most_of_one(self) -> int:
        """Places that one client may hold."""
        num_closed = self.num_rows // 8
        return self.num_rows - num_closed if num_closed else self.num_places


@dataclass(frozen=True, slots=True)
class Ticket:
    """One choice in the book. `cost`: prompt tokens that must be computed for it, as far as known."""

    request: Request
    client: str
    due: int
    cost: int


@dataclass(slots=True, eq=False)
class _WaitingCall:
    """Choices of one call that have had no place, in order; those that ended are passed over when their turn comes."""

    tickets: deque[Ticket]
    num_waiting: int


@dataclass(slots=True, eq=False)
class _Line:
    """The calls of one client at one priority.

    round       in which it is served next
    call_round  in which a call of it was served last
    calls       heap of (round, due, number, call)
    entry       its place in the heap of lines; an older one is void
    """

    client: str
    priority: int
    round: int
    call_round: int = 0
    calls: list[tuple[int, int, int, _WaitingCall]] = field(default_factory=list)
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


@dataclass(slots=True, eq=False)
class _Client:
    """num_waiting, num_placed  its choices
    arriving                 those with a place and without a first token
    cost_arriving            what they cost together
    """

    num_waiting: int = 0
    num_placed: int = 0
    arriving: dict[str, Ticket] = field(default_factory=dict)
    cost_arriving: int = 0


class Places:
    """The book of all open choices. Without `room` every choice has a place at once."""

    def __init__(self) -> None:
        self.room: Room | None = None
        self.num_placed = 0
        self._num_idle = 0
        self._clients: dict[str, _Client] = {}
        self._tickets: dict[str, Ticket] = {}
        self._waiting: dict[str, _WaitingCall] = {}
        self._rings: dict[int, _Ring] = {}
        self._heap: list[tuple[tuple[int, ...], _Line]] = []
        self._num_lines = 0
        self._number = 0

    @property
    def num_waiting(self) -> int:
        """Choices without a place."""
        return len(self._waiting)

    @property
    def cost_arriving(self) -> int:
        """Of all choices with a place and without a first token."""
        return sum([client.cost_arriving for client in self._clients.values()])

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def waits_for(self, adapter: str) -> bool:
        """Whether a choice without a place names the adapter."""
        return any(self._tickets[request_id].request.adapter == adapter for request_id in self._waiting)

    def num_open_of(self, client: str) -> int:
        """Choices of the client, waiting or not."""
        found = self._clients.get(client)
        return 0 if found is None else found.num_placed + found.num_waiting

    def join(self, tickets: Iterable[Ticket]) -> None:
        """The choices of one call, in their order; one client, priority and due."""
        waiting = deque(tickets)
        call, first = _WaitingCall(waiting, len(waiting)), waiting[0]
        ring = self._rings.setdefault(first.request.priority, _Ring())
        line = ring.lines.get(first.client)
        if line is None:
            line = ring.lines[first.client] = _Line(first.client, first.request.priority, ring.round)
            self._num_lines += 1
        elif not line.num_waiting:
            line.round = max(line.round, ring.round)
        for ticket in waiting:
            self._tickets[ticket.request.id] = ticket
            self._waiting[ticket.request.id] = call
            line.cost_waiting += ticket.cost
        line.num_calls += 1
        line.num_waiting += len(waiting)
        ring.num_waiting += len(waiting)
        self._clients.setdefault(first.client, _Client()).num_waiting += len(waiting)
        self._queue_call(line, line.call_round, call)
        self._queue_line(line)

    def choose(self) -> Request | None:
        """Give the next place away; None where there is none, or nobody who may have it."""
        if not self._waiting or (self.room is not None and self.num_placed - self._num_idle >= self.room.num_places):
            return None
        passed: list[_Line] = []
        chosen = None
        while self._heap and chosen is None:
            entry, line = heappop(self._heap)
            if entry is not line.entry or (ticket := self._head(line)) is None:
                continue
            if self._may_take(ticket):
                self._place(line, ticket)
                passed.append(line)
                chosen = ticket.request
            else:
                passed.append(line)
        for line in passed:
            ring = self._rings.get(line.priority)
            if ring is not None:  # a line that may not be served saves nothing up
                line.round = max(line.round, ring.round)
                self._queue_line(line)
        return chosen

    def start(self, request_id: str) -> None:
        """The choice has its first token."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._arrive(self._clients[ticket.client], request_id)

    def end(self, request_id: str) -> bool:
        """The choice is over; whether it still waited for a place."""
        ticket = self._tickets.pop(request_id)
        client = self._clients[ticket.client]
        call = self._waiting.get(request_id)
        if call is not None:
            self._stop_waiting(ticket, call)
        else:
            self.num_placed -= 1
            self._num_idle -= _is_idle(ticket)
            client.num_placed -= 1
            self._arrive(client, request_id)
        if not client.num_placed and not client.num_waiting:
            del self._clients[ticket.client]
            for ring in self._rings.values():
                self._num_lines -= ring.lines.pop(ticket.client, None) is not None
        return call is not None

    def ahead(self, client: str, priority: int, due: int) -> tuple[int, int]:
        """(choices, prompt tokens to compute for them) that come before the first choice of a call that joined now:
        what is on its way and due before; of its own line what is before it; and of each other one as many."""
        number = cost = 0
        for ticket in self._arriving():
            if (ticket.request.priority, ticket.due) <= (priority, due):
                number += 1
                cost += ticket.cost
        before = self._before(client, priority, due)
        number += len(before)
        cost += sum(call.tickets[0].cost for call in before)
        turn = 1 + len(before)
        for ring in self._rings.values():
            for line in ring.lines.values():
                is_urgent, is_equal = line.priority < priority, line.priority == priority and line.client != client
                if line.num_waiting and (is_urgent or is_equal):
                    count = line.num_waiting if is_urgent else min(turn, line.num_waiting)
                    number += count
                    cost += line.cost_waiting * count // line.num_waiting
        return number, cost

    def ahead_of_own(self, client: str, priority: int, due: int) -> int:
        """Of those, how many are the client's own."""
        found = self._clients.get(client)
        if found is None:
            return 0
        place = (priority, due)
        num_arriving = sum((each.request.priority, each.due) <= place for each in found.arriving.values())
        return num_arriving + len(self._before(client, priority, due))

    def _before(self, client: str, priority: int, due: int) -> list[_WaitingCall]:
        """Calls of the client that have a choice served before the first of one that joined now."""
        ring = self._rings.get(priority)
        line = None if ring is None else ring.lines.get(client)
        if line is None:
            return []
        now = (line.call_round, due)
        return [call for round_, due_, _, call in line.calls if call.num_waiting and (round_, due_) <= now]

    def _arriving(self) -> Iterator[Ticket]:
        return (ticket for client in self._clients.values() for ticket in client.arriving.values())

    def _may_take(self, ticket: Ticket) -> bool:
        room, client = self.room, self._clients[ticket.client]
        if room is None:
            return True
        if client.num_placed >= room.most_of_one or (_is_idle(ticket) and self.num_placed >= room.num_rows):
            return False
        if client.cost_arriving < room.num_ahead:
            return True
        return sum(other.cost for other in client.arriving.values() if other.due <= ticket.due) < room.num_ahead

    def _head(self, line: _Line) -> Ticket | None:
        """The choice of the line that is next."""
        while line.calls:
            call = line.calls[0][3]
            while call.num_waiting:
                if call.tickets[0].request.id in self._waiting:
                    return call.tickets[0]
                call.tickets.popleft()
            heappop(line.calls)
        return None

    def _place(self, line: _Line, ticket: Ticket) -> None:
        """The head of the line gets a place; the rest of its call has its next turn in the next round."""
        client = self._clients[ticket.client]
        ring = self._rings[line.priority]
        ring.round = max(ring.round, line.round)
        line.round += 1
        line.call_round, _, _, call = heappop(line.calls)
        call.tickets.popleft()
        self._stop_waiting(ticket, call)
        if call.num_waiting:
            self._queue_call(line, line.call_round + 1, call)
        self.num_placed += 1
        self._num_idle += _is_idle(ticket)
        client.num_placed += 1
        client.arriving[ticket.request.id] = ticket
        client.cost_arriving += ticket.cost

    def _stop_waiting(self, ticket: Ticket, call: _WaitingCall) -> None:
        del self._waiting[ticket.request.id]
        ring = self._rings[ticket.request.priority]
        line = ring.lines[ticket.client]
        self._clients[ticket.client].num_waiting -= 1
        line.num_waiting -= 1
        line.cost_waiting -= ticket.cost
        ring.num_waiting -= 1
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

    def _arrive(self, client: _Client, request_id: str) -> None:
        ticket = client.arriving.pop(request_id, None)
        if ticket is not None:
            client.cost_arriving -= ticket.cost

    def _queue_call(self, line: _Line, round_: int, call: _WaitingCall) -> None:
        while call.tickets[0].request.id not in self._waiting:
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


def _is_idle(ticket: Ticket) -> bool:
    return ticket.request.priority >= IDLE_PRIORITY
