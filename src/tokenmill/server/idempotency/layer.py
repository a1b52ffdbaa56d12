"""ASGI middleware: a POST with an Idempotency-Key is carried out once.

The first call with a key runs; its answer, streamed or whole, is kept if it is complete and its status is 200. A repeat
gets the kept bytes, and waits for them where the first call still runs; so a call with a key goes on when its client
leaves. What failed is not kept: a repeat tries again. A key that comes with another body or path is refused. After
draft-ietf-httpapi-idempotency-key-header (422 for another body), but that a repeat waits where it suggests a 409.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...api.errors import ClientGone
from ...api.sandbox import Caller
from ...core.errors import BodyTooLarge, InvalidRequest, KeyReused, TokenmillError
from ..http import error_reply, route_of
from ..limits import Limits
from .store import AnswerStore, Tape, Taped

HEADER = "idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")
MAX_KEY = 255
_NEVER_KEPT = "/admin/"
"""Answers below it may hold keys."""


class _Running:
    """A call under way. digest: b"" until all of its body has come."""

    def __init__(self) -> None:
        self.digest = b""
        self.ended = asyncio.Event()


class Idempotency:
    """`store`: None: calls with a key are refused. note: told of a call with a key how it went: "run", "replayed" or
    "refused"."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        store: AnswerStore | None,
        limits: Limits,
        max_body_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        self._app = app
        self._store = store
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._note = note
        self._running: dict[tuple[str, str], _Running] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or not any(name == b"idempotency-key" for name, _ in scope["headers"])
        ):
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            pass
        except TokenmillError as error:
            self._note("refused")
            await error_reply(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope)[HEADER]
        if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
            raise InvalidRequest(f"Idempotency-Key must be 1 to {MAX_KEY} printable ASCII characters.", param=HEADER)
        if self._store is None:
            raise InvalidRequest(
                "This server keeps no answers; start it with --idempotency-store FILE, or send no Idempotency-Key.",
                param=HEADER,
            )
        if route_of(scope).startswith(_NEVER_KEPT):
            raise InvalidRequest("Idempotency-Key is not taken by /admin: keys are not kept.", param=HEADER)
        owner: str = scope["state"]["owner"]
        name = (owner, key)
        if name in self._running:
            await self._repeat(name, scope, receive, send)
            return
        mine = self._running[name] = _Running()
        try:
            found = await self._store.claim(owner, key)
            if found is None:
                await self._run(name, mine, scope, receive, send)
                return
        finally:
            del self._running[name]
            mine.ended.set()
        async with self._whole(receive) as body:
            digest = _digest(scope, body)
        await self._replay(found, digest, scope, send)

    async def _repeat(self, name: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        """While the first call runs: what it answers; if that fails, this call is the first."""
        assert self._store is not None
        caller = Caller(request=HttpRequest(scope, receive))
        async with self._whole(receive) as body:
            digest = _digest(scope, body)
            while (running := self._running.get(name)) is not None:
                if running.digest and running.digest != digest:
                    raise KeyReused(_reused(name[1]), param=HEADER)
                await caller.stay(running.ended.wait())
            mine = self._running[name] = _Running()
            try:
                found = await self._store.claim(*name)
                if found is None:
                    await self._run(name, mine, scope, _unread(body, receive), send)
                    return
            finally:
                del self._running[name]
                mine.ended.set()
        await self._replay(found, digest, scope, send)

    async def _run(self, name: tuple[str, str], mine: _Running, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry the call out, to its end even if its client leaves, and keep its answer."""
        store = self._store
        assert store is not None
        tape = Tape(store.max_answer_bytes, self._limits.held, lambda answer: store.put(*name, answer))
        hashed = _start(scope)
        has_body = False
        self._note("run")

        async def hear() -> Message:
            nonlocal has_body
            message = await receive()
            if message["type"] == "http.request":
                hashed.update(message.get("body", b""))
                if not message.get("more_body", False):
                    has_body = True
                    mine.digest = tape.digest = hashed.digest()
            elif has_body:
                await asyncio.get_running_loop().create_future()  # nobody leaves
            return message

        state, direct = scope["state"], scope["state"].get("send", send)
        state["tape"], state["send"] = tape, tape.through(direct)
        try:
            await self._app(scope, hear, tape.through(send))
        finally:
            tape.spoil()
            if not tape.is_kept:
                store.release(*name)
            state["send"] = direct
            del state["tape"]

    async def _replay(self, found: Taped, digest: bytes, scope: Scope, send: Send) -> None:
        if found.digest != digest:
            raise KeyReused(_reused(Headers(scope=scope)[HEADER]), param=HEADER)
        self._note("replayed")
        with self._limits.held(len(found.body)):
            headers = [*found.headers, REPLAYED]
            await send({"type": "http.response.start", "status": found.status, "headers": headers})
            await send({"type": "http.response.body", "body": found.body, "more_body": False})

    @contextlib.asynccontextmanager
    async def _whole(self, receive: Receive) -> AsyncIterator[bytes]:
        """The body as it comes, which counts as held until the block ends. Raises BodyTooLarge, Overloaded and
        ClientGone."""
        parts: list[bytes] = []
        size, has_more = 0, True
        with contextlib.ExitStack() as held:
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > self._max_body_bytes:
                    raise BodyTooLarge(f"The body is larger than {self._max_body_bytes} bytes.")
                held.enter_context(self._limits.held(len(part)))
                parts.append(part)
                has_more = message.get("more_body", False)
            yield b"".join(parts)


def _start(scope: Scope) -> Any:
    return hashlib.sha256(scope["raw_path"] + b"?" + scope["query_string"] + b"\n")


def _digest(scope: Scope, body: bytes) -> bytes:
    hashed = _start(scope)
    hashed.update(body)
    found: bytes = hashed.digest()
    return found


def _reused(key: str) -> str:
    return f"The Idempotency-Key {key[:100]!r} has been used for another call; send a new one."


def _unread(body: bytes, receive: Receive) -> Receive:
    unread = [body]

    async def hear() -> Message:
        return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

    return hear


_LABELS = ("model_name", "engine")
_OUTCOMES = ("run", "replayed", "refused")


class IdempotencyMetrics:
    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        family = Counter(
            "tokenmill:idempotent_calls", "Calls with an Idempotency-Key", (*_LABELS, "outcome"), registry=registry
        )
        self._outcomes = {outcome: family.labels(model_name, "0", outcome) for outcome in _OUTCOMES}

    def note(self, outcome: str) -> None:
        self._outcomes[outcome].inc()
