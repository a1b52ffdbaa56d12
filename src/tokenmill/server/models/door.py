"""The one place where calls find their model: by the `model` of their bodies.

A call for the server's own model goes on as it came. While there is no other model, bodies are not looked at.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import ModelNotFound, TokenmillError
from ..errors import ClientGone
from ..http import route_of
from ..limits import Limits
from .book import ModelBook, ServedModel

_ELSEWHERE = ("/admin/", "/v1/files", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/console/")
"""What is posted there has no model, or means adapters of the server's own."""

Handler = Callable[[HttpRequest, Exception], Awaitable[Response]]


class _Named(msgspec.Struct):
    model: str | None = None


_read = msgspec.json.Decoder(_Named).decode


class ModelDoor:
    """ASGI middleware in front of the server's own application. refuse, note_gone: answer for a call that is refused,
    and one whose client left."""

    def __init__(self, app: ASGIApp, *, book: ModelBook, limits: Limits, refuse: Handler, note_gone: Handler) -> None:
        self._app = app
        self._book = book
        self._limits = limits
        self._refuse = refuse
        self._note_gone = note_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._book.is_alone or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = route_of(scope)
        if path.startswith(_ELSEWHERE):
            await self._app(scope, receive, send)
            return
        request = HttpRequest(scope, receive)
        try:
            async with self._limits.body(request) as data:
                model = self._book.find(name_in(data))
                if model is not None:
                    await self._answer(model, path, data, scope, receive, send)
                    return
        except TokenmillError as error:
            await (await self._refuse(request, error))(scope, receive, send)
            return
        except ClientGone as error:
            await (await self._note_gone(request, error))(scope, receive, send)
            return
        await self._app(*unread(scope, data, receive), send)

    async def _answer(
        self, model: ServedModel, path: str, data: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not model.takes(path):
            message = f"The model {model.name!r} is served by another server, which is not asked for {path}."
            raise ModelNotFound(message, param="model")
        await model.answer(path, data, scope, receive, send)


def name_in(body: bytes) -> str | None:
    """The model that a body names; None where it names none, or is nothing that could."""
    try:
        return _read(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def unread(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """A scope and a receive by which a body that was read is read again, as it was decoded."""
    dropped = (b"content-encoding", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"content-length", str(len(body)).encode()))
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": headers}, again
