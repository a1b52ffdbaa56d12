"""The layer that signs answers (`control/signing.py`), and the path that gives the public key."""

from __future__ import annotations

import hashlib
import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.json_reply import JSONReply
from ..control.signing import COMMENT, Signer, jwk, sign
from ..core.errors import NotFound
from .http import route_of

SIGNATURE = "x-tokenmill-signature"
KEYS_PATH = "/.well-known/jwks.json"


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
