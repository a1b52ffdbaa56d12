"""ASGI middleware that puts each call into a span. What monitoring asks for again and again gets none."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...control.observe.call_context import PATH
from ...control.observe.traces import Tracing
from ..http import is_open, route_of


class Traced:
    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(route_of(scope)):
            await self._app(scope, receive, send)
            return
        PATH.set(route_of(scope))

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["state"]["traced_status"] = message["status"]
            await send(message)

        with self._tracing.call(scope):
            await self._app(scope, receive, note)
