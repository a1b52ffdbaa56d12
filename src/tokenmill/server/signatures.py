"""Signed answers: a JSON Web Signature (RFC 7515, EdDSA of RFC 8037) of what was asked, what was answered, and by what.

The payload is canonical JSON: sorted names, no spaces. It has the SHA-256 of the request's body and of the response's,
the path, the model and its fingerprint where an engine answered, and the time. A whole answer carries the signature in
the header `x-tokenmill-signature`. A stream of events ends with it in a comment, which clients skip; it is of all bytes
up to there. Answers of other forms (Ollama's lines of JSON, files) are not signed: they have no such place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..control.signing import Signer, Verifier
from ..core.errors import NotFound
from .http import JSONReply, route_of

HEADER = "x-tokenmill-signature"
COMMENT = b": tokenmill-signature "
KEYS_PATH = "/.well-known/jwks.json"


class BadSignature(Exception):
    """Why an answer is not one that was signed."""


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
                named = (HEADER.encode(), self._token().encode())
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


def sign(payload: dict[str, Any], signer: Signer) -> str:
    head = {"alg": "EdDSA", "kid": signer.key_id}
    signed = f"{_encode(_canonical(head))}.{_encode(_canonical(payload))}"
    return f"{signed}.{_encode(signer.sign(signed.encode()))}"


def check(token: str, key: Verifier, request: bytes, response: bytes) -> dict[str, Any]:
    """The payload of a signature that fits both bodies. Raises BadSignature saying what does not fit."""
    try:
        head, payload, signature = (_decode(part) for part in token.split("."))
        told, facts = json.loads(head), json.loads(payload)
        alg, kid = told["alg"], told["kid"]
    except (ValueError, TypeError, KeyError):
        raise BadSignature("The signature has not the form of one.") from None
    if alg != "EdDSA" or kid != key.key_id:
        raise BadSignature(f"It was made with another key ({str(kid)[:40]!r}, not {key.key_id!r}).")
    if not key.holds(signature, token.rpartition(".")[0].encode()):
        raise BadSignature("The signature is not valid.")
    for name, body in (("request", request), ("response", response)):
        if facts.get(f"{name}_sha256") != hashlib.sha256(body).hexdigest():
            raise BadSignature(f"It is of another {name}.")
    found: dict[str, Any] = facts
    return found


def take_comment(response: bytes) -> tuple[bytes, str]:
    """(what was signed, the signature) of a stream that ends with one. Raises BadSignature."""
    signed, found, rest = response.rpartition(COMMENT)
    if not found or (signed and not signed.endswith(b"\n")):
        raise BadSignature("The stream does not end with a signature.")
    return signed, rest.strip().decode("ascii", "replace")


def routes(signer: Signer | None) -> list[Route]:
    """The public key, as a JSON Web Key (RFC 7517, RFC 8037)."""

    async def keys(request: HttpRequest) -> Response:
        if signer is None:
            raise NotFound("Answers are not signed here; start the server with --sign-responses FILE.")
        key = {"kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA", "kid": signer.key_id}
        return JSONReply({"keys": [key | {"x": _encode(signer.public.raw)}]})

    return [Route(KEYS_PATH, keys)]


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
