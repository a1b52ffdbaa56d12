"""The calls of batches: each is made from inside the process, and the owners of batches take turns.

A call from inside has no socket, no key, and nobody who could leave. Owners take turns, and at an owner's turn that
owner's batches do. A batch asks for one turn at a time and comes back for its next line, so an owner with many batches
always has some in the queue, and one with a single batch comes back to it after each line. An owner who has had a turn
goes behind all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import ASGIApp, Message

from ...control.observe.call_context import CALL
from ...core.tenant import ANYONE, Tenant


@contextlib.asynccontextmanager
async def first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the first failure itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


_log = logging.getLogger(__name__)


async def call(
    app: ASGIApp, path: str, body: bytes, client: str, owner: str, tenant: Tenant = ANYONE, once: str = ""
) -> tuple[int, bytes]:
    """(status, body) of a POST of JSON. `client`: who takes turns; `owner`: for whom things are kept (`http.Gate`).
    `once`: as in `Caller`. Cancelling it ends the call."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {
            "request_id": "",
            "told_id": "",
            "client": client,
            "owner": owner,
            "tenant": tenant,
            "once": once,
            "scopes": frozenset(),
        },
    }
    unread = [body]
    status = 500
    parts: list[bytes] = []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # nobody leaves
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    CALL.set(scope["state"])
    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered 500, and tells whoever serves it as well
        _log.exception("A call from inside failed.")
        status = 500
    return status, b"".join(parts)


class Turn:
    """One batch's wait for its next line. has_come: set when no other is before it, until it leaves."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.has_come = asyncio.Event()


class Turns:
    """Each operation takes the same time however many wait, but for leaving before the turn has come."""

    def __init__(self) -> None:
        self._now: Turn | None = None
        self._waiting: dict[str, deque[Turn]] = {}  # the owner whose turn is next first; nobody without one that waits

    @contextlib.asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """Entered when it is the owner's turn, which ends with the block."""
        turn = self.join(owner)
        try:
            await turn.has_come.wait()
            yield
        finally:
            self.leave(turn)

    def join(self, owner: str) -> Turn:
        turn = Turn(owner)
        self._waiting.setdefault(owner, deque()).append(turn)
        if self._now is None:
            self._call_next()
        return turn

    def leave(self, turn: Turn) -> None:
        """Its line has begun, or never will."""
        if turn is self._now:
            if turn.owner in self._waiting:
                self._waiting[turn.owner] = self._waiting.pop(turn.owner)  # behind the others
            self._call_next()
            return
        self._waiting[turn.owner].remove(turn)
        if not self._waiting[turn.owner]:
            del self._waiting[turn.owner]

    def _call_next(self) -> None:
        self._now = None
        for owner, turns in self._waiting.items():
            self._now = turns.popleft()
            self._now.has_come.set()
            if not turns:
                del self._waiting[owner]
            return
