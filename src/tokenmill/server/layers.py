"""What every call passes on its way to an endpoint, the outermost layer first; the layers that trace calls, compress
answers and sign them (`control/signing.py`), and the path that gives the public key."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.json_reply import JSONReply
from ..control.audit.log import AuditLog
from ..control.observe.call_context import PATH
from ..control.observe.traces import Tracing
from ..control.signing import COMMENT, Signer, jwk, sign
from ..control.tenants.access import Access
from ..core.errors import NotFound
from .audit import Audited
from .callers import Visitors
from .config import ServerConfig
from .connections import Clients
from .http import Gate, is_open, route_of
from .resume.layer import Resumable
from .resume.registry import StreamRegistry

SIGNATURE = "x-tokenmill-signature"
KEYS_PATH = "/.well-known/jwks.json"


_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_LEAST_BYTES = 1024
_LEVEL = 1
"""gzip's fastest: what compresses here computes nothing for others."""


class Compressed:
    """ASGI middleware, outside of signatures, which are of what was said: sends answers by gzip, or with the extra
    `zstd` by Zstandard, to whoever takes it. Streams stay as they are, for each event to be read as it comes; their
    bytes go past this layer as past others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gzip: ASGIApp = GZipMiddleware(self._inside, _LEAST_BYTES, _LEVEL)
        self._zstd = _zstd(self._inside)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["state"]["uncompressed"] = send
        chosen = self._gzip
        if self._zstd is not None and takes(scope, "zstd"):
            chosen = self._zstd
        elif not takes(scope, "gzip"):  # the layer below looks for its name alone
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        await chosen(scope, receive, send)

    async def _inside(self, scope: Scope, receive: Receive, compress: Send) -> None:
        state = scope["state"]
        send = state.pop("uncompressed")
        direct, is_stream = state.get("send", send), False

        async def tell(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                is_stream = any(kind.startswith(_STREAMS) for kind in kinds)
            await (send if is_stream else compress)(message)

        async def tell_directly(message: Message) -> None:
            await (direct if is_stream else compress)(message)

        state["send"] = tell_directly
        try:
            await self._app(scope, receive, tell)
        finally:
            state["send"] = direct


def takes(scope: Scope, coding: str) -> bool:
    """Whether a client names a coding, and not with the quality 0 (RFC 9110, 12.5.3)."""
    for each in ",".join(Headers(scope=scope).getlist("accept-encoding")).lower().split(","):
        name, _, quality = each.partition(";")
        if name.strip() == coding:
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


def _zstd(app: ASGIApp) -> ASGIApp | None:
    try:
        from starlette_compress import CompressMiddleware
    except ImportError:
        return None
    made: ASGIApp = CompressMiddleware(app, minimum_size=_LEAST_BYTES, zstd_level=_LEVEL, brotli=False, gzip=False)
    return made


class Signing:
    """ASGI middleware, inside of the gate: signs every answer with status 200 to a POST."""

    def __init__(self, app: ASGIApp, *, signer: Signer) -> None:
        self._app = app
        self._signer = signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        direct = state.get("send", send)
        signed = _Signed(self._signer, scope)
        request = signed.request

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                request.update(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            for each in signed.take(message):
                await send(each)

        async def tell_directly(message: Message) -> None:
            for each in signed.take(message):
                await direct(each)

        state["send"] = tell_directly
        try:
            await self._app(scope, hear, tell)
        finally:
            state["send"] = direct


class _Signed:
    """One answer on its way. `take` gives what is to be sent for a message."""

    def __init__(self, signer: Signer, scope: Scope) -> None:
        self.request = hashlib.sha256()
        self._response = hashlib.sha256()
        self._signer = signer
        self._scope = scope
        self._start: Message | None = None  # held until the body is there
        self._is_stream = False

    def take(self, message: Message) -> tuple[Message, ...]:
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = message["status"] == 200 and any(kind.startswith(b"text/event-stream") for kind in kinds)
            is_whole = message["status"] == 200 and not self._is_stream
            if is_whole:
                self._start = message
                return ()
            return (message,)
        if message["type"] != "http.response.body":
            return (message,)
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._start is not None:
            start, self._start = self._start, None
            if is_last:  # a body in parts has no length known before: it is of another form
                self._response.update(body)
                named = (SIGNATURE.encode(), self._token().encode())
                start = {**start, "headers": [*start["headers"], named]}
            return (start, message)
        if not self._is_stream:
            return (message,)
        self._response.update(body)
        if is_last:
            comment = COMMENT + self._token().encode() + b"\n\n"
            return ({**message, "body": body + comment},)
        return (message,)

    def _token(self) -> str:
        model, fingerprint = self._scope["state"].get("answered_by", (None, None))
        payload = {
            "v": 1,
            "created": int(time.time()),
            "path": route_of(self._scope),
            "model": model,
            "fingerprint": fingerprint,
            "request_sha256": self.request.hexdigest(),
            "response_sha256": self._response.hexdigest(),
        }
        return sign(payload, self._signer)


def signature_routes(signer: Signer | None) -> list[Route]:
    """The public key."""

    async def keys(request: HttpRequest) -> Response:
        if signer is None:
            raise NotFound("Answers are not signed here; start the server with --sign-responses FILE.")
        return JSONReply({"keys": [jwk(signer)]})

    return [Route(KEYS_PATH, keys)]


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
    found.append(Middleware(Compressed))
    if signer is not None:
        found.append(Middleware(Signing, signer=signer))
    if streams is not None:
        found.append(Middleware(Resumable, streams=streams, max_body_bytes=config.max_body_bytes))
    return [*found, idempotency]
