"""An answer as it is sent, kept to be sent again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from starlette.types import Message, Send

from ...core.errors import Overloaded

_AT_ONCE = 1 << 16


class Taped(NamedTuple):
    """A whole answer. digest: of the call that it answers."""

    digest: bytes
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Tape:
    """Records what goes through `through(send)`. Complete answers of status 200 and of at most max_bytes go to `keep`,
    before their last bytes are sent. Whoever knows that an answer is not what the call is for calls `spoil`: a stream
    that ends with an error has status 200 too; and so does who has done with the tape.

    held    a context in which so many bytes count as held; raises Overloaded: then the answer is not kept
    digest  of the call, as soon as it is known
    is_kept whether the answer went to `keep`
    """

    def __init__(
        self,
        max_bytes: int,
        held: Callable[[int], AbstractContextManager[None]],
        keep: Callable[[Taped], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._held = held
        self._num_held = 0
        self._holding = ExitStack()
        self._keep = keep
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._parts: list[bytes] = []
        self._size = 0
        self._is_spoiled = False
        self.is_kept = False
        self.digest = b""

    def spoil(self) -> None:
        self._is_spoiled = True
        self._parts.clear()
        self._holding.close()

    def through(self, send: Send) -> Send:
        async def record(message: Message) -> None:
            if not self._is_spoiled:
                self._note(message)
            await send(message)

        return record

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple(message.get("headers", ()))
            if self._status != 200:
                self.spoil()
        elif message["type"] == "http.response.body":
            part = bytes(message.get("body", b""))
            self._size += len(part)
            if self._size > self._max_bytes or not self._hold():
                self.spoil()
                return
            self._parts.append(part)
            if not message.get("more_body", False) and self.digest:
                body = b"".join(self._parts)
                self.spoil()
                self.is_kept = True
                self._keep(Taped(self.digest, self._status, self._headers, body))

    def _hold(self) -> bool:
        """Have what came counted, in large pieces; whether there is room."""
        more = self._size - self._num_held
        if more > 0:
            more = -(-more // _AT_ONCE) * _AT_ONCE
            try:
                self._holding.enter_context(self._held(more))
            except Overloaded:
                return False
            self._num_held += more
        return True
