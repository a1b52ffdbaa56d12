"""One streamed answer apart from its connections: its events, numbered from 1, and those who read them.

An event's number is its SSE id. While a stream is kept, its answer grows by one token at a time (`one_by_one`), so that
number N stands for the same bytes however steps fall, and in every life: what is lost is computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.types import Message

from ...core.errors import EngineFailed, Unavailable
from ...core.events import FINISH_ERROR, Output, Ready
from ..client import EngineClient
from ..deltas import Delta, Stream
from ..limits import Limits
from .store import Headers, KeptAnswer, KeptCall

if TYPE_CHECKING:
    from ...api.answer import Answer
    from ..client import EngineClient

_MOST_AHEAD = 1024
"""Events that an answer may be ahead of a slow reader while others or the connection could still take them."""


class StreamLog:
    """call       what is kept of the call; None: it is not kept, and its connection gets the answer itself
    headers, body: of the call, as whoever answers it reads them and as far as they have come; None: too much, or it
               is known whether the call is kept
    outputs    what an earlier life has left of it
    start      the head of the response, once it is there
    events     its events so far; for an answer that is no stream, its parts
    is_over    nothing will follow
    is_whole   and nothing is missing
    has_failed, was_cut: the last event is an error; one that another process need not end with
    abandoned  nobody wants it any more
    """

    def __init__(
        self, keep: Callable[[StreamLog, Answer, EngineClient], bool] | None = None, call: KeptCall | None = None
    ) -> None:
        self.call = call
        self.headers: Headers = ()
        self.body: bytearray | None = None
        self.key = 0
        self.outputs: list[Output] = []
        self.num_cached: int | None = None
        self.start: Message | None = None
        self.events: list[bytes] = []
        self.is_over = False
        self.is_whole = False
        self.has_failed = False
        self.was_cut = False
        self.abandoned = asyncio.Event()
        self.kept = asyncio.Event()
        self.subscribers: list[Subscriber] = []
        self._keep = keep or _keep_nothing
        self._waiting: list[asyncio.Future[None]] = []
        self._is_stream = False

    @property
    def is_kept(self) -> bool:
        return self.call is not None

    def keep(self, answer: Answer, client: EngineClient) -> bool:
        """Keep the call of this answer, which is about to be submitted to `client`, from now on. Whether that is so."""
        keep, self._keep = self._keep, _keep_nothing
        try:
            return keep(self, answer, client)
        finally:
            self.body = None

    def forget(self) -> None:
        """It will not be kept: let go of its call."""
        self._keep = _keep_nothing
        self.body = None

    def one_by_one(self, delta: Delta) -> Iterator[Delta]:
        """A delta as deltas of at most one token each, with the count of cached tokens that the first life told."""
        if self.num_cached is None:
            self.num_cached = delta.num_cached
        delta.num_cached = self.num_cached
        return split(delta)

    def take(self, message: Message) -> None:
        """The next message of the response."""
        if message["type"] == "http.response.start":
            self.start = message
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = message["status"] == 200 and any(b"event-stream" in kind for kind in kinds)
        elif message["type"] == "http.response.body":
            self._take_body(message.get("body", b""))
            if not message.get("more_body", False):
                self.is_whole = True
        self.wake()

    def _take_body(self, body: bytes) -> None:
        if not self._is_stream:
            self.events += [body] if body else []
            return
        parts = body.split(b"\n\n")
        assert not parts[-1], "what is sent ends with an event"
        number = len(self.events)
        self.events += [b"id: %d\n%s\n\n" % (number + place, part) for place, part in enumerate(parts[:-1], 1)]

    def end(self) -> None:
        """The answer's task has ended."""
        self.is_over = True
        self.wake()

    def answer(self) -> KeptAnswer:
        assert self.start is not None and self.is_whole
        headers = tuple((bytes(name), bytes(value)) for name, value in self.start["headers"])
        return KeptAnswer(self.start["status"], headers, b"".join(self.events))

    @property
    def is_ahead(self) -> bool:
        """Whether those who read it are all far behind."""
        return bool(self.subscribers) and len(self.events) - max(each.place for each in self.subscribers) > _MOST_AHEAD

    async def changed(self) -> None:
        """Something has come, or somebody has read or left."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


def _keep_nothing(log: StreamLog, answer: Answer, client: EngineClient) -> bool:
    return False


class Subscriber:
    """place: events that it has; has_left: its connection is gone."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.has_left = False


def split(delta: Delta) -> Iterator[Delta]:
    """What ends the request comes with the last part."""
    num_tokens = len(delta.tokens)
    if num_tokens <= 1:
        yield delta
        return
    for place, token in enumerate(delta.tokens):
        part = Delta(delta.request_id, [token], delta.logprobs[place : place + 1], num_cached=delta.num_cached)
        if place == 0:
            part.prompt_logprobs, part.timing = delta.prompt_logprobs, delta.timing
            part.draft_steps = delta.draft_steps
        if place == num_tokens - 1:
            part.finish_reason, part.stop_token, part.timing = delta.finish_reason, delta.stop_token, delta.timing
            part.error, part.error_kind, part.error_param = delta.error, delta.error_kind, delta.error_param
            part.vector, part.is_saved = delta.vector, delta.is_saved
            part.predicted = delta.predicted
        yield part


_POLL_S = 0.01
_LOOK_S = 1.0
_OTHER_MODEL = "The server that began this stream has been replaced by one that would give other answers."


def stream_log_of(request: HttpRequest, media_type: str) -> StreamLog | None:
    """The log of a call whose stream would be of this type; None: it cannot be kept."""
    log: StreamLog | None = request.scope["state"].get("stream_log")
    if log is None or media_type.startswith("text/event-stream"):
        return log
    log.forget()
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
