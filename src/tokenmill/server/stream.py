"""A call from its first output to its last byte: as one body, or as server-sent events.

Both wait for the first output before they commit to a status, so that what the engine refuses is an HTTP error, and
both listen for the client's departure, which cancels the call in the engine. An answer that cannot be completed never
looks complete: a stream that has begun ends with an error event and without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.errors import EngineFailed, TokenmillError, Unavailable
from ..core.events import FINISH_ABORT, FINISH_ERROR
from .choice import Choice, Piece
from .client import Stream
from .errors import ClientGone, describe, from_engine
from .metrics import Metrics
from .replies import DONE, Answer, Chunks, whole_body

_log = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WholeReply:
    """The ASGI application that answers one call with one body."""

    def __init__(self, answer: Answer, stream: Stream, metrics: Metrics) -> None:
        self._answer = answer
        self._stream = stream
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        pieces: list[list[Piece]] = [[] for _ in answer.choices]
        async with watched(self._stream, receive):
            async for batch in _batches(answer, self._stream, self._metrics):
                for choice, piece in batch:
                    pieces[choice.index].append(piece)
        await Response(whole_body(answer, pieces), media_type="application/json")(scope, receive, send)


class EventStream:
    """The ASGI application that answers one call with server-sent events."""

    def __init__(self, answer: Answer, stream: Stream, metrics: Metrics) -> None:
        self._answer = answer
        self._stream = stream
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        async with watched(self._stream, receive):
            try:
                async for data in self._events():
                    if not has_started:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        has_started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                last = DONE
            except TokenmillError as error:
                if not has_started:
                    raise
                last = b"data: " + msgspec.json.encode(describe(error)) + b"\n\n"
            except ClientGone:
                if not has_started:
                    raise
                self._metrics.client_gone()
                return
            except Exception:
                if not has_started:
                    raise
                _log.exception("A stream failed.")
                last = b"data: " + msgspec.json.encode(describe(EngineFailed("Internal error."))) + b"\n\n"
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """The bytes of one write each: everything that came with one step."""
        answer = self._answer
        chunks = Chunks(answer)
        unechoed = set(range(len(answer.choices))) if answer.call.echo else set()
        ready = [chunks.start()]
        async for batch in _batches(answer, self._stream, self._metrics):
            for choice, piece in batch:
                if choice.index in unechoed:
                    unechoed.discard(choice.index)
                    ready.append(chunks.echo(choice))
                ready.append(chunks.piece(choice, piece))
            data = b"".join(ready)
            ready.clear()
            if data:
                yield data
        yield chunks.usage()


async def _batches(answer: Answer, stream: Stream, metrics: Metrics) -> AsyncIterator[list[tuple[Choice, Piece]]]:
    """What each read of the stream adds, until every choice is finished. Raises what ends the call early."""
    choices = {choice.request.id: choice for choice in answer.choices}
    num_running = len(choices)
    while num_running:
        batch = []
        for delta in await stream.take():
            choice = choices[delta.request_id]
            if delta.finish_reason == FINISH_ERROR:
                raise from_engine(delta.error, delta.error_kind, delta.error_param)
            if delta.finish_reason == FINISH_ABORT:
                raise Unavailable("The server gave up this request; it may be sent again.")
            piece = choice.push(delta)
            if piece.finish_reason is not None:
                num_running -= 1
                if delta.finish_reason is None:
                    stream.finish(delta.request_id, piece.finish_reason)
            batch.append((choice, piece))
        if not num_running:
            metrics.call_done(max(choice.num_tokens for choice in answer.choices))
        yield batch


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
