"""Connections that misbehave, on raw sockets: bounds before the key check, pipelining, half-closing, odd requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import wait_until

from scripted import Served, made_connections
from tokenmill.server.connections import HttpBounds

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def completion(*headers: bytes, path: bytes = b"/v1/completions", **body: Any) -> bytes:
    data = json.dumps({"prompt": "x"} | body).encode()
    lines = [b"POST %s HTTP/1.1" % path, b"host: localhost", b"content-length: %d" % len(data), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + data


def rest(raw: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            data += part
    return data


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def refusal(answer: bytes) -> str:
    """The message of a refusal in OpenAI's shape."""
    error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


def ask(served: Served, request: bytes) -> bytes:
    with served.connect() as raw:
        raw.sendall(request)
        return rest(raw)


@pytest.fixture(scope="module", autouse=True, params=["default", "asyncio"])
def event_loop_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the loop that servers have, and on Python's own, which they have where uvloop is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "asyncio":
            patch.setattr(Served, "new_loop", staticmethod(asyncio.new_event_loop))
        yield


@pytest.fixture(scope="module")
def served(event_loop_kind: None) -> Iterator[Served]:
    with Served() as running:
        yield running


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a client does, the server's log stays free of errors."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ---- bounds of bytes ----


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"n" * 100_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: %s\r\n" % (i, b"v" * 2000) for i in range(40)) + b"\r\n", 431),
        (b"GET /" + b"p" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"\r\n" * 50_000, 431),
        (CHUNKED + b"1;" + b"e" * 100_000, 400),
        (CHUNKED + b"0\r\nt: " + b"e" * 100_000, 400),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET http//x HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nname\x00: v\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nname: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n name: folded\r\n\r\n", 400),
        (b"GET / HTTP/3.7\r\nhost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: \xb2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)  # fmt: skip
def test_what_is_no_request_or_too_large_is_refused_in_one_answer(served: Served, request_: bytes, status: int) -> None:
    answer = ask(served, request_)
    assert statuses(answer) == [status] and refusal(answer) and b"connection: close" in answer


def test_small_heads_are_served_while_large_ones_have_emptied_the_pot() -> None:
    bounds = HttpBounds(max_heads_bytes=200_000)
    with Served(http=bounds) as served, contextlib.ExitStack() as stack:
        line = b"a: " + b"v" * 30_000 + b"\r\n"
        for _ in range(3):
            raw = stack.enter_context(served.connect())
            raw.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + line + b"b: ")
        served.wait_until(lambda: metric_refused(served) == 0)
        answer = ask(served, b"GET / HTTP/1.1\r\nhost: x\r\n" + line * 2 + b"\r\n")
        assert statuses(answer) == [503] and b"retry-after: 1" in answer
        assert statuses(ask(served, GET + LAST)) == [200, 200]
        stack.close()
        ask_large = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + line * 2 + b"\r\n"
        deadline = time.monotonic() + 30
        while statuses(ask(served, ask_large)) != [200]:
            assert time.monotonic() < deadline, "what the gone had taken is not given back"


def metric_refused(served: Served) -> float:
    counter = served.client.observers.metrics._refused
    return sum(sample.value for family in counter.collect() for sample in family.samples if "_total" in sample.name)


MEMORY = """
import asyncio, resource, sys
from scripted import Served
served = Served(api_keys=("k",))
async def main():
    asyncio.get_running_loop().create_task(tell())
    await served._main()
async def tell():
    while not served._started.is_set():
        await asyncio.sleep(0.01)
    print(served.address[1], flush=True)
asyncio.run(main())
"""


def test_no_flood_of_heads_without_a_key_takes_or_keeps_memory() -> None:
    """Before: 400 MB of header lines took 383 MiB and kept them."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *map(os.path.abspath, sys.path)])
    command = [sys.executable, "-c", MEMORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            before = memory_bytes(child.pid, "RssAnon")
            with contextlib.ExitStack() as stack:
                for number in range(200):
                    raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                    with contextlib.suppress(ConnectionError):
                        raw.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
                        # some endless, some just within their bounds, some in many short lines
                        line = [b"h: " + b"v" * 2_000_000, b"h: " + b"v" * 60_000, b"h: v\r\n" * 95][number % 3]
                        raw.sendall(line)
                during = memory_bytes(child.pid, "RssAnon")
            assert during - before < 40 << 20, (before, during)
            wait_until(lambda: memory_bytes(child.pid, "RssAnon") - before < 24 << 20, "what was taken is given back")
        finally:
            child.kill()


def memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# ---- bounds of time and places ----


def test_heads_and_bodies_that_do_not_come_are_408_and_idle_connections_close() -> None:
    with Served(http=HttpBounds(head_s=0.4, body_s=0.4, idle_s=0.4, linger_s=0.2)) as served:
        start = time.monotonic()
        assert ask(served, b"") == b""
        assert statuses(ask(served, b"GET / HT")) == [408]
        assert statuses(ask(served, completion()[:-1])) == [408]
        assert statuses(
            ask(served, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n1")
        ) == [408]
        with served.connect() as raw:
            raw.sendall(GET)
            assert statuses(rest(raw)) == [200]
        with served.connect() as raw:
            raw.sendall(GET)
            while not raw.recv(65536).endswith(b"]}"):
                pass
            raw.sendall(b"\r\n")  # which a client may send between requests, and which begins none
            assert rest(raw) == b""
        assert time.monotonic() - start > 1.5
        served.wait_until(lambda: served.client.num_open == 0)


def test_a_head_or_body_that_trickles_is_too_late_all_the_same() -> None:
    with Served(http=HttpBounds(head_s=0.5, body_s=0.5)) as served:
        for request, status in ((b"GET / HTTP/1.1\r\nh: " + b"v" * 100, 408), (completion(pad="p" * 100), 408)):
            head = request.find(b"\r\n\r\n") + 4 if b"POST" in request else 0
            with served.connect() as raw, contextlib.suppress(ConnectionError):
                raw.sendall(request[:head])
                for at in range(head, len(request)):
                    raw.sendall(request[at : at + 1])
                    time.sleep(0.02)
                assert statuses(rest(raw)) == [status]


def test_a_long_answer_is_not_cut_by_any_of_these_times() -> None:
    bounds = HttpBounds(head_s=0.4, idle_s=0.4, body_s=0.4, linger_s=0.4)
    with Served(lambda prompt: "abc" * 40, step_s=0.02, http=bounds) as served, served.connect() as raw:
        raw.sendall(completion(b"connection: close", max_tokens=60))
        assert statuses(rest(raw)) == [200]


def test_at_the_bound_the_longest_waiting_connection_gives_way() -> None:
    with Served(http=HttpBounds(max_connections=8)) as served, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(served.connect()) for _ in range(8)]
        for raw in raws:
            raw.sendall(b"GET /nothing HTTP/1.1\r\nslow: ")
        time.sleep(0.1)
        assert statuses(ask(served, GET + LAST)) == [200, 200]
        assert rest(raws[0]) == b"", "the oldest had to go"
        raws[1].sendall(b"v\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert statuses(rest(raws[1])) == [404], "and no other"


def test_connections_that_are_being_answered_do_not_give_way() -> None:
    bounds = HttpBounds(max_connections=2)
    with Served(lambda prompt: "abc" * 40, step_s=0.02, http=bounds) as served, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(served.connect()) for _ in range(2)]
        for raw in raws:
            raw.sendall(completion(b"connection: close", max_tokens=60))
        served.wait_until(lambda: served.client.num_open == 2)
        answer = rest(stack.enter_context(served.connect()))
        assert statuses(answer) == [503] and "connections" in refusal(answer) and b"retry-after: 1" in answer
        assert [statuses(rest(raw)) for raw in raws] == [[200], [200]]
        assert statuses(ask(served, LAST)) == [200]


def test_a_client_that_does_not_read_its_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_connections(monkeypatch)
    with Served(http=HttpBounds(write_s=0.5), max_body_bytes=64 << 20) as served, served.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tokenizer = served.text.tokenizer
        longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.decode([token], skip_special=False)))
        body = json.dumps({"tokens": [longest] * 100_000}).encode()
        ask = b"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        with contextlib.suppress(OSError):  # more than the kernels' buffers take, of both directions
            raw.sendall(ask * 8)
        served.wait_until(lambda: bool(made))
        served.wait_until(lambda: not any(connection._has_place for connection in made))


# ---- several requests on one connection ----


def test_requests_sent_ahead_are_answered_in_order(served: Served) -> None:
    answer = ask(served, completion() + GET + completion(path=b"/nowhere") + LAST)
    assert statuses(answer) == [200, 200, 404, 200]


def test_a_request_before_garbage_gets_its_answer_and_the_garbage_a_400(served: Served) -> None:
    for garbage in (b"garbage\r\n\r\n", b"GET /" + b"p" * 100_000, b"\x00\xff"):
        answer = ask(served, completion(max_tokens=5) + garbage)
        assert statuses(answer) in ([200, 400], [200, 414]) and refusal(answer)


def test_the_garbage_gets_its_400_also_where_the_client_closes_its_half(served: Served) -> None:
    with served.connect() as raw:
        raw.sendall(completion() + b"no request\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        assert [status for status in statuses(rest(raw)) if status != 100] == [200, 400]


def test_more_requests_ahead_than_are_taken_end_the_connection_in_order(served: Served) -> None:
    answer = ask(served, GET * 100)
    assert statuses(answer) == [200] * 9


def test_what_follows_a_last_request_is_not_served(served: Served) -> None:
    assert statuses(ask(served, LAST + completion())) == [200]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_requests_in_any_pieces(served: Served, size: int) -> None:
    request = completion(b"expect: 100-continue") + GET + LAST
    with served.connect() as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(request), size):
            raw.sendall(request[start : start + size])
        answer = rest(raw)
    assert statuses(answer) in ([100, 200, 200, 200], [200, 200, 200])


def test_chunked_bodies_with_extensions_and_trailers(served: Served) -> None:
    chunks = b'a;x=y\r\n{"prompt":\r\n5\r\n "x"}\r\n0\r\ntrailer: t\r\nother: u\r\n\r\n'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert statuses(ask(served, head + chunks + head + chunks + LAST)) == [200, 200, 200]


def test_a_body_that_is_refused_unread_ends_the_connection_after_the_answer() -> None:
    with Served(max_body_bytes=1000, api_keys=("k",), http=HttpBounds(linger_s=0.5)) as served:
        endless = completion(pad="x" * 3_000_000)
        answer = ask(served, endless[:-1])
        assert statuses(answer) == [401] and refusal(answer)
        with served.connect() as raw:  # a short one is read and dropped
            raw.sendall(completion()[:-3])
            time.sleep(0.1)
            raw.sendall(completion()[-3:] + LAST)
            assert statuses(rest(raw)) == [401, 200]


# ---- other ways to ask ----


def test_http_1_0_ends_each_answer_with_the_connection(served: Served) -> None:
    answer = ask(served, b"GET /version HTTP/1.0\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.1 200") and b'{"version"' in answer and answer.count(b"HTTP/1.1") == 1


def test_expect_continue_is_answered_before_the_body(served: Served) -> None:
    request = completion(b"expect: 100-continue", b"connection: close")
    head = request.index(b"\r\n\r\n") + 4
    with served.connect() as raw:
        raw.sendall(request[:head])
        assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(request[head:])
        assert statuses(rest(raw)) == [200]
    unwanted = completion(b"expect: 100-continue", path=b"/nowhere")
    with served.connect() as raw:
        raw.sendall(unwanted[: unwanted.index(b"\r\n\r\n") + 4])
        assert raw.recv(100).startswith(b"HTTP/1.1 404"), "a body that nobody reads is not asked for"


def test_an_offer_of_another_protocol_is_passed_over(served: Served) -> None:
    """As Java's client makes it with each request, also with a body."""
    offer = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA")
    plain = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"\r\n".join(offer) + b"\r\n\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + b"\r\n".join(offer)
    chunked += b'\r\n\r\nf\r\n{"prompt": "x"}\r\n0\r\n\r\n'
    answer = ask(served, completion(*offer) + plain + chunked + completion(*offer) + LAST)
    assert statuses(answer) == [200] * 5


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://localhost/version?x=y", 200),
        (b"HTTP://localhost:80", 200),
        (b"/version#part", 200),
        (b"/%76ersion", 200),
        (b"/v1/models/toy", 200),
        (b"/v1/models/%ff%fe%00%0d%0a", 404),
        (b"/%", 404),
        (b"/%zz%", 404),
        (b"//version", 404),
        (b"/../version", 404),
        (b"/\xc3\xa9", 404),
        (b"/?" + b"q" * 10_000, 200),
    ],
)  # fmt: skip
def test_odd_targets(served: Served, target: bytes, status: int) -> None:
    answer = ask(served, b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target)
    assert statuses(answer) in ([status], [400]), answer
    assert status == 404 or statuses(answer) == [status]
    assert status == 200 or refusal(answer)


@pytest.mark.parametrize("name", [b"accept", b"authorization", b"content-type", b"x-request-id", b"origin", b"cookie"])
@pytest.mark.parametrize("value", [b"\xff\xfe", b"", b"a" * 5000, b"\xe2\x82\xac", b";;=,=;q=zz", b"[", b"http://[::1"])
def test_odd_header_values_are_no_5xx(served: Served, name: bytes, value: bytes) -> None:
    line = name + b": " + value
    answer = ask(
        served, completion(line) + b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%s\r\n\r\n" % line
    )
    assert len(statuses(answer)) == 2 and max(statuses(answer)) < 500


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=zz",
        "application/openmetrics-text; version=1.0.0; escaping=zz",
        "application/openmetrics-text;version=;q=",
        "text/plain; version=9.9.9.9.9; escaping=allow-utf-8",
        "application/openmetrics-text; version",
        ";,;=",
    ],
)
def test_metrics_answer_any_accept(served: Served, accept: str) -> None:
    request = f"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\naccept: {accept}\r\n\r\n".encode()
    answer = ask(served, request)
    assert statuses(answer) == [200] and b"vllm:num_requests_running" in answer


def test_head_and_options(served: Served) -> None:
    answer = ask(served, b"HEAD /version HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    assert statuses(answer) == [200, 200] and answer.count(b'{"version"') == 1
    answer = ask(
        served,
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\nOPTIONS /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    )
    assert statuses(answer) == [404, 405]


# ---- clients that close their half, and clients that are gone ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_closes_its_half_gets_its_answer(stream: bool, version: bytes) -> None:
    with Served(lambda prompt: "abc" * 10, step_s=0.02) as served, served.connect() as raw:
        request = completion(max_tokens=25, stream=stream).replace(b"HTTP/1.1", b"HTTP/" + version)
        raw.sendall(request)
        raw.shutdown(socket.SHUT_WR)
        answer = rest(raw)
        assert statuses(answer)[-1] == 200
        text = answer.decode().partition("HTTP/1.1 200")[2]
        events = [line for line in text.splitlines() if line.startswith("data: {")]
        bodies = [json.loads(line[6:]) for line in events] or [json.loads(text.rpartition("\r\n\r\n")[2])]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "abcabcabcabcabcabcabcabca"
        assert served.client.observers.metrics._disconnects._value.get() == 0


def test_requests_sent_ahead_of_a_half_close_are_all_answered(served: Served) -> None:
    with served.connect() as raw:
        raw.sendall(completion() + GET)
        raw.shutdown(socket.SHUT_WR)
        assert [status for status in statuses(rest(raw)) if status != 100] == [200, 200]


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_cancelled_long_before_its_end(stream: bool, reset: bool) -> None:
    with Served(lambda prompt: "abc" * 100, step_s=0.05) as served:
        with served.connect() as raw:
            if reset:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            raw.sendall(completion(max_tokens=300, stream=stream))
            served.wait_until(lambda: served.client.stats.num_running == 1)
            start = served.client.stats.num_steps
        served.wait_until(lambda: served.client.num_open == 0)
        assert served.call(lambda: served.client.stats.num_steps) - start < 150
        served.wait_until(lambda: served.client.observers.metrics._disconnects._value.get() == 1)


def test_a_client_that_half_closes_and_then_goes_is_cancelled_too() -> None:
    with Served(lambda prompt: "abc" * 100, step_s=0.05) as served:
        with served.connect() as raw:
            raw.sendall(completion(max_tokens=300))
            raw.shutdown(socket.SHUT_WR)
            served.wait_until(lambda: served.client.stats.num_running == 1)
            start = served.client.stats.num_steps
            served.wait_until(lambda: served.client.stats.num_steps >= start + 6)
            assert served.client.num_open == 1
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        served.wait_until(lambda: served.client.num_open == 0)
        assert served.call(lambda: served.client.stats.num_steps) < 200


def test_a_request_cut_off_in_its_body_never_runs(served: Served) -> None:
    before = served.call(lambda: served.client.stats.num_steps)
    with served.connect() as raw:
        raw.sendall(completion()[:-1])
        raw.shutdown(socket.SHUT_WR)
        assert rest(raw) == b""
    assert served.call(lambda: (served.client.num_open, served.client.stats.num_steps)) == (0, before)
