"""Several front ends of one engine: the shell has one `EngineEnd`, and behind it one for each of them.

    front end A --link--> AttachedFrontEnd 0 --.
                                                >-- FrontEnds -- shell, core
    front end B --link--> AttachedFrontEnd 1 --'

Each front end has a name space of its own: ids of requests that two of them use at once, and the numbers of questions,
are renamed on the way in and back on the way out. Outputs and answers go to whom they concern; the state after a step,
signs of life and changes of the pool go to all. What one has asked for is taken back when its link ends: its requests,
its loads of adapters, its offers of KV. Nobody else notices. A front end that does not read holds nobody up: its
link is closed when it has fallen too far behind.

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

MOST_BEHIND = 4096
"""Messages that wait for one front end; more: it does not read."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AttachedFrontEnd:
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
    """A request in the engine: its front end's name for it, and how often it was submitted and has not ended since."""

    front_end: AttachedFrontEnd
    name: str
    num_open: int = 1


class FrontEnds:
    """core.ports.EngineEnd of a shell. `serve` takes a front end in; needs a running loop."""

    def __init__(self) -> None:
        self._attached: dict[int, AttachedFrontEnd] = {}
        self._num_attached = 0
        self._held: dict[str, Held] = {}  # by the engine's id
        self._asked: dict[int, tuple[AttachedFrontEnd, int]] = {}  # by the engine's number
        self._num_asked = 0
        self._inbox: deque[ToEngine] = deque()
        self._hears: Callable[[ToEngine], None] | None = None
        self._wake = asyncio.Event()

    @property
    def num_attached(self) -> int:
        return len(self._attached)

    @property
    def _is_watched(self) -> bool:
        return any(front_end.watches_kv for front_end in self._attached.values())

    async def serve(self, link: EngineEnd, close: Callable[[], None]) -> bool:
        """Have a front end until its link ends; `close` ends it. Returns whether the front end wanted no more (Drain)
        and has got all. Raises ValueError when it sent what cannot be read; the link is to be closed then, too."""
        front_end = AttachedFrontEnd(
            self._num_attached, link, close, push=link.push if isinstance(link, Pushing) else None
        )
        self._num_attached += 1
        self._attached[front_end.number] = front_end
        writing = asyncio.create_task(self._write(front_end), name="front_ends-write")
        try:
            await hear_all(link, partial(self._take, front_end))
            raise AssertionError("a link ends with an error")
        except EOFError:
            return front_end.is_done
        finally:
            writing.cancel()
            self._lose(front_end)

    def leave(self) -> None:
        """Tell all that no more requests are wanted; each says Drain and is let go when it has got all."""
        for front_end in self._attached.values():
            front_end.say(Leaving())

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
            if len(self._attached) == self._num_attached == 1 and self._tell_only(message):
                return
            parts = self._split(message.outputs)
            for front_end in self._attached.values():
                front_end.say(StepOutputs(tuple(parts[front_end.number]), message.stats, message.now_s))
            return
        answer = cast(Any, message)
        if isinstance(message, Staged | Moved):
            held = self._held.get(message.request_id)
            if held is not None and held.front_end.number in self._attached:
                held.front_end.say(replace(message, request_id=held.name))
            return
        if not hasattr(message, "number"):
            for front_end in self._attached.values():
                if front_end.watches_kv or not isinstance(message, KVEvents):
                    front_end.say(message)
            return
        front_end, number = self._asked.pop(answer.number)
        if isinstance(message, AdapterLoaded) and not message.error:
            self._note_load(front_end, message.digest)
        if front_end.number in self._attached:
            front_end.say(replace(answer, number=number))

    # ---- inwards ----

    def _hear(self, message: ToEngine) -> None:
        if self._hears is not None:
            return self._hears(message)
        self._inbox.append(message)
        self._wake.set()

    def _take(self, front_end: AttachedFrontEnd, message: ToEngine) -> None:
        """What a front end says, as the engine is to hear it."""
        if isinstance(message, Submit):
            self._hear(Submit(tuple([self._enter(front_end, request) for request in message.requests])))
        elif isinstance(message, Abort):
            self._hear(Abort(tuple([front_end.ids[name] for name in message.request_ids if name in front_end.ids])))
        elif isinstance(message, Drain):
            front_end.is_draining = True
            front_end.wake.set()
        elif isinstance(message, UnloadAdapter):
            if front_end.loads[message.digest]:
                front_end.loads[message.digest] -= 1
                self._hear(message)
        elif isinstance(message, Offer | Yield | Continue):
            self._take_move(front_end, message)
        elif isinstance(message, WatchKV):
            front_end.watches_kv = message.is_wanted
            if message.is_wanted or not self._is_watched:
                self._hear(message)
        elif isinstance(message, get_args(ToEngine)):
            if isinstance(message, Release):
                front_end.tickets.discard(message.ticket)
                front_end.wake.set()
            self._hear(self._renamed(front_end, message))
        else:
            raise ValueError(f"No message to an engine: {type(message).__name__}.")

    def _take_move(self, front_end: AttachedFrontEnd, message: Offer | Yield | Continue) -> None:
        if isinstance(message, Offer):
            front_end.tickets.add(message.ticket)
        if message.request_id:
            if message.request_id not in front_end.ids:
                return  # it is over, or was never here
            message = replace(message, request_id=front_end.ids[message.request_id])
        self._hear(message)

    def _renamed(self, front_end: AttachedFrontEnd, message: ToEngine) -> ToEngine:
        """A question gets a number that is unique in the engine."""
        question = cast(Any, message)
        if not hasattr(message, "number"):
            return message
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._asked[number] = front_end, question.number
        return cast(ToEngine, replace(question, number=number))

    def _enter(self, front_end: AttachedFrontEnd, request: Request) -> Request:
        """Under an id that no other front end's request has."""
        if request.yields:
            front_end.tickets.add(request.yields)
        request_id = front_end.ids.get(request.id)
        if request_id is not None:
            self._held[request_id].num_open += 1
        else:
            request_id = request.id
            while request_id in self._held:
                request_id = f"{request_id}@{front_end.number}"
            front_end.ids[request.id] = request_id
            self._held[request_id] = Held(front_end, request.id)
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
        (front_end,) = self._attached.values()
        front_end.say(message)
        return True

    def _split(self, outputs: tuple[Output, ...]) -> dict[int, list[Output]]:
        """By front end, under its own names. Outputs for those that have gone are left out."""
        parts: dict[int, list[Output]] = {number: [] for number in self._attached}
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                continue
            part = parts.get(held.front_end.number)
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
            del held.front_end.ids[held.name]

    def _note_load(self, front_end: AttachedFrontEnd, digest: str) -> None:
        """A load counts for the front end that asked for it; where it has gone meanwhile, the load is taken back."""
        if front_end.number in self._attached:
            front_end.loads[digest] += 1
        else:
            self._hear(UnloadAdapter(digest))

    async def _write(self, front_end: AttachedFrontEnd) -> None:
        try:
            while not front_end.is_done:
                await front_end.wake.wait()
                front_end.wake.clear()
                while front_end.queue:
                    await front_end.link.send(front_end.queue.popleft())
        except EOFError:
            return
        front_end.close()

    def _lose(self, front_end: AttachedFrontEnd) -> None:
        del self._attached[front_end.number]
        if front_end.ids:
            self._hear(Abort(tuple(front_end.ids.values())))
        for digest in front_end.loads.elements():
            self._hear(UnloadAdapter(digest))
        if front_end.watches_kv and not self._is_watched:
            self._hear(WatchKV(False))
        for ticket in sorted(front_end.tickets):
            self._hear(Release(ticket))
