"""`/openapi.json`, and `/docs`, the same for people: one page without a script, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...api.json_encoder import encode_json
from .document import document as make_document
from .page import STYLE, render

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def routes(root_path: str) -> list[Route]:
    """`root_path`: under which a proxy shows this server."""

    @cache
    def document() -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(make_document(), order="sorted")
        found["info"]["version"] = __version__
        found["servers"] = [{"url": root_path or "/"}]
        return found

    @cache
    def as_json() -> bytes:
        return encode_json(document())

    @cache
    def as_page() -> str:
        return render(document())

    async def show(request: HttpRequest) -> Response:
        return Response(as_json(), media_type="application/json", headers={"x-content-type-options": "nosniff"})

    async def page(request: HttpRequest) -> Response:
        return Response(as_page(), media_type="text/html", headers=HEADERS)

    return [Route("/openapi.json", show), Route("/docs", page)]
