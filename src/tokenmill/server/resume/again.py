"""What the endpoints know of kept streams: the line of a call, and the stream of one that no engine goes on with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from ...core.errors import EngineFailed, Unavailable
from ...core.events import FINISH_ERROR, Output, Ready
from ..client import EngineClient
from ..deltas import Stream
from ..limits import Limits
from .line import Line

_POLL_S = 0.01
_LOOK_S = 1.0
_OTHER_MODEL = "The server that began this stream has been replaced by one that would give other answers."


def line_of(request: HttpRequest, media_type: str) -> Line | None:
    """The line of a call whose stream would be of this type; None: it cannot be kept."""
    line: Line | None = request.scope["state"].get("line")
    if line is None or media_type.startswith("text/event-stream"):
        return line
    line.forget()
    return None


async def ready_at_last(client: EngineClient, limits: Limits) -> Ready:
    """The facts of an engine, as soon as there is one. Raises Unavailable where the server is about to end."""
    while client.ready is None:
        limits.refuse_when_draining()
        with contextlib.suppress(Unavailable):
            await client.wait_ready(_LOOK_S)
            continue
        await asyncio.sleep(_LOOK_S)  # it is known to come back later, or has gone again
    return client.ready


def ended_stream(request_id: str, outputs: Sequence[Output]) -> Stream:
    """A stream of all that there is of a request: to its end, or else to an error behind all that has come."""
    stream = Stream(lambda name, reason: None, [request_id])
    for output in outputs:
        stream.push(output)
    if not any(each.finish_reason for each in outputs):
        word = Output(request_id, finish_reason=FINISH_ERROR, error=_OTHER_MODEL, error_kind=EngineFailed.kind)

        def fail() -> None:
            if stream.is_awaited or not outputs:
                stream.push(word)
            elif not stream.is_closed:
                asyncio.get_running_loop().call_later(_POLL_S, fail)

        fail()
    return stream
