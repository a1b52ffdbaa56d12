"""Responses that run without a connection: whoever asked for one may leave, and read it later, or its events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from starlette.responses import StreamingResponse
from starlette.types import Message

from ...core.errors import EngineFailed, TokenmillError, Unavailable
from ..port import Engines, Running, Server
from .items import Item
from .shape import Progress, ResponseChunks, ResponseShape

STREAM_INTERVAL = 16
"""Tokens of an event that nobody is to read: what a look at the response shows grows by so many."""
_HELD_AT_ONCE = 1 << 16
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_log = logging.getLogger(__name__)


class EventLog:
    """The events of one response, by their sequence numbers, for any number of readers."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._is_over = False
        self._changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        self._events += split(data)
        self._tell()

    def end(self) -> None:
        self._is_over = True
        self._tell()

    def whole(self) -> bytes:
        return b"".join(self._events)

    async def after(self, number: int) -> AsyncIterator[bytes]:
        """The events behind that one, as they come, to the last."""
        place = number + 1
        while True:
            changed, found = self._changed, self._events[place:]
            place += len(found)
            if found:
                yield b"".join(found)
            elif self._is_over:
                return
            else:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def split(data: bytes) -> list[bytes]:
    """Events of a stream, one by one. None has an empty line within."""
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, headers=_HEADERS, media_type=ResponseShape.media_type)


class NextTurn(Protocol):
    """Goes on with a response that calls tools of MCP servers."""

    async def call(self, item: Item) -> dict[str, Any]:
        """`output` and `error` of a call."""
        ...

    async def begin(self, items: Sequence[Item]) -> Running:
        """The next turn, behind the items that the response has so far."""
        ...


class BackgroundRun:
    """One response, from when it is submitted. log: of its events; None: nobody is to read them. items: what it has
    before the model has said anything. next_turn: None where it calls nothing. engines: of its model; is_between: they
    have no request of it now, and will have one when a tool has been called."""

    def __init__(
        self,
        progress: Progress,
        running: Running,
        server: Server,
        *,
        has_log: bool,
        items: Sequence[Item] = (),
        next_turn: NextTurn | None = None,
    ) -> None:
        self.progress = progress
        self.running = running
        self.log = EventLog() if has_log else None
        self.engines = server.client
        self.is_between = False
        self._limits = server.limits
        self._chunks = ResponseChunks(progress)
        self._next_turn = next_turn
        self._calling: asyncio.Future[dict[str, Any]] | None = None
        self._error: TokenmillError | None = None
        if progress.settings["background"]:
            self._add(self._chunks.announce())
        for item in items:
            self._add(self._chunks.told(progress.output.put(item)))

    def cancel(self, error: TokenmillError) -> None:
        """Nobody wants the rest."""
        self.progress.cancel()
        self.fail(error)

    def fail(self, error: TokenmillError) -> None:
        """End it with this error. A call of a tool is not waited for."""
        self._error = error
        self.running.cancel(error)
        if self._calling is not None:
            self._calling.cancel()

    async def run(self, size_bytes: int) -> None:
        """To its end, whatever that is. size_bytes: of the body, which the response repeats."""
        progress = self.progress
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._limits.held(size_bytes))
                await self._answer(held)
            except TokenmillError as error:
                self._add(self._chunks.failure(error))
            except asyncio.CancelledError:
                self._add(self._chunks.failure(Unavailable("The server is shutting down.")))
                raise
            except Exception:
                _log.exception("A response in the background failed.")
                self._add(self._chunks.failure(EngineFailed("Internal error.")))
            finally:
                self.running.close()
                progress.cancel()
                if self.log is not None:
                    self.log.end()

    async def _answer(self, held: contextlib.ExitStack) -> None:
        """Have the reply written, to nobody's connection. What is kept of it counts as held."""
        num_unheld = 0

        async def receive() -> Message:
            await asyncio.get_running_loop().create_future()  # nobody leaves
            raise AssertionError("unreachable")

        async def send(message: Message) -> None:
            nonlocal num_unheld
            data = message.get("body", b"")
            self._add(data)
            num_unheld += 0 if self.log is None else len(data)
            if num_unheld >= _HELD_AT_ONCE:
                held.enter_context(self._limits.held(num_unheld))
                num_unheld = 0

        scope: dict[str, Any] = {"type": "http", "state": {}}
        while True:
            await self.running.reply(ResponseShape(self.progress, self._chunks))(scope, receive, send)
            waits_for = self.progress.waits_for
            if waits_for is None or self.progress.sealed:
                return
            assert self._next_turn is not None, "only who may call has something to wait for"
            self.is_between = True
            self.running.close()
            result = await self._called(self._next_turn, waits_for)
            self._add(self._chunks.told(self.progress.output.resolve(result)))
            self.running = await self._next_turn.begin(self.progress.output.items())
            self.is_between = False
            self._raise_error()
            self.progress.go_on(self.running.answer)

    async def _called(self, next_turn: NextTurn, item: Item) -> dict[str, Any]:
        """What a call gives."""
        calling = self._calling = asyncio.ensure_future(next_turn.call(item))
        try:
            await asyncio.wait((calling,))
        finally:
            self._calling = None
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        self._raise_error()
        return calling.result()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _add(self, data: bytes) -> None:
        if self.log is not None:
            self.log.add(data)


class Background:
    """The responses of one process that are under way, of whichever of its models. `end` them when it ends.
    running: those to be stored that are not complete yet, by id, with their owner and what feeds them; runs: those of
    them that run in the background."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[str, Progress, Running]] = {}
        self.runs: dict[str, BackgroundRun] = {}
        self._tasks: dict[BackgroundRun, asyncio.Task[None]] = {}

    def start(self, run: BackgroundRun, size_bytes: int, on_end: Callable[[BackgroundRun], None]) -> None:
        task = asyncio.create_task(run.run(size_bytes), name="background-response")
        self._tasks[run] = task

        def forget(task: asyncio.Task[None]) -> None:
            del self._tasks[run]
            on_end(run)

        task.add_done_callback(forget)

    async def wait(self, run: BackgroundRun) -> None:
        """Until it has ended and its `on_end` was called."""
        if (task := self._tasks.get(run)) is not None:
            await asyncio.wait((task,))
            await asyncio.sleep(0)

    def between(self, engines: Engines) -> list[BackgroundRun]:
        """Those that go on with a model of these engines when a tool has been called."""
        return [run for run in self._tasks if run.is_between and run.engines is engines]

    def end_between(self, engines: Engines, error: TokenmillError) -> None:
        for run in self.between(engines):
            run.fail(error)

    async def drain(self) -> None:
        """Wait for all that run."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks.values()))
            await asyncio.sleep(0)

    async def end(self) -> None:
        """End all that run: they have failed."""
        for task in self._tasks.values():
            task.cancel()
        await self.drain()
