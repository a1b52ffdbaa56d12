"""Entries of the audit log for what comes over HTTP: calls that change something, and keys that are refused.

What changes something is every call of `DELETE`, `PUT` or `PATCH`, and every `POST` under `ACTIONS`. A handler may say
more of what it did in `scope["state"]["audited"]`, a dict that becomes part of the entry. Refused keys, and such calls
refused before a key was looked at (of a web page elsewhere), get an entry each up to `BURST` at once and `RATE` a
second, since anybody can make them; what goes beyond is counted in the next entry.

While the log cannot be written every call is refused with 503, but those that monitoring needs and what an operator
looks at (`GET /admin/...`). `GET /admin/audit` shows where the head is, and whether the log is written.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.json_reply import JSONReply
from ..control.audit.log import AuditLog
from ..core.errors import NotFound, Unavailable
from .callers import require_operator
from .http import error_reply, is_open, route_of

ACTIONS = (
    "/admin/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/files",
    "/v1/batches",
    "/lora-adapters",
    "/props",
    "/slots",
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs",
)
RATE = 5.0
BURST = 50
_TELL_COUNT_S = 10.0
_MAX_PATH = 300


class Audited:
    """ASGI middleware outside of the gate."""

    def __init__(self, app: ASGIApp, *, log: AuditLog) -> None:
        self._app = app
        self._log = log
        self._tokens = float(BURST)
        self._filled_s = 0.0
        self._untold: Counter[tuple[str, str]] = Counter()  # by action and outcome
        self._timer: asyncio.TimerHandle | None = None
        log.before_close.append(self.tell_count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = route_of(scope)
        if (why_not := self._log.why_not) and not (is_open(route) or _is_view(scope["method"], route)):
            error = Unavailable(f"The audit log cannot be written: {why_not}.", retry_after_s=5.0)
            await error_reply(error, scope)(scope, receive, send)
            return
        is_action = _is_action(scope["method"], route)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                action = f"http.{scope['method'].lower()}"
                if status == 401:
                    self._note_refused(scope, "key.refused", route, status)
                elif is_action and status not in (404, 405):
                    if status >= 400 and scope.get("state", {}).get("tenant") is None:
                        self._note_refused(scope, action, route, status)
                    else:
                        self._log.note(self._entry(scope, action, route, status))
            await send(message)

        await self._app(scope, receive, noting)

    def _note_refused(self, scope: Scope, action: str, route: str, status: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._tokens = min(float(BURST), self._tokens + (now - self._filled_s) * RATE)
        self._filled_s = now
        if self._tokens < 1:
            self._untold[action, str(status)] += 1
            if self._timer is None:
                self._timer = loop.call_later(_TELL_COUNT_S, self.tell_count)
            return
        self._tokens -= 1
        self._log.note(self._entry(scope, action, route, status))

    def _entry(self, scope: Scope, action: str, route: str, status: int) -> dict[str, Any]:
        state = scope.get("state", {})
        peer = scope.get("client")
        tenant = state.get("tenant")
        actor = {
            "tenant": "" if tenant is None else tenant.id,
            "client": state.get("client", ""),
            "address": "" if peer is None else peer[0],
        }
        if key := state.get("key"):
            actor["key"] = key
        entry = {"actor": actor, "action": action, "object": self._log.mask(route)[:_MAX_PATH], "outcome": str(status)}
        if told_id := state.get("told_id"):
            entry["request"] = told_id
        return entry | state.get("audited", {})

    def tell_count(self) -> None:
        """Note how many refusals have no entry of their own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (action, outcome), number in self._untold.items():
            self._log.note({"action": action, "outcome": outcome, "count": number})
        self._untold.clear()


def _is_action(method: str, route: str) -> bool:
    return method in ("DELETE", "PUT", "PATCH") or (method == "POST" and route.startswith(ACTIONS))


def _is_view(method: str, route: str) -> bool:
    return method in ("GET", "HEAD") and route.startswith("/admin/")


def audit_routes(log: AuditLog | None) -> list[Route]:
    async def show(request: HttpRequest) -> Response:
        require_operator(request)
        if log is None:
            raise NotFound("There is no audit log; start the server with --audit-log FILE.")
        return JSONReply(log.status())

    return [Route("/admin/audit", show)]
