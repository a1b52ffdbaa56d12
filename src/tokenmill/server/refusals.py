"""What a head is refused for, before any key is looked at, and how it is said. Pure; connection.py has the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..api.errors import Fault, Style, openai_style
from ..api.json_encoder import encode_json
from .bounds import HttpBounds

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
_REASONS = {
    400: b"Bad Request", 405: b"Method Not Allowed", 408: b"Request Timeout", 414: b"URI Too Long",
    431: b"Request Header Fields Too Large", 501: b"Not Implemented", 503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}  # fmt: skip

Line = tuple[bytes, bytes]
"""Of a head: name in lower case, value."""


class Refusal(NamedTuple):
    status: int
    message: str


def judge_head(version: str, method: bytes, target: bytes, lines: list[Line]) -> bytes | Refusal:
    """The path that is asked for, or what is wrong. A target that names its host (as proxies send it) goes before the
    Host line, which becomes that one."""
    if version not in ("1.0", "1.1"):
        return Refusal(505, "This server speaks HTTP/1.1 and HTTP/1.0.")
    if method == b"CONNECT":
        return Refusal(405, "This server is no proxy.")
    num_hosts = sum(name == b"host" for name, _ in lines)
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        return Refusal(400, "A request needs one Host header.")
    codings = b",".join(value for name, value in lines if name == b"transfer-encoding").lower().split(b",")
    if len(codings) > 1 and codings[-1].strip() == b"chunked":  # where it is not the last, the parser has refused it
        return Refusal(501, "A body may come chunked; this server knows no other transfer coding.")
    absolute = _ABSOLUTE.match(target)
    if absolute is not None:
        target = b"/" + target[absolute.end() :].removeprefix(b"/")
        lines[:] = [line for line in lines if line[0] != b"host"] + [(b"host", absolute[1])]
    elif target == b"*" and method == b"OPTIONS":
        target = b"/*"
    if not target.startswith(b"/") or not target.isascii():
        return Refusal(400, "The target must be a path in ASCII.")
    return target


def too_large(bounds: HttpBounds) -> Refusal:
    return Refusal(
        431, f"The head is larger than {bounds.max_head_bytes} bytes or has more than {bounds.max_head_lines} lines."
    )


def refusal_bytes(refusal: Refusal, usual: Iterable[Line], style: Style = openai_style) -> bytes:
    """The whole response, after which the connection is closed. usual: headers of every response."""
    is_busy = refusal.status == 503
    kind, retry = ("unavailable_error", b"retry-after: 1\r\n") if is_busy else ("invalid_request_error", b"")
    fault = Fault(refusal.status, refusal.message, kind, code=503 if is_busy else None)
    body = encode_json(style(fault))
    line = b"HTTP/1.1 %d %s\r\n" % (refusal.status, _REASONS[refusal.status])
    shared = b"".join(b"%s: %s\r\n" % header for header in usual)
    length = b"content-length: %d\r\n" % len(body)
    fixed = b"content-type: application/json\r\nconnection: close\r\n"
    return line + shared + length + retry + fixed + b"\r\n" + body
