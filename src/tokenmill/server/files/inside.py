"""A call of an application from inside its own process: no socket, no key, nobody who could leave."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from ...control.observe.call_context import CALL
from ...core.tenant import ANYONE, Tenant

_log = logging.getLogger(__name__)


async def call(
    app: ASGIApp, path: str, body: bytes, client: str, owner: str, tenant: Tenant = ANYONE, once: str = ""
) -> tuple[int, bytes]:
    """(status, body) of a POST of JSON. `client`: who takes turns; `owner`: for whom things are kept (`http.Gate`).
    `once`: as in helper.Caller. Cancelling it ends the call."""
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
