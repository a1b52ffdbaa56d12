"""What is refused because of load, and when to come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NoReturn

from starlette.requests import Request as HttpRequest

from ..cluster.admission import BoundedWait
from ..cluster.desk import held_tokens
from ..core.errors import BodyTooLarge, InvalidRequest, Overloaded, Unavailable
from ..core.events import Ready
from ..core.policy import Newcomer, Refusal
from ..core.ports import Clock
from ..core.request import Request
from .client import EngineClient
from .config import ServerConfig
from .encodings import decode_body
from .errors import ClientGone, told_s
from .helper import Caller

MAX_OF_CALL = 1024
"""Choices of one call."""


class Limits:
    """Counts what this front end holds. `draining`: no new calls."""

    def __init__(self, config: ServerConfig, client: EngineClient, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._buffered_bytes = 0
        self.draining = False
        client.admission = BoundedWait(config.max_open_requests, config.max_open_tokens, config.max_queue_s)

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down.")

    def check_possible(self, num_requests: int, param: str = "n") -> None:
        """Raises InvalidRequest for a call that could never be admitted."""
        most = min(self._config.max_open_requests, MAX_OF_CALL)
        if num_requests > most:
            raise InvalidRequest(
                f"The call asks for {num_requests} choices; this server takes at most {most} at once.", param=param
            )

    def admit(self, newcomer: Newcomer) -> None:
        """Raises InvalidRequest for a priority that nobody may claim, and Overloaded where the call may not enter."""
        if newcomer.priority < self._config.max_priority:
            raise InvalidRequest(
                f"priority must be at least {self._config.max_priority} on this server, got {newcomer.priority}; lower "
                "is more urgent.",
                param="priority",
            )
        refusal = self._client.refusal(newcomer, self._clock.now())
        if refusal is not None:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> NoReturn:
        if self._client.metrics is not None:
            self._client.metrics.call_turned_away(refusal.reason)
        message = f"{refusal.message}; retry in {told_s(refusal.retry_s)} s."
        raise Overloaded(message, retry_after_s=refusal.retry_s, reason=refusal.reason)

    @contextlib.contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Texts that wait, or an answer until its client has taken it: they count as bodies do. Raises Overloaded when
        all together are too much."""
        if self._buffered_bytes + num_bytes > self._config.max_buffered_bytes:
            raise Overloaded("Too much is being held for other requests; retry later.")
        self._buffered_bytes += num_bytes
        try:
            yield
        finally:
            self._buffered_bytes -= num_bytes

    @contextlib.asynccontextmanager
    async def body(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block ends: what waits to be encoded is bounded too. Raises
        BodyTooLarge as soon as it is known to be, Overloaded when all bodies together are."""
        limit = self._config.max_body_bytes
        too_large = BodyTooLarge(f"The body is larger than {limit} bytes.")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                self._buffered_bytes += len(part)
                if size > limit:
                    raise too_large
                if self._buffered_bytes > self._config.max_buffered_bytes:
                    raise Overloaded("Too many large requests are being received; retry later.")
                parts.append(part)
                if not message.get("more_body", False):
                    break
            body = b"".join(parts)
            parts.clear()
            encoding = request.headers.get("content-encoding")
            if encoding is not None:

                def hold(more: int) -> None:
                    nonlocal size
                    size += more
                    self._buffered_bytes += more
                    if self._buffered_bytes > self._config.max_buffered_bytes:
                        raise Overloaded("Too many large requests are being received; retry later.")

                body = await decode_body(encoding, body, limit, hold)
            yield body
        finally:
            self._buffered_bytes -= size


def newcomer(client: str, requests: Sequence[Request]) -> Newcomer:
    """The call of `requests`, as an admission looks at it."""
    first = requests[0]
    return Newcomer(client, first.priority, len(first.prompt_tokens), len(requests), held_tokens(requests))


async def wait_ready(client: EngineClient, config: ServerConfig, caller: Caller) -> Ready:
    """The engines' facts. A call waits for an engine that is being started as long as it would for a place. Raises
    Unavailable, and ClientGone."""
    ready = client.ready
    return await caller.stay(client.wait_ready(config.max_queue_s)) if ready is None else ready
