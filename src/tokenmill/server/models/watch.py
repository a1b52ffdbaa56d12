"""What came of one answer, seen from its bytes: whether it failed, when it began, how fast its events came."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Send

_REFUSED = 429
MIN_EVENTS = 4
"""Events of a stream by which its speed is told."""


class AnswerWatch:
    """`tell`: is told, once, of an answer that tells something of its server: is_error, ttft_s, tpot_s. An event of a
    stream counts as a token. What the client did wrong, and a client that left, tell nothing."""

    def __init__(
        self, now: Callable[[], float], tell: Callable[[bool, float | None, float | None], None], header: bytes
    ) -> None:
        self._now = now
        self._tell = tell
        self._header = (b"x-tokenmill-version", header)
        self._begun_s = now()
        self._status = 0
        self._is_stream = self._is_over = False
        self._first_s = self._last_s = 0.0
        self._num_events = 0

    def through(self, send: Send) -> Send:
        """The same, watched."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._start(message)
                message = {**message, "headers": [*message["headers"], self._header]}
            else:
                if self._is_stream and (body := message.get("body", b"")):
                    self._last_s = self._now()
                    self._first_s = self._first_s or self._last_s
                    self._num_events += body.count(b"\n\n")
                self._is_over = not message.get("more_body", False)
            await send(message)

        return watched

    def refused(self, status: int) -> None:
        """Nothing was answered but an error of this status."""
        self._status = status
        self._is_over = True

    def end(self, *, has_failed: bool) -> None:
        """The answer is over, as far as it came. has_failed: it could not be completed."""
        status = self._status
        if has_failed or (self._is_over and (status >= 500 or status == _REFUSED)):
            self._tell(True, None, None)
        elif self._is_over and status == 200:
            ttft_s = tpot_s = None
            if self._first_s:
                ttft_s = self._first_s - self._begun_s
                if self._num_events >= MIN_EVENTS:
                    tpot_s = (self._last_s - self._first_s) / (self._num_events - 1)
            self._tell(False, ttft_s, tpot_s)

    def _start(self, message: Message) -> None:
        self._status = message["status"]
        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
