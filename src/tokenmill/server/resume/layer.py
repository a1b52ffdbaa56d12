"""ASGI middleware: a POST runs in a task of its own. One that turns out to be a stream that is kept (`StreamLog.keep`)
goes on apart from its connection, which reads it as others may; for any other it is as if this layer were not there.
GET /v1/requests/ID/stream gives the rest of a stream to a client that has lost its connection or its server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import EngineFailed, InvalidRequest, NotFound
from ..http import route_of
from .registry import StreamRegistry
from .store import KeptAnswer
from .stream_log import StreamLog, Subscriber

_NEVER_KEPT = ("/admin/", "/v1/files", "/v1/batches")
_AT_ONCE = 256


class Resumable:
    """max_body_bytes: of a call that may be kept."""

    def __init__(self, app: ASGIApp, *, streams: StreamRegistry, max_body_bytes: int) -> None:
        self._app = app
        self._streams = streams
        self._max_body_bytes = max_body_bytes
        streams.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._streams
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope).startswith(_NEVER_KEPT):
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        direct = state.get("send", send)
        log = state["stream_log"] = streams.stream_log_of(scope)

        async def hear() -> Message:
            if log.is_kept:
                await log.abandoned.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            if log.body is not None:
                log.body += message.get("body", b"")
                if len(log.body) > self._max_body_bytes:
                    log.forget()
            return message

        async def tell(message: Message) -> None:
            await (self._take(log, message) if log.is_kept else send(message))

        async def tell_directly(message: Message) -> None:
            await (self._take(log, message) if log.is_kept else direct(message))

        state["send"] = tell_directly
        task = streams.spawn(streams.run(log, self._app(scope, hear, tell)))
        kept = asyncio.create_task(log.kept.wait(), name="is-kept")
        try:
            await asyncio.wait((task, kept), return_when=asyncio.FIRST_COMPLETED)
            if log.is_kept:
                await follow(streams, log, 0, receive, send, direct)
        finally:
            kept.cancel()
            state["send"] = direct
            if not log.is_kept:
                log.forget()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.done():
            task.result()

    async def _take(self, log: StreamLog, message: Message) -> None:
        await log.kept.wait()
        while log.is_ahead and not log.abandoned.is_set():
            await log.changed()
        log.take(message)


async def follow(
    streams: StreamRegistry, log: StreamLog, after: int, receive: Receive, send: Send, direct: Send
) -> None:
    """Send what comes behind event `after` of a log, until it ends or the client leaves. send: for the head of the
    response; direct: for the rest. Raises EngineFailed where nothing was ever sent of it."""
    subscriber = Subscriber(after)
    has_begun = False
    streams.attach(log, subscriber)
    try:
        async with _watched(log, subscriber, receive):
            while not subscriber.has_left:
                if log.start is not None and not has_begun:
                    await send(log.start)
                    has_begun = True
                if log.is_over and log.has_failed and subscriber.place > len(log.events):
                    subscriber.place = len(log.events) - 1  # the error is told also to who had more than is left
                events = log.events[subscriber.place : subscriber.place + _AT_ONCE] if has_begun else []
                is_end = log.is_over and subscriber.place + len(events) >= len(log.events)
                if is_end and not log.is_whole:
                    break
                if events or is_end:
                    subscriber.place += len(events)
                    await direct({"type": "http.response.body", "body": b"".join(events), "more_body": not is_end})
                    log.wake()
                    if is_end:
                        return
                else:
                    await log.changed()
    finally:
        streams.detach(log, subscriber)
    if not has_begun and not subscriber.has_left:
        raise EngineFailed("The stream ended before it began; see the server's log.")


@asynccontextmanager
async def _watched(log: StreamLog, subscriber: Subscriber, receive: Receive) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        subscriber.has_left = True
        log.wake()

    watcher = asyncio.create_task(watch(), name="reader-watch")
    try:
        yield
    finally:
        watcher.cancel()


_LAST = "last-event-id"


def routes(streams: StreamRegistry | None) -> list[Route]:
    """`streams`: None: nothing is kept."""

    async def stream(request: HttpRequest) -> ASGIApp:
        if streams is None:
            raise NotFound("Streams are not kept here; start the server with --resume-file FILE.")
        name = request.path_params["id"]
        after = _after(request)
        found = await streams.find(request.state.owner, name)
        if found is None:
            raise NotFound(f"No stream {name[:100]!r} of this key is under way or kept.", param="id")
        streams.num_reconnects += 1
        return _Rest(streams, found, after)

    return [Route("/v1/requests/{id}/stream", stream)]


class _Rest:
    def __init__(self, streams: StreamRegistry, found: StreamLog | KeptAnswer, after: int) -> None:
        self._streams = streams
        self._found = found
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._found
        direct = scope["state"].get("send", send)
        if isinstance(found, StreamLog):
            await follow(self._streams, found, self._after, receive, send, direct)
            return
        await send({"type": "http.response.start", "status": found.status, "headers": list(found.headers)})
        body = rest_of(found, self._after)
        await direct({"type": "http.response.body", "body": body, "more_body": False})


def rest_of(answer: KeptAnswer, after: int) -> bytes:
    """The events of a kept answer behind number `after`; an answer that is no stream whole."""
    if answer.status != 200 or after == 0:
        return answer.body
    return b"".join(part + b"\n\n" for part in answer.body.split(b"\n\n")[after:-1])


def _after(request: HttpRequest) -> int:
    text = request.query_params.get("after", request.headers.get(_LAST, "0"))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"after must be the id of an event of the stream, got {text[:100]!r}.", param="after")
    return int(text)
