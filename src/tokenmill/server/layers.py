"""What every call passes on its way to an endpoint, the outermost layer first."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..control.audit.log import AuditLog
from ..control.observe.traces import Tracing
from ..control.signing import Signer
from ..control.tenants.access import Access
from .audit.door import Audited
from .clients import Clients
from .config import ServerConfig
from .http import Gate
from .observe.traced import Traced
from .resume.book import Book
from .resume.layer import Resumable
from .signatures import HEADER as SIGNATURE
from .signatures import Signing
from .visitors import Visitors

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
    book: Book | None,
    keyed: Middleware,
    new_id: Callable[[str], str],
    *,
    audit: AuditLog | None,
    signer: Signer | None,
    tracing: Tracing | None,
) -> list[Middleware]:
    """`keyed` is the innermost. None: there is no such layer."""
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
    if book is not None:
        found.append(Middleware(Resumable, book=book, max_body_bytes=config.max_body_bytes))
    return [*found, keyed]
