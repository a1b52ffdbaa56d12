"""What the endpoints know of kept streams: the line of a call, and the stream of one that no engine goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from ...core.errors import EngineFailed
from ...core.events import FINISH_ERROR, Output
from ..deltas import Stream
from .line import Line

_POLL_S = 0.01
_OTHER_MODEL = "The server that began this stream has been replaced by one that would give other answers."


def line_of(request: HttpRequest, media_type: str) -> Line | None:
    """The line of a call whose stream would be of this type; None: it cannot be kept."""
    return request.scope["state"].get("line") if media_type.startswith("text/event-stream") else None


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
