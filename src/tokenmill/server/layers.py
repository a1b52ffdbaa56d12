"""What every call passes on its way to an endpoint, the outermost layer first."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..control.audit.log import AuditLog
from ..control.observe.call_context import PATH
from ..control.observe.traces import Tracing
from ..control.signing import Signer
from ..control.tenants.access import Access
from .audit import Audited
from .callers import Visitors
from .config import ServerConfig
from .connections import Clients
from .http import Gate, is_open, route_of
from .resume.layer import Resumable
from .resume.registry import StreamRegistry
from .signatures import SIGNATURE, Signing


class Traced:
    """ASGI middleware that puts each call into a span. What monitoring asks for again and again gets none."""

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


_EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "idempotent-replayed",
    "x-tokenmill-cache",
    "x-tokenmill-exact",
    "x-tokenmill-ignored",
    "x-tokenmill-shortened",
    SIGNATURE,
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)
"""Headers of answers that scripts of other origins may read."""


def layers(
    config: ServerConfig,
    access: Access,
    streams: StreamRegistry | None,
    idempotency: Middleware,
    new_id: Callable[[str], str],
    *,
    audit: AuditLog | None,
    signer: Signer | None,
    tracing: Tracing | None,
) -> list[Middleware]:
    """`idempotency` is the innermost. None: there is no such layer."""
    found = []
    if tracing is not None:
        found.append(Middleware(Traced, tracing=tracing))
    if audit is not None:
        found.append(Middleware(Audited, log=audit))
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(_EXPOSED),
        )
        found.append(cors)
    visitors = Visitors(config.allowed_hosts, config.cors_origins)
    clients = Clients(config.trusted_proxies)
    found.append(Middleware(Gate, access=access, visitors=visitors, clients=clients, new_id=new_id, mask=config.mask))
    if signer is not None:
        found.append(Middleware(Signing, signer=signer))
    if streams is not None:
        found.append(Middleware(Resumable, streams=streams, max_body_bytes=config.max_body_bytes))
    return [*found, idempotency]
