"""What no client of good will sends: each gets a 4xx or no answer, never a 5xx, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import socket
import struct
from collections.abc import Iterator

import pytest

from scripted import Served
from tokenmill.api.fields import MAX_DEPTH

STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)
DEEP = 100_000
BODY_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize", "/api/chat", "/api/generate", "/api/embed",
    "/api/show", "/completion", "/infill", "/embedding", "/apply-template", "/inference/v1/generate", "/generate",
    "/v1/load_lora_adapter", "/v1/batches", "/admin/tenants", "/admin/keys",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(files_dir=str(tmp_path_factory.mktemp("files"))) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_left(served: Served) -> Iterator[None]:
    """After each pattern the server has no request, connection or task more, and answers."""
    yield
    served.wait_until(lambda: served.client.num_open == 0)
    served.wait_until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "disconnect-watch"])
    assert served.ask("/v1/completions", {"prompt": "hi"})[0] == 200


def say(served: Served, data: bytes, *, half: bool = True) -> list[int]:
    """The statuses of all that comes back until the server closes."""
    with served.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            if half:
                connection.shutdown(socket.SHUT_WR)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                answer += part
    return [int(found) for found in STATUS.findall(bytes(answer)) if found != b"100"]


def post(body: bytes, *lines: bytes, path: str = "/v1/completions") -> bytes:
    head = [b"POST " + path.encode() + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *lines]
    return b"\r\n".join([*head, b"", body])


def sized(body: bytes, *lines: bytes, path: str = "/v1/completions") -> bytes:
    return post(body, b"Content-Length: %d" % len(body), *lines, path=path)


HI = b'{"prompt": "hi"}'
SMUGGLED = b"0\r\n\r\nGET /admin/keys HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        post(SMUGGLED, b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        post(SMUGGLED, b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        post(SMUGGLED, b"Transfer-Encoding: xchunked"),
        post(SMUGGLED, b"Transfer-Encoding: chunked, identity"),
        post(SMUGGLED, b"Transfer-Encoding : chunked"),
        post(SMUGGLED, b"Transfer-Encoding: chunked", b"Transfer-Encoding: x"),
        post(HI, b"Content-Length: 16", b"Content-Length: 17"),
        post(HI, b"Content-Length: +16"),
        post(HI, b"Content-Length: 0x10"),
        post(HI, b"Content-Length: 16, 16"),
        post(HI, b"Content-Length: -1"),
        post(HI, b"Content-Length: 99999999999999999999999"),
        post(b"zz\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
        post(b"-5\r\nabc\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
        post(b"ffffffffffffffffff\r\nabc", b"Transfer-Encoding: chunked"),
        post(b"3\r\nabcdef\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
        post(b"5;" + b"x" * 200_000 + b"\r\nabcde\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"),
    ],
)
def test_no_body_is_read_in_two_ways(served: Served, data: bytes) -> None:
    """TE and CL together, twice or disguised, and bad chunks: at most one answer, and never the smuggled request's."""
    found = say(served, data)
    assert len(found) <= 1 and all(400 <= status < 500 for status in found), found


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n folded: line\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nna me: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nname\x00: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nname: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nname: a\nb: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /console/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/files/..%2f..%2fetc%2fpasswd/content HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/batches?limit=99999999999999999999&after=%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"\x00" * 10_000,
        b"\xff" * 10_000,
        b"GET",
    ],
)
def test_odd_heads_are_refused(served: Served, data: bytes) -> None:
    found = say(served, data)
    assert len(found) <= 1 and all(400 <= status < 500 for status in found), found


@pytest.mark.parametrize("path", BODY_PATHS)
def test_odd_bodies_are_refused(served: Served, path: str) -> None:
    """Deep, huge, broken or not text: on every path that reads a body, by its length or in chunks."""
    bodies = [
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'{"model":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"temperature": 1e999, "prompt": "a"}',
        b'{"seed": -1e400}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800", "\\ud800": 1}',
        b'{"prompt"' + b"\x00" * 100 + b': "a"}',
        b'{"messages": ' + b'[{"role": "user", "content": ' * 400 + b'"x"' + b"}]" * 400 + b"}",
        b"",
        b"\x00",
        b"\xef\xbb\xbf{}",
        b"null",
        b'"' + b"a" * 100_000,
    ]
    for body in bodies:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        for data in (sized(body, path=path), post(chunks, b"Transfer-Encoding: chunked", path=path)):
            (status,) = say(served, data)
            assert 400 <= status < 500, (path, body[:40], status)


@pytest.mark.parametrize("level", [b'{"a":%b}', b"[%b]", b'{"type":"object","properties":{"a":%b}}'])
def test_variables_of_templates_may_be_as_deep_as_a_body(served: Served, level: bytes) -> None:
    """What a template gets is walked through on the way: at the bound it is rendered, beyond it is a 400."""
    num_levels = level.count(b"{") + level.count(b"[")
    for depth, statuses in ((MAX_DEPTH - 4, {200}), (MAX_DEPTH, {400}), (900, {400})):
        value = b"1"
        for _ in range(depth // num_levels):
            value = level.replace(b"%b", value)
        body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"v": %b}}' % value
        assert set(say(served, sized(body, path="/v1/chat/completions"))) == statuses, depth


def test_odd_uploads_are_refused(served: Served) -> None:
    """Parts without end, with huge heads, of other forms."""
    start = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    bodies = [
        start,
        b"--b\r\n" * 10_000,
        b"--b\r\n" + b"a: b\r\n" * 10_000 + b"\r\n\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data; name=" + b"x" * 100_000 + b"\r\n\r\n\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data; name=\xff\x00\r\n\r\n1\r\n--b--\r\n",
        start + b"{}\r\n--b--\r\n",
        b"\x00" * 1000,
    ]
    for body in bodies:
        for kind in (
            b"multipart/form-data; boundary=b",
            b"multipart/form-data",
            b"multipart/mixed; boundary=" + b"b" * 999,
        ):
            data = sized(body, path="/v1/files").replace(b"application/json", kind)
            (status,) = say(served, data)
            assert 400 <= status < 500, (body[:40], kind[:40], status)


@pytest.mark.parametrize("key", ["é" * 100, "\x7f", "a b", "Ⅷ", "x" * 10_000, "' OR 1=1 --", "%00", "\xa0"])
def test_odd_keys_are_no_keys(key: str) -> None:
    with Served(api_keys=("secret",)) as served:
        for name in (b"Authorization: Bearer ", b"x-api-key: ", b"Authorization: "):
            data = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + name + key.encode() + b"\r\n\r\n"
            (status,) = say(served, data)
            assert status in (400, 401)


def test_a_flood_of_requests_ahead_is_bounded(served: Served) -> None:
    """A thousand on one connection: some are answered, in order, and the connection ends."""
    found = say(served, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, half=False)
    assert 0 < len(found) <= 1000 and set(found) == {200}


def test_streams_that_nobody_reads_and_resets_leave_nothing(served: Served) -> None:
    """A hundred clients ask for a stream; a third hang up, a third reset, a third read it slowly."""
    body = json.dumps({"prompt": "hi", "stream": True, "n": 4}).encode()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(99)]
        for connection in connections:
            connection.sendall(sized(body))
        for index, connection in enumerate(connections):
            if index % 3 == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif index % 3 == 1:
                read = b""
                while b"data: [DONE]" not in read:
                    read = read[-16:] + connection.recv(64)
            connection.close()
    served.wait_until(lambda: served.client.num_open == 0)
    served.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_halves_of_requests_that_stay_open_hold_nobody_up(served: Served) -> None:
    """Heads and bodies that stop in the middle, while others are served."""
    halves = [b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le", sized(HI)[:-3], b"\x16\x03\x01"]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(80)]
        for index, connection in enumerate(connections):
            connection.sendall(halves[index % len(halves)])
        assert served.ask("/v1/completions", {"prompt": "hi"})[0] == 200
