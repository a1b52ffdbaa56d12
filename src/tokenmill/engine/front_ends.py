"""Several front ends of one engine: the shell has one `EngineEnd`, and a seat behind it for each front end.

    front end A --link--> seat 0 --.
                                    >-- hub -- shell, core
    front end B --link--> seat 1 --'

Each front end has a name space of its own: ids of requests that two of them use at once, and the numbers of questions,
are renamed on the way in and back on the way out. Outputs and answers go to whom they concern; the state after a step,
signs of life and changes of the pool go to all. What one has asked for is taken back when its link ends: its requests,
its loads of adapters, its offers of KV. Nobody else notices. A front end that does not read holds nobody up: its seat
is lost when it has fallen too far behind.

A front end that says Drain is let go when what it had is over. Knows nothing of sockets, nor of who may join.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

from ..core.events import (
    Abort,
    AdapterLoaded,
    Drain,
    FromEngine,
    Leaving,
    Output,
    StepOutputs,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from ..core.kv_events import KVEvents, WatchKV
from ..core.moves import Continue, Moved, Offer, Release, Staged, Yield
from ..core.ports import EngineEnd, Pushing, hear_all
from ..core.request import Request

# Of an engine's front ends, what its hub keeps (`hub`).


MOST_BEHIND = 4096
"""Messages that wait for one front end; more: it does not read."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Seat:
    """A front end.

    close    ends its link, after which `receive` of the link raises EOFError
    ids      its name of a request -> the engine's
    loads    of adapters, by digest
    tickets  of KV that it has offered
    push     sends at once, where its link can (core.ports.Pushing)
    """

    number: int
    link: EngineEnd
    close: Callable[[], None]
    ids: dict[str, str] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)
    tickets: set[str] = field(default_factory=set)
    queue: deque[FromEngine] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    watches_kv: bool = False
    push: Callable[[FromEngine], None] | None = None

    def say(self, message: FromEngine) -> None:
        if self.push is not None:
            self.push(message)
            if self.is_draining:
                self.wake.set()
            return
        self.queue.append(message)
        self.wake.set()
        if len(self.queue) > MOST_BEHIND:
            _log.error("A front end has not read %d messages; its link is closed.", len(self.queue))
            self.queue.clear()
            self.close()

    @property
    def is_done(self) -> bool:
        return self.is_draining and not (self.ids or self.tickets or self.queue)


@dataclass(slots=True, eq=False)
class Held:
    """A request in the engine: its seat's name for it, and how often it was submitted and has not ended since."""

    seat: Seat
    name: str
    num_open: int = 1


class Hub:
    """core.ports.EngineEnd of a shell. `serve` takes a front end in; needs a running loop."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._num_seats = 0
        self._held: dict[str, Held] = {}  # by the engine's id
        self._asked: dict[int, tuple[Seat, int]] = {}  # by the engine's number
        self._num_asked = 0
        self._inbox: deque[ToEngine] = deque()
        self._hears: Callable[[ToEngine], None] | None = None
        self._wake = asyncio.Event()

    @property
    def num_seats(self) -> int:
        return len(self._seats)

    @property
    def _is_watched(self) -> bool:
        return any(seat.watches_kv for seat in self._seats.values())

    async def serve(self, link: EngineEnd, close: Callable[[], None]) -> bool:
        """Have a front end until its link ends; `close` ends it. Returns whether the front end wanted no more (Drain)
        and has got all. Raises ValueError when it sent what cannot be read; the link is to be closed then, too."""
        seat = Seat(self._num_seats, link, close, push=link.push if isinstance(link, Pushing) else None)
        self._num_seats += 1
        self._seats[seat.number] = seat
        writing = asyncio.create_task(self._write(seat), name="hub-write")
        try:
            await hear_all(link, partial(self._take, seat))
            raise AssertionError("a link ends with an error")
        except EOFError:
            return seat.is_done
        finally:
            writing.cancel()
            self._lose(seat)

    def leave(self) -> None:
        """Tell all that no more requests are wanted; each says Drain and is let go when it has got all."""
        for seat in self._seats.values():
            seat.say(Leaving())

    def drain(self) -> None:
        """Nobody is to come any more: the core ends when it has done what is left."""
        self._hear(Drain())

    # ---- core.ports.EngineEnd ----

    async def receive(self) -> ToEngine:
        while not self._inbox:
            self._wake.clear()
            await self._wake.wait()
        return self._inbox.popleft()

    async def listen(self, hear: Callable[[ToEngine], None]) -> None:
        """core.ports.Pushing"""
        while self._inbox:
            hear(self._inbox.popleft())
        self._hears = hear
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._hears = None

    async def send(self, message: FromEngine) -> None:
        self.push(message)

    def push(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            if len(self._seats) == self._num_seats == 1 and self._tell_only(message):
                return
            parts = self._split(message.outputs)
            for seat in self._seats.values():
                seat.say(StepOutputs(tuple(parts[seat.number]), message.stats, message.now_s))
            return
        answer = cast(Any, message)
        if isinstance(message, Staged | Moved):
            held = self._held.get(message.request_id)
            if held is not None and held.seat.number in self._seats:
                held.seat.say(replace(message, request_id=held.name))
            return
        if not hasattr(message, "number"):
            for seat in self._seats.values():
                if seat.watches_kv or not isinstance(message, KVEvents):
                    seat.say(message)
            return
        seat, number = self._asked.pop(answer.number)
        if isinstance(message, AdapterLoaded) and not message.error:
            self._note_load(seat, message.digest)
        if seat.number in self._seats:
            seat.say(replace(answer, number=number))

    # ---- inwards ----

    def _hear(self, message: ToEngine) -> None:
        if self._hears is not None:
            return self._hears(message)
        self._inbox.append(message)
        self._wake.set()

    def _take(self, seat: Seat, message: ToEngine) -> None:
        """What a front end says, as the engine is to hear it."""
        if isinstance(message, Submit):
            self._hear(Submit(tuple([self._enter(seat, request) for request in message.requests])))
        elif isinstance(message, Abort):
            self._hear(Abort(tuple([seat.ids[name] for name in message.request_ids if name in seat.ids])))
        elif isinstance(message, Drain):
            seat.is_draining = True
            seat.wake.set()
        elif isinstance(message, UnloadAdapter):
            if seat.loads[message.digest]:
                seat.loads[message.digest] -= 1
                self._hear(message)
        elif isinstance(message, Offer | Yield | Continue):
            self._take_move(seat, message)
        elif isinstance(message, WatchKV):
            seat.watches_kv = message.is_wanted
            if message.is_wanted or not self._is_watched:
                self._hear(message)
        elif isinstance(message, get_args(ToEngine)):
            if isinstance(message, Release):
                seat.tickets.discard(message.ticket)
                seat.wake.set()
            self._hear(self._renamed(seat, message))
        else:
            raise ValueError(f"No message to an engine: {type(message).__name__}.")

    def _take_move(self, seat: Seat, message: Offer | Yield | Continue) -> None:
        if isinstance(message, Offer):
            seat.tickets.add(message.ticket)
        if message.request_id:
            if message.request_id not in seat.ids:
                return  # it is over, or was never here
            message = replace(message, request_id=seat.ids[message.request_id])
        self._hear(message)

    def _renamed(self, seat: Seat, message: ToEngine) -> ToEngine:
        """A question gets a number of the hub's."""
        question = cast(Any, message)
        if not hasattr(message, "number"):
            return message
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._asked[number] = seat, question.number
        return cast(ToEngine, replace(question, number=number))

    def _enter(self, seat: Seat, request: Request) -> Request:
        """Under an id that no other front end's request has."""
        if request.yields:
            seat.tickets.add(request.yields)
        request_id = seat.ids.get(request.id)
        if request_id is not None:
            self._held[request_id].num_open += 1
        else:
            request_id = request.id
            while request_id in self._held:
                request_id = f"{request_id}@{seat.number}"
            seat.ids[request.id] = request_id
            self._held[request_id] = Held(seat, request.id)
        return request if request_id == request.id else replace(request, id=request_id)

    # ---- outwards ----

    def _tell_only(self, message: StepOutputs) -> bool:
        """There has been one front end alone, whose names are the engine's: it gets all, unless something is not its
        own."""
        ends = [output.request_id for output in message.outputs if output.finish_reason is not None]
        if ends:
            if not all([request_id in self._held for request_id in ends]):
                return False
            for request_id in ends:
                self._end(self._held[request_id], request_id)
        (seat,) = self._seats.values()
        seat.say(message)
        return True

    def _split(self, outputs: tuple[Output, ...]) -> dict[int, list[Output]]:
        """By seat, under the seats' names. Outputs of lost seats are left out."""
        parts: dict[int, list[Output]] = {number: [] for number in self._seats}
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                continue
            part = parts.get(held.seat.number)
            if part is not None:
                renamed = held.name != output.request_id
                part.append(output._replace(request_id=held.name) if renamed else output)
            if output.finish_reason is not None:
                self._end(held, output.request_id)
        return parts

    def _end(self, held: Held, request_id: str) -> None:
        held.num_open -= 1
        if not held.num_open:
            del self._held[request_id]
            del held.seat.ids[held.name]

    def _note_load(self, seat: Seat, digest: str) -> None:
        """A load counts for the front end that asked for it; where it has gone meanwhile, the load is taken back."""
        if seat.number in self._seats:
            seat.loads[digest] += 1
        else:
            self._hear(UnloadAdapter(digest))

    async def _write(self, seat: Seat) -> None:
        try:
            while not seat.is_done:
                await seat.wake.wait()
                seat.wake.clear()
                while seat.queue:
                    await seat.link.send(seat.queue.popleft())
        except EOFError:
            return
        seat.close()

    def _lose(self, seat: Seat) -> None:
        del self._seats[seat.number]
        if seat.ids:
            self._hear(Abort(tuple(seat.ids.values())))
        for digest in seat.loads.elements():
            self._hear(UnloadAdapter(digest))
        if seat.watches_kv and not self._is_watched:
            self._hear(WatchKV(False))
        for ticket in sorted(seat.tickets):
            self._hear(Release(ticket))
