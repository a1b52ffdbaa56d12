"""What is refused because of load, and when to come back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request as HttpRequest

from ..core.errors import BodyTooLarge, InvalidRequest, Overloaded, Unavailable
from .client import EngineClient
from .config import ServerConfig
from .encodings import decode_body
from .errors import ClientGone

_MAX_RETRY_S = 60.0


class Limits:
    """Counts what this front end holds. `draining`: no new calls."""

    def __init__(self, config: ServerConfig, client: EngineClient) -> None:
        self._config = config
        self._client = client
        self._buffered_bytes = 0
        self.draining = False

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down.")

    def check_possible(self, num_requests: int) -> None:
        """Raises InvalidRequest for a call that could never be admitted."""
        if num_requests > self._config.max_open_requests:
            raise InvalidRequest(
                f"The call asks for {num_requests} choices; this server runs at most {self._config.max_open_requests}.",
                param="n",
            )

    def admit(self, num_requests: int, num_tokens: int) -> None:
        """Raises Overloaded when the engine already holds as much as it may. A call larger than the token limit runs
        alone."""
        config, client = self._config, self._client
        excess = client.num_open + num_requests - config.max_open_requests
        if excess > 0:
            raise Overloaded(
                f"{client.num_open} requests are open; retry later.",
                retry_after_s=min(excess * client.finish_gap_s, _MAX_RETRY_S),
            )
        if client.open_tokens and client.open_tokens + num_tokens > config.max_open_tokens:
            wait_s = client.num_open * client.finish_gap_s / 2
            raise Overloaded(
                f"Requests of {client.open_tokens} prompt tokens are open; retry later.",
                retry_after_s=min(wait_s, _MAX_RETRY_S),
            )

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
