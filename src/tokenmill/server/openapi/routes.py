"""`/openapi.json`, and `/docs`, the same for people: one page without a script, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ...api.json_encoder import encode_json
from .document import document as make_document

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
details { border-top: 1px solid #8884; padding: .4rem 0; }
summary { cursor: pointer; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; border-top: 1px solid #8882; }
.method { display: inline-block; min-width: 4.5rem; font-weight: bold; }
"""


def render(document: Mapping[str, Any]) -> str:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'<p>{escape(document["info"]["summary"])} The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(document, method, path, operation)
    return "".join([*parts, "</body></html>"])


def _operation(document: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(operation["summary"])
    yield f'<details><summary><code><span class="method">{method.upper()}</span>{escape(path)}</code></summary>'
    yield f"<p>{summary}{'' if operation.get('security', True) else ' Needs no key.'}</p>"
    rows = [
        (parameter["name"], parameter["in"], parameter["schema"], "", parameter.get("required", False))
        for parameter in operation.get("parameters", ())
    ]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body: <code>{escape(kind)}</code></p>"
        name = content["schema"]["$ref"].rpartition("/")[2]
        rows += _fields(document["components"]["schemas"][name])
    if rows:
        yield "<table><tr><th>field</th><th>kind</th><th>meaning</th></tr>"
        for field, place, schema, meaning, is_required in rows:
            kind = f"{place} {_kind(schema)}".strip() + (", required" if is_required else "")
            yield f"<tr><td><code>{escape(field)}</code></td><td>{escape(kind)}</td><td>{escape(meaning)}</td></tr>"
        yield "</table>"
    answers = ", ".join(
        f"{status} <code>{escape(' '.join(response.get('content', {})))}</code>"
        for status, response in operation["responses"].items()
        if "$ref" not in response
    )
    yield f"<p>Answers: {answers}</p></details>"


def _fields(schema: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str, Mapping[str, Any], str, bool]]:
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        yield where + name, "", each, each.get("description", ""), name in required
        yield from _fields(each, f"{where}{name}.")


def _kind(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each != {"type": "null"})
    given = schema.get("type", "")
    kind = given if isinstance(given, str) else " or ".join(each for each in given if each != "null")
    if kind == "array" and schema.get("items", {}).get("type"):
        kind = f"array of {_kind(schema['items'])}s"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    if low is not None:
        above = "above " if "exclusiveMinimum" in schema else ""
        kind += f", {above}{low} to {schema['maximum']}"
    return kind


# `nosniff` is on every answer of the server (run.py).
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
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
        return Response(as_json(), media_type="application/json")

    async def page(request: HttpRequest) -> Response:
        return Response(as_page(), media_type="text/html", headers=HEADERS)

    return [Route("/openapi.json", show), Route("/docs", page)]
