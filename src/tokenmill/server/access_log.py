"""The access log: a line for each answered request, at info.

    203.0.113.7:50312 "POST /v1/chat/completions HTTP/1.1" 200 0.812 s

What monitoring asks for again and again shows at debug only, unless it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.masking import Mask
from .http import is_open, route_of

ACCESS_LOGGER = "tokenmill.access"
_log = logging.getLogger(ACCESS_LOGGER)
_MAX_TARGET = 200
_SECRET = (b"key", b"token", b"secret", b"passw", b"auth", b"sig")
"""What the name of a parameter has in it whose value is not to be shown."""
_LEFT = 499  # as other access logs have it for a client that left before its answer


class Noting:
    """ASGI middleware: notes an answer's status in `scope["state"]["status"]`. What follows the head of the response
    may go past it, by `scope["state"]["send"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
            await send(message)

        state["send"] = send
        try:
            await self._app(scope, receive, note)
        finally:
            del state["send"]  # it may hold the scope, and each would keep the other


def log_access(scope: Mapping[str, Any], taken_s: float, mask: Mask, *, has_left: bool = False) -> None:
    """Called when a request is over."""
    if not _log.isEnabledFor(logging.INFO):
        return
    client = scope["client"]
    status = scope["state"].get("status", _LEFT)
    target = _target(scope["raw_path"], scope["query_string"], mask)
    _log.log(
        logging.DEBUG if status < 400 and is_open(route_of(scope)) else logging.INFO,
        '%s "%s %s HTTP/%s" %d %.3f s%s',
        "local" if client is None else f"{client[0]}:{client[1]}",
        scope["method"],
        target,
        scope["http_version"],
        status,
        taken_s,
        ", client left" if has_left else "",
        extra={
            "call": scope["state"],
            "facts": {
                "client": "local" if client is None else client[0],
                "method": scope["method"],
                "path": target.partition("?")[0],
                "status": status,
                "duration_s": round(taken_s, 6),
            },
        },
    )


def without_secrets(query: bytes) -> bytes:
    """Some clients send a key in the URL too, where this server does not look for one."""
    parts = query.split(b"&")
    for index, part in enumerate(parts):
        name, equals, _ = part.partition(b"=")
        if equals and any(word in unquote_to_bytes(name).lower() for word in _SECRET):
            parts[index] = name + b"=..."
    return b"&".join(parts)


def _target(path: bytes, query: bytes, mask: Mask) -> str:
    """As it came, in printable ASCII: nothing a client sends may look like a line of this log."""
    text = (path + b"?" + without_secrets(query) if query else path).decode("ascii", "backslashreplace")
    text = mask(text)
    text = text if text.isprintable() and '"' not in text else ascii(text)
    return text if len(text) <= _MAX_TARGET else text[:_MAX_TARGET] + "..."
