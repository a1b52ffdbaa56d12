"""Upstreams: calls go through and back whole, what they cannot complete is told as that, and nothing leaks or hangs."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from hostile_upstream import DONE, FINISH, Hostile, chunks, delta, reply
from links import run
from ports import free_port
from scripted import Served
from tokenmill.api.sandbox import HEAVY_BYTES
from tokenmill.cli.upstream_options import UpstreamOptions
from tokenmill.control.tenants.access import Access
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core.errors import ConfigError
from tokenmill.net.system import MonotonicClock
from tokenmill.server.models import named_in
from tokenmill.server.upstream.connection import BadReply, UpstreamAddress
from tokenmill.server.upstream.proxy import MAX_REPLY_BYTES
from tokenmill.server.upstream.tally import MAX_EVENT_BYTES, Events, Tally
from tokenmill.server.upstream.upstream import FIRST_DELAY_S, LONGEST_DELAY_S, MOST_FAILURES, Health, Upstream

CHAT = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
WHOLE = json.dumps(
    {
        "choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
).encode()


def fronting(*urls: str, timeout_s: float = 5.0, key: str = "", **given: Any) -> Served:
    upstreams = [
        Upstream("far", UpstreamAddress.of(url), MonotonicClock(), key=key, timeout_s=timeout_s) for url in urls
    ]
    return Served(upstreams=upstreams, **given)


def patience_s(why: str) -> float:
    """Short where silence is the fault, and never the fault elsewhere."""
    return 0.5 if "silent" in why else 20.0


def streamed(front: Served, **more: Any) -> tuple[int, str]:
    status, text, _ = front.ask("/v1/chat/completions", CHAT | {"stream": True} | more)
    return status, text


def samples(front: Served, name: str) -> dict[str, float]:
    """By labels."""
    lines = front.ask("/metrics")[1].splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith(name + "{"))
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in found}


@pytest.fixture
def accounting(tmp_path: Path) -> Iterator[Accounting]:
    accounting = Accounting(tmp_path / "usage")
    accounting.open()
    yield accounting
    accounting.close()


def test_another_server_behind_this_one_answers_by_every_path(accounting: Accounting) -> None:
    """OpenAI's client sees the upstream's answers, streamed and whole, and the model among the models."""
    with (
        Served(lambda prompt: "from afar", model_names=("far",), allowed_hosts=("127.0.0.1",)) as far,
        fronting(far.url + "/v1", accounting=accounting) as front,
    ):
        client = openai.OpenAI(base_url=front.url + "/v1", api_key="mine", max_retries=0)
        assert [model.id for model in client.models.list()] == ["toy", "far"]
        assert client.models.retrieve("far").owned_by == "upstream"
        messages: Any = CHAT["messages"]
        whole = client.chat.completions.create(model="far", messages=messages)
        assert whole.choices[0].message.content == "from afar" and whole.model == "far"
        parts = list(client.chat.completions.create(model="far", messages=messages, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "from afar"
        assert all(part.usage is None for part in parts), "the count of tokens was not asked for"
        parts = list(
            client.chat.completions.create(
                model="far", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        )
        assert parts[-1].usage is not None and whole.usage is not None
        assert parts[-1].usage.total_tokens == whole.usage.total_tokens
        assert client.completions.create(model="far", prompt="a").choices[0].text == "from afar"
        assert client.responses.create(model="far", input="a", store=False).output_text == "from afar"
        events = list(client.responses.create(model="far", input="a", store=False, stream=True))
        assert events[-1].type == "response.completed"
        own = client.chat.completions.create(model="toy", messages=messages)
        assert own.choices[0].message.content == "hello world"
        reply = client.chat.completions.with_raw_response.create(model="far", messages=messages)
        assert reply.headers["x-tokenmill-exact"] == "false"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="far", messages=messages, temperature=-1)
        status, text, _ = front.ask("/api/chat", {"model": "far", "messages": messages})
        assert status == 404 and "served by another server" in text
        status, text, _ = front.ask("/v1/chat/completions", {**CHAT, "model": "none"})
        assert status == 404 and "toy, far" in text
        tokens = samples(front, "tokenmill:upstream_tokens_total")
        assert all('source="told"' in labels for labels in tokens)
        calls = sum(samples(front, "tokenmill:upstream_calls_total").values())
        assert calls == 8 and list(samples(front, "tokenmill:upstream_up").values()) == [1.0]
        num_output = sum(value for labels, value in tokens.items() if 'kind="output"' in labels)
        page = json.loads(front.ask("/admin/usage?group_by=model")[1])
        sums = {row["model"]: row for bucket in page["data"] for row in bucket["results"]}
        assert (sums["far"]["num_model_requests"], sums["far"]["output_tokens"]) == (7, num_output)


def test_nothing_of_the_client_but_its_body_reaches_an_upstream() -> None:
    """No Authorization, cookie or header of the tenant's; the operator's key, and the upstream's own name of the
    model."""
    with Hostile(reply(WHOLE, more="Set-Cookie: a=b\r\nX-Theirs: 1\r\n")) as far, fronting(far.url, key="K") as front:
        wait_for_models(front)
        secrets = {"authorization": "Bearer mine", "x-api-key": "mine", "cookie": "c=mine", "x-mine": "mine"}
        call = openai.OpenAI(base_url=front.url + "/v1", api_key="mine").chat.completions.with_raw_response
        answer = call.create(model="far", messages=CHAT["messages"], extra_headers=secrets)  # type: ignore[arg-type]
        assert answer.status_code == 200
        head, _, body = far.calls[0].partition(b"\r\n\r\n")
        assert b"mine" not in far.calls[0] and b"authorization: Bearer K" in head
        assert json.loads(body) == CHAT | {"model": "theirs"}
        assert not {"set-cookie", "x-theirs"} & set(answer.headers)


def wait_for_models(front: Served) -> None:
    upstream = front.upstreams[0]
    deadline = time.monotonic() + 30
    while not upstream.model_ids:
        assert time.monotonic() < deadline
        time.sleep(0.01)


REFUSED: dict[str, tuple[Hostile, str]] = {
    "redirect": (
        Hostile(reply(b"", status="302 Found", more="Location: http://127.0.0.1:1/\r\n")),
        "redirects are not",
    ),
    "key": (Hostile(reply(b"{}", status="401 No")), "--upstream-api-key-file"),
    "endless head": (Hostile(b"HTTP/1.1 200 OK\r\nX: ", endless=b"x" * 8192), "head of its answer does not end"),
    "endless interim": (Hostile(endless=b"HTTP/1.1 100 Continue\r\n\r\n"), "does not end"),
    "hang": (Hostile(then="hang"), "silent for 0.5 s"),
    "half a head": (Hostile(b"HTTP/1.1 200", then="hang"), "silent for 0.5 s"),
    "no HTTP": (Hostile(b"SSH-2.0-x\r\n"), "does not speak HTTP/1.1"),
    "upgrade": (Hostile(b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), "changed the protocol"),
    "nothing": (Hostile(), "closed the connection without an answer"),
    "no JSON": (Hostile(reply(b"<html>", kind="application/json")), "no JSON"),
    "an array": (Hostile(reply(b"[1]")), "no JSON object"),
    "deep": (Hostile(reply(b"[" * 100_000)), "no JSON"),
    "short": (Hostile(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"), "before its answer was complete"),
    "length": (Hostile(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{}"), "does not speak"),
    "endless extension": (
        Hostile(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", endless=b"x" * 8192),
        "goes on without a body",
    ),
    "no reason": (Hostile(reply(b"<html>", kind="text/html", status="404 No")), "without a reason"),
    "204": (Hostile(b"HTTP/1.1 204 No\r\n\r\n"), "it answered 204"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_upstream_is_an_honest_error(name: str) -> None:
    """Whatever it answers instead of an answer is 502 with the reason, soon, and the front end goes on."""
    far, why = REFUSED[name]
    with far, fronting(far.url, timeout_s=patience_s(why)) as front:
        begun_s = time.monotonic()
        status, text, _ = front.ask("/v1/chat/completions", CHAT)
        assert (status, json.loads(text)["error"]["type"]) == (502, "upstream_error") and why in text
        assert time.monotonic() - begun_s < 15
        assert front.ask("/v1/chat/completions", CHAT | {"model": "toy"})[0] == 200


def test_a_body_without_an_end_is_cut_off() -> None:
    """Not more than a bound is ever held of it."""
    far = Hostile(b"HTTP/1.1 200 OK\r\n\r\n{", endless=b" " * 65536)
    with far, fronting(far.url) as front:
        status, text, _ = front.ask("/v1/chat/completions", CHAT)
        assert status == 502 and f"larger than {MAX_REPLY_BYTES >> 20} MiB" in text


def test_answers_that_are_still_read_count_as_held() -> None:
    """Together they are bounded as bodies are, not each alone."""
    far = Hostile(b"HTTP/1.1 200 OK\r\n\r\n{", endless=b" " * 65536)
    with far, fronting(far.url, max_buffered_bytes=1 << 20) as front:
        status, text, _ = front.ask("/v1/chat/completions", CHAT)
        assert status == 429 and "held for other requests" in text
        assert front.ask("/v1/chat/completions", CHAT | {"model": "toy"})[0] == 200


BEGUN, END = chunks(delta("a"), ends=False), b"0\r\n\r\n"
STREAMS: dict[str, tuple[Hostile, str]] = {
    "reset": (Hostile(BEGUN, then="reset", waits=True), "the connection broke"),
    "closed": (Hostile(BEGUN, waits=True), "before its answer was complete"),
    "hang": (Hostile(BEGUN, then="hang", waits=True), "silent for 0.5 s"),
    "no end": (Hostile(BEGUN, END, waits=True), "ended before the answer was complete"),
    "half an event": (Hostile(BEGUN, b"7\r\ndata: {\r\n" + END, waits=True), "ended before the answer was complete"),
    "no JSON": (Hostile(BEGUN, b"E\r\ndata: <html>\n\n\r\n", waits=True), "no JSON"),
    "endless line": (
        Hostile(BEGUN, endless=b"10000\r\n" + b"x" * 65536 + b"\r\n", waits=True),
        f"larger than {MAX_EVENT_BYTES >> 20} MiB",
    ),
    "bad chunk": (Hostile(BEGUN, b"zzz\r\n", waits=True), "does not speak HTTP/1.1"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_cut_never_looks_complete(name: str) -> None:
    """What came is there; then an error, and no end. Nothing is sent again to another upstream."""
    far, why = STREAMS[name]
    with (
        far,
        Hostile(chunks(delta("b"), FINISH, DONE)) as other,
        fronting(far.url, other.url, timeout_s=patience_s(why)) as front,
    ):
        body = json.dumps(CHAT | {"stream": True}).encode()
        call = urllib.request.Request(front.url + "/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(call, timeout=20) as answer:
            first = json.loads(answer.readline()[6:])
            far.go.set()
            text = answer.read().decode()
        assert first["choices"][0]["delta"]["content"] == "a"
        error = json.loads(text.strip().removeprefix("data: "))["error"]
        assert error["type"] == "upstream_error" and why in error["message"] and not other.calls
        assert any('outcome="cut"' in labels for labels in samples(front, "tokenmill:upstream_calls_total"))


@pytest.mark.parametrize(
    "far",
    [
        Hostile(reply(b'{"error": {"message": "full"}}', status="503 No")),
        Hostile(),
        Hostile(chunks(ends=False), then="reset"),
        Hostile(chunks(b"data: {", ends=False)),
        Hostile(reply(WHOLE)),
        Hostile(chunks(b"data: <html>\n\n")),
    ],
    ids=["503", "closed", "reset", "half an event", "no stream", "no JSON"],
)
def test_what_fails_before_the_first_byte_is_asked_of_another_upstream(far: Hostile) -> None:
    """The client sees one whole answer, and the metrics both tries."""
    with far, Hostile(chunks(delta("b"), FINISH, DONE)) as other, fronting(far.url, other.url) as front:
        status, text = streamed(front)
        assert status == 200 and text == (delta("b") + FINISH + DONE).decode()
        assert len(far.calls) == len(other.calls) == 1
        assert list(samples(front, "tokenmill:upstream_tries_total").values()) == [2.0]


def test_what_one_upstream_began_completes_nothing_of_another() -> None:
    """An end that was told by one that failed is no end of what the next one sends, and its tokens do not count."""
    with (
        Hostile(chunks(delta("a") + FINISH + b"data: <html>\n\n")) as far,
        Hostile(chunks(delta("b"))) as other,
        fronting(far.url, other.url) as front,
    ):
        status, text = streamed(front)
        assert status == 200 and len(far.calls) == len(other.calls) == 1
        assert text.startswith(delta("b").decode()) and "ended before the answer was complete" in text
        counted = samples(front, "tokenmill:upstream_tokens_total")
        assert [value for labels, value in counted.items() if 'kind="output"' in labels] == [1.0]


def test_a_client_that_leaves_is_counted_as_gone() -> None:
    """Also where its answer had begun; what it had is charged."""
    with Hostile(chunks(delta("a"), ends=False), then="hang") as far, fronting(far.url) as front:
        body = json.dumps(CHAT | {"stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])), timeout=20) as client:
            client.sendall(head + body)
            said = b""
            while b"data: " not in said:
                said += client.recv(4096)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        deadline = time.monotonic() + 30
        while not (calls := samples(front, "tokenmill:upstream_calls_total")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ['outcome="gone"' in labels for labels in calls] == [True], calls
        assert samples(front, "tokenmill:upstream_tokens_total")


@pytest.mark.parametrize("how", ["reset", "408"])
def test_a_kept_connection_that_was_ended_costs_no_call(how: str) -> None:
    """Its end may be a reset, or 408 as some servers say: the call goes by a new one, and the upstream stays up."""

    async def main() -> None:
        num_calls, has_read = 0, asyncio.Event()
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_calls
            writers.append(writer)
            await reader.readuntil(b"\r\n\r\n")
            num_calls += 1
            writer.write(reply(WHOLE))
            await writer.drain()
            if num_calls > 1:
                return
            if how == "408":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(reply(b"", status="408 Request Timeout"))
            else:
                await has_read.wait()
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream("far", UpstreamAddress.of(f"http://127.0.0.1:{port}"), MonotonicClock())
        for _ in range(2):
            connection = await upstream.ask("POST", "/", {}, b"")
            assert connection.status == 200
            assert b"".join([piece async for piece in connection.body(5)]) == WHOLE
            assert connection.is_reusable
            upstream.give_back(connection)
            has_read.set()
            while how == "reset" and num_calls == 1 and connection.is_reusable:
                await asyncio.sleep(0.005)
        assert num_calls == 2 and upstream.health.is_up
        await upstream.close()
        for writer in writers:
            writer.close()
        server.close()

    run(main())


def test_a_dead_upstream_is_left_alone_and_asked_again_when_it_is_back() -> None:
    """Calls go to the other one; with none, 503 says when to come again."""
    port = free_port()
    with Hostile(reply(WHOLE)) as other, fronting(f"http://127.0.0.1:{port}", other.url) as front:
        for _ in range(3):
            assert front.ask("/v1/chat/completions", CHAT)[0] == 200
        assert samples(front, "tokenmill:upstream_up") == {
            f'model_name="far",upstream="http://127.0.0.1:{port}"': 0.0,
            f'model_name="far",upstream="{other.url.removesuffix("/v1")}"': 1.0,
        }
    with fronting(f"http://127.0.0.1:{port}") as front:
        front.ask("/v1/chat/completions", CHAT)
        status, text, _ = front.ask("/v1/chat/completions", CHAT)
        assert status == 503 and "No server of far can be reached" in text
        with Served(model_names=("far",), allowed_hosts=("127.0.0.1",)) as far:
            upstream = front.upstreams[0]
            upstream.address = UpstreamAddress.of(far.url)
            deadline = time.monotonic() + 30
            while not upstream.health.is_up:
                assert time.monotonic() < deadline, upstream.health.why
                time.sleep(0.02)
            assert front.ask("/v1/chat/completions", CHAT)[0] == 200


def test_counts_that_an_upstream_does_not_tell_or_tells_wrongly_are_counted() -> None:
    """Negative, huge and mistyped numbers are not believed."""
    for usage in (
        b"",
        b', "usage": {"prompt_tokens": -1, "completion_tokens": 5}',
        b', "usage": {"prompt_tokens": "x"}',
    ):
        tally = Tally(400)
        assert not tally.note_event(b'data: {"choices": [{"delta": {"content": "a"}}]' + usage + b"}\n\n")
        assert not tally.note_event(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
        assert not tally.is_told and (tally.num_prompt, tally.num_output) == (100, 1), usage
    tally = Tally(400)
    assert tally.note_event(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n')
    assert tally.is_told and (tally.num_prompt, tally.num_output) == (9, 2)
    tally = Tally(400)
    tally.note_whole(b'{"usage": {"prompt_tokens": 8, "total_tokens": 8}}')
    assert (tally.num_prompt, tally.num_output, tally.is_told) == (8, 0, True)


def test_events_are_cut_wherever_the_pieces_end() -> None:
    """Byte by byte as at once, with both kinds of line ends."""
    data = b"data: a\r\n\r\ndata: b\n\n: note\n\ndata: c\n\n"
    for size in (1, 2, 3, 7, len(data)):
        events, found = Events(), []
        for start in range(0, len(data), size):
            found += events.feed(data[start : start + size])
        assert b"".join(found) == data and len(found) == 4 and events.is_empty
    with pytest.raises(BadReply, match="larger than"):
        Events().feed(b"x" * (MAX_EVENT_BYTES + 1))


def test_checks_of_one_that_is_down_come_less_and_less_often() -> None:
    health, now, gaps = Health(5.0), 0.0, []
    for _ in range(MOST_FAILURES - 1):
        health.failed(now, "500", is_unreachable=False)
    assert health.is_up
    for _ in range(10):
        health.failed(now, "gone", is_unreachable=True)
        assert not health.is_up
        gaps.append(health.next_check_s - now)
        now = health.next_check_s
    assert gaps[0] == FIRST_DELAY_S and gaps[-1] == LONGEST_DELAY_S and gaps == sorted(gaps)
    health.succeeded(now)
    assert health.is_up and health.next_check_s == now + 5.0 and not health.why


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "x",
        "http://",
        "http://u:p@x",
        "http://x?a=b",
        "http://x#f",
        "http://x:99999",
        "http://x /y",
        "http://a..b",
    ],
)
def test_an_address_is_the_url_of_a_server(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        UpstreamAddress.of(url)


def test_addresses_end_before_their_version() -> None:
    assert str(UpstreamAddress.of("http://x:8080/v1/")) == "http://x:8080"
    assert UpstreamAddress.of("https://x/api/v1") == UpstreamAddress("x", 443, "/api", True)
    assert UpstreamAddress.of("http://[::1]:80/").authority == "[::1]"


def test_keys_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    """For upstreams by name; what cannot be meant is refused."""
    file = tmp_path / "keys"
    file.write_text("# mine\nfar=sk-a=b\n")
    file.chmod(0o600)
    given = {"upstream": (("far", "http://x"), ("far", "http://y")), "upstream_api_key_file": str(file)}
    assert len(UpstreamOptions(**given).upstreams((), MonotonicClock())) == 2
    with pytest.raises(ConfigError, match="name of another model"):
        UpstreamOptions(**given).upstreams(("far",), MonotonicClock())
    file.write_text("near=k\n")
    with pytest.raises(ConfigError, match="line 1"):
        UpstreamOptions(**given).upstreams((), MonotonicClock())
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        UpstreamOptions(**given).upstreams((), MonotonicClock())
    with pytest.raises(ConfigError, match="twice"):
        UpstreamOptions(upstream=(("far", "http://x"),) * 2)


def test_large_bodies_are_parsed_only_for_models_beside() -> None:
    """Names in texts and in nested objects mislead nobody; a body for the server's own model is left to the sandbox."""
    text = json.dumps('"model": "far" \\') + " " * HEAVY_BYTES
    own, nested = f'{{"a": {text}, "model": "toy"}}', f'{{"a": {text}, "b": {{"model": "far"}}, "model": "toy"}}'
    far, none = f'{{"a": {text}, "model" : "f\\u0061r"}}', f'{{"a": {text}}}'
    asked = []

    def is_beside(name: str) -> bool:
        asked.append(name)
        return name == "far"

    assert named_in(own.encode(), is_beside).model is None and asked == ["toy"]
    assert named_in(nested.encode(), is_beside).model == "toy"
    assert named_in(far.encode(), is_beside).model == "far"
    assert named_in(none.encode(), is_beside).model is None


def test_limits_of_tenants_hold_for_upstreams(tmp_path: Path) -> None:
    """A tenant's calls and tokens count, with what the upstream says they were; another tenant has its own."""
    path = str(tmp_path / "tenants.db")
    store = TenantStore(path)
    store.create_tenant("t", TenantSettings(requests_per_minute=3, tokens_per_minute=5000))
    key = store.create_key("k", "t")[1]
    store.close()
    with closing(Access((), path)) as access, Hostile(reply(WHOLE)) as far:
        access.open()
        with fronting(far.url, access=access) as front:
            headers = {"authorization": f"Bearer {key}"}
            for _ in range(3):
                assert front.ask("/v1/chat/completions", CHAT | {"max_tokens": 100}, headers=headers)[0] == 200
            status, text, _ = front.ask("/v1/chat/completions", CHAT, headers=headers)
            assert status == 429 and "requests a minute" in text
            assert front.ask("/v1/chat/completions", CHAT)[0] == 401 and len(far.calls) == 3
            front.call(lambda: None)
            assert not access.quotas._charges, "what the calls had taken is put right"  # type: ignore[union-attr]
