"""A call from its first output to its last byte: as one body, or as a stream. What the bytes are is its shape's.

Both wait for the first output before they commit to a status, so that what the engine refuses is an HTTP error, and
both listen for the client's departure, which cancels the call in the engine. An answer that cannot be completed never
looks complete: a stream that has begun ends with its API's word for an error, and without that for the end.

A stream of nothing but text is written where the engine's message is dealt out, by `EventStream._pass_on`: its task is
woken for the first output, for the last, and when the client reads too slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.answer import Answer, Chunks, Shape
from ..api.errors import ClientGone, from_engine
from ..api.logprobs import ENTRIES_AT_ONCE
from ..api.pieces import in_turns
from ..control.observe.metrics import Metrics
from ..control.usage.meter import Tab
from ..core.errors import EngineFailed, TokenmillError, Unavailable
from ..core.events import FINISH_ABORT, FINISH_ERROR, Output
from ..text.choice import Choice, Piece
from .deltas import Stream
from .http import Begun
from .kv.hints import KVRetention
from .resume.stream_log import StreamLog

_log = logging.getLogger(__name__)
_PIECES_AT_ONCE = 256
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call that is submitted to the engine, and what is done about it beside its answer.

    headers    of its response
    tab        on which it is counted; None: it is not
    retention  has its KV kept
    """

    answer: Answer
    stream: Stream
    metrics: Metrics
    headers: Sequence[tuple[bytes, bytes]] = ()
    tab: Tab | None = None
    retention: KVRetention | None = None

    def reply(self, shape: Shape) -> ASGIApp:
        """The application that sends the answer, as a stream where the call wants one."""
        return EventStream(self, shape) if self.answer.call.stream else WholeReply(self, shape)

    def cancel(self, error: TokenmillError) -> None:
        """End it with this error. What it has given so far counts."""
        if self.tab is not None:
            self.tab.note()
        self.stream.fail(error)

    def close(self) -> None:
        """Its reader wants no more of it."""
        self.stream.close()


class WholeReply:
    """The ASGI application that answers one call with one body."""

    def __init__(self, call: RunningCall, shape: Shape) -> None:
        self._call = call
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, answer = self._call, self._call.answer
        pieces: list[list[Piece]] = [[] for _ in answer.choices]
        async with watched(call.stream, receive):
            async for batch in _batches(call):
                for choice, piece in batch:
                    pieces[choice.index].append(piece)
        body = await in_turns(self._shape.whole(answer, pieces))
        if call.tab is not None:
            call.tab.note()
        response = Response(body, media_type="application/json")
        response.raw_headers += call.headers
        await response(scope, receive, send)


class EventStream:
    """The ASGI application that answers one call with a stream."""

    def __init__(self, call: RunningCall, shape: Shape) -> None:
        self._call = call
        self._chunks = shape.chunks(call.answer)
        self._headers = [(b"content-type", shape.media_type.encode()), *_HEADERS, *call.headers]
        self._stream_log: StreamLog | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        self._stream_log = scope.get("state", {}).get("stream_log")
        with contextlib.closing(_Body(scope.get("state", {}).get("send", send))) as body, self._counted():
            async with watched(self._call.stream, receive):
                try:
                    async for data in self._events(body):
                        if not has_started:
                            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                            has_started = True
                        await body.send(data)
                    last = self._chunks.end()
                except TokenmillError as error:
                    if not has_started:
                        raise
                    last = self._fail(scope, error)
                except ClientGone:
                    if not has_started:
                        raise
                    self._call.metrics.client_gone()
                    return
                except Exception:
                    if not has_started:
                        raise
                    _log.exception("A stream failed.")
                    last = self._fail(scope, EngineFailed("Internal error."))
                if self._call.tab is not None:
                    self._call.tab.close()
                await body.send(last, more=False)

    def _fail(self, scope: Scope, error: TokenmillError) -> bytes:
        """The last words of a stream that is not complete, and so nothing to be repeated."""
        state = scope.setdefault("state", {})
        tape = state.get("tape")
        if tape is not None:
            tape.spoil()
        state["has_failed"] = True
        if self._stream_log is not None:
            self._stream_log.has_failed = True
            self._stream_log.was_cut = isinstance(error, Unavailable)
        return self._chunks.failure(error)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """However the block ends, what was written counts and nothing else."""
        try:
            yield
        finally:
            if self._call.tab is not None:
                self._call.tab.close()

    async def _events(self, body: _Body) -> AsyncIterator[bytes]:
        """The bytes of one write each: everything that came with one step, unless it was passed on to `body`."""
        call, answer, chunks = self._call, self._call.answer, self._chunks
        ready = [chunks.start()]
        num_entries, per_token = 0, 1 + (answer.call.sampling.logprobs or 0)
        log = self._stream_log if self._stream_log is not None and self._stream_log.is_kept else None
        async for batch in _batches(call, log):
            for number, (choice, piece) in enumerate(batch, 1):
                if number % _PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if chunks.is_plain and piece.finish_reason is None:
                    ready.append(chunks.text(choice, piece))
                    continue
                ready.append(await in_turns(chunks.piece(choice, piece)))
                num_entries += len(piece.logprobs) * per_token
                if num_entries > ENTRIES_AT_ONCE:
                    num_entries = 0
                    await asyncio.sleep(0)
            data = b"".join(ready)
            ready.clear()
            if call.tab is not None:
                call.tab.note()
            if data:
                yield data
                if chunks.is_plain and len(answer.choices) == 1 and not answer.call.sampling.stop:
                    call.stream.divert(partial(self._pass_on, chunks, answer.choices[0], body))
                if call.tab is not None:
                    call.tab.follow(call.stream)

    def _pass_on(self, chunks: Chunks, choice: Choice, body: _Body, output: Output) -> bool:
        """Write an output that does not end the choice, unless one before is not written yet."""
        if body.is_held or (len(output.tokens) > 1 and self._stream_log is not None):
            return False
        data = chunks.text(choice, choice.push(output))
        if data:
            body.begin(data)
        return True


class _Body:
    """The body of a response that has begun, as far as it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._rest: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether what was begun last still waits for the client."""
        return self._rest is not None

    def begin(self, data: bytes) -> None:
        """Send as far as it goes without waiting, which is nearly always to the end: then no task is needed for it."""
        assert self._rest is None, "what was begun before comes first"
        steps = self._send(_part(data, True)).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        self._rest = asyncio.create_task(self._go_on(Begun(steps, waits_for)), name="held-write")

    async def send(self, data: bytes, *, more: bool = True) -> None:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            await rest
        await self._send(_part(data, more))

    def close(self) -> None:
        """Drop what still waits."""
        if self._rest is not None:
            self._rest.cancel()

    async def _go_on(self, begun: Begun) -> None:
        """If it fails, the next `send` does."""
        await begun
        self._rest = None


def _part(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _batches(call: RunningCall, log: StreamLog | None = None) -> AsyncIterator[list[tuple[Choice, Piece]]]:
    """What each read of the stream adds, until every choice is finished. `line`: of a stream that is kept, which grows
    by a token at a time. Raises what ends the call early."""
    answer, stream, retention = call.answer, call.stream, call.retention
    choices = {choice.request.id: choice for choice in answer.choices}
    num_running = len(choices)
    try:
        while num_running:
            batch = []
            for delta in await stream.take():
                choice = choices[delta.request_id]
                if delta.finish_reason == FINISH_ERROR:
                    raise from_engine(delta.error, delta.error_kind, delta.error_param)
                if delta.finish_reason == FINISH_ABORT:
                    raise Unavailable("The server gave up this request; it may be sent again.")
                is_end = delta.finish_reason is not None
                for part in (delta,) if log is None else log.one_by_one(delta):
                    piece = choice.push(part)
                    batch.append((choice, piece))
                    if len(batch) % _PIECES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    if piece.finish_reason is not None:
                        num_running -= 1
                        if retention is not None:
                            retention.finish(choice)
                        if not is_end:
                            stream.finish(delta.request_id, piece.finish_reason)
                        break
            if not num_running:
                call.metrics.call_done(max(choice.num_tokens for choice in answer.choices))
            yield batch
    finally:
        if retention is not None:
            retention.forget(answer.choices)


@contextlib.asynccontextmanager
async def watched(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Close the stream when the block ends, and fail it with ClientGone as soon as the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.fail(ClientGone())

    watcher = asyncio.create_task(watch(), name="disconnect-watch")
    try:
        yield
    finally:
        watcher.cancel()
        stream.close()
