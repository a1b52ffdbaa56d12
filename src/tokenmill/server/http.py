"""What every path shares: who may call (web pages, API keys), how a call is named (X-Request-Id), errors as JSON."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.errors import AuthenticationFailed, EngineFailed, Forbidden, TokenmillError
from .clients import Clients
from .errors import Fault, describe, headers, style_of
from .visitors import Visitors

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
_MAX_ID = 256


class JSONReply(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Gate:
    """ASGI middleware: checks where a call comes from and its API key, and echoes the caller's X-Request-Id.

    That identifier, or "", is in `scope["state"]["request_id"]`, and who calls in `scope["state"]["client"]`. Paths
    that monitoring needs stay open.
    """

    def __init__(self, app: ASGIApp, *, api_keys: tuple[str, ...], visitors: Visitors, clients: Clients) -> None:
        self._app = app
        self._visitors = visitors
        self._clients = clients
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        request_id = given.get("x-request-id", "")
        if not (0 < len(request_id) <= _MAX_ID and request_id.isprintable()):
            request_id = ""
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_named(message: Message) -> None:
            if request_id and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        key = self._find_key(given.get("authorization", "")) if self._digests else None
        try:
            self._visitors.check(scope["method"], given)
            if self._digests and key is None and route_of(scope) not in OPEN_PATHS:
                raise AuthenticationFailed("Give a valid API key: Authorization: Bearer KEY.")
        except (Forbidden, AuthenticationFailed) as error:
            await error_reply(error, route_of(scope))(scope, receive, send_named)
            return
        peer = scope.get("client") or ("", 0)
        name = self._clients.name(peer[0], given.get("x-forwarded-for", ""))
        scope["state"]["client"] = name if key is None else f"key {key}"
        await self._app(scope, receive, send_named if request_id else send)

    def _find_key(self, authorization: str) -> int | None:
        """Which key it is, in constant time, whatever the key and however many there are; None: none of them."""
        kind, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("latin-1", "replace"))
        known = [hmac.compare_digest(digest, mine) for mine in self._digests]
        return known.index(True) if any(known) and kind.lower() == "bearer" else None


def route_of(scope: Mapping[str, Any]) -> str:
    """The path below the root path, whether or not a proxy has cut that off."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def error_reply(error: TokenmillError, path: str) -> Response:
    """As the API tells it that `path` belongs to."""
    return JSONReply(describe(error, style_of(path)), status_code=error.status, headers=headers(error))


async def on_http(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    fault = Fault(error.status_code, message, "invalid_request_error")
    body = style_of(route_of(request.scope))(fault)
    return JSONReply(body, status_code=error.status_code, headers=error.headers)


async def on_unexpected(request: HttpRequest, error: Exception) -> Response:
    """A bug. The traceback goes to the log, not to the client."""
    return error_reply(EngineFailed("Internal error; see the server's log."), route_of(request.scope))
