"""A head has one host and a path in ASCII, and asks for no proxying; a refusal is a whole response."""

from __future__ import annotations

import json

import pytest

from tokenmill.server.connection import Refusal, judge_head, refusal_bytes, too_large
from tokenmill.server.connections import HttpBounds

HOST = (b"host", b"a")


@pytest.mark.parametrize(
    ("method", "target", "lines", "path", "left"),
    [
        (b"GET", b"/x?y", [HOST], b"/x?y", [HOST]),
        (b"GET", b"HTTP://b/x", [HOST, (b"k", b"v")], b"/x", [(b"k", b"v"), (b"host", b"b")]),
        (b"GET", b"http://b?q", [HOST], b"/?q", [(b"host", b"b")]),
        (b"OPTIONS", b"*", [HOST], b"/*", [HOST]),
    ],
)
def test_a_head_gives_its_path(method, target, lines, path, left) -> None:
    assert judge_head("1.1", method, target, lines) == path
    assert lines == left


@pytest.mark.parametrize(
    ("version", "method", "target", "lines", "status"),
    [
        ("2.0", b"GET", b"/", [HOST], 505),
        ("1.1", b"CONNECT", b"a:1", [HOST], 405),
        ("1.1", b"GET", b"/", [], 400),
        ("1.0", b"GET", b"/", [HOST, HOST], 400),
        ("1.1", b"GET", b"*", [HOST], 400),
        ("1.1", b"GET", b"x", [HOST], 400),
        ("1.1", b"GET", "/é".encode(), [HOST], 400),
    ],
)
def test_a_wrong_head_is_refused(version, method, target, lines, status) -> None:
    judged = judge_head(version, method, target, lines)
    assert isinstance(judged, Refusal) and judged.status == status


def test_a_refusal_is_a_whole_response() -> None:
    for refusal in (too_large(HttpBounds()), Refusal(503, "Busy.")):
        head, _, body = refusal_bytes(refusal, [(b"server", b"t")]).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0].split()[1] == b"%d" % refusal.status
        assert {b"server: t", b"connection: close", b"content-length: %d" % len(body)} <= set(lines)
        assert (b"retry-after: 1" in lines) == (refusal.status == 503)
        assert json.loads(body)["error"]["message"] == refusal.message
