"""Calls with an Idempotency-Key: carried out once, whoever leaves, fails or repeats, for each owner by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted import Served
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core.errors import EngineFailed, Unavailable
from tokenmill.server.idempotency.store import AnswerStore, Taped
from tokenmill.server.response_store import ResponseStore

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[AnswerStore]:
    store = AnswerStore(str(tmp_path / "answers.db"))
    store.open()
    yield store
    store.close()


@pytest.fixture
def served(answers: AnswerStore, tmp_path: Path) -> Iterator[Served]:
    """What it says differs from call to call: it draws a seed for each."""
    store = ResponseStore(str(tmp_path / "responses.db"))
    store.open()
    accounting = Accounting(tmp_path / "usage", fold_s=0.01)
    accounting.open()
    with Served(lambda prompt: "word " * 40, answers=answers, store=store, accounting=accounting) as one:
        yield one
    accounting.close()
    store.close()


def ask(served: Served, path: str, body: Any, key: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """(status, body, headers in lower case)"""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", "idempotency-key": key} | headers
    call = urllib.request.Request(served.url + path, data, sent)
    try:
        answer = urllib.request.urlopen(call, timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.headers.items()}


def num_run(served: Served) -> int:
    return len(served.script.introductions)


def billed(served: Served) -> int:
    told = json.loads(served.ask("/v1/usage")[1])
    return sum(each["output_tokens"] for bucket in told["data"] for each in bucket["results"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": "a", "stream": True, "logprobs": 2}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": "hi", "stream": True}),
        ("/v1/messages", CHAT | {"max_tokens": 9, "stream": True}),
        ("/api/generate", {"model": "toy", "prompt": "a"}),
    ],
)
def test_a_repeat_gets_the_kept_bytes(served: Served, path: str, body: dict[str, Any]) -> None:
    """Of each API, whole and streamed: equal bytes and type, nothing computed and nothing billed again."""
    first = ask(served, path, body, "k1")
    assert first[0] == 200 and "idempotent-replayed" not in first[2]
    known, bill = num_run(served), billed(served)
    again = ask(served, path, body, "k1")
    assert again[:2] == first[:2] and again[2]["content-type"] == first[2]["content-type"]
    assert again[2]["idempotent-replayed"] == "true"
    assert (num_run(served), billed(served)) == (known, bill) and bill > 0
    other = ask(served, path, body, "k2")
    assert num_run(served) == known + 1 and other[1] != first[1], "ids of answers differ"


def test_a_key_that_comes_with_another_call_is_refused(served: Served) -> None:
    ask(served, "/v1/chat/completions", CHAT, "k")
    for path, body in (("/v1/chat/completions", CHAT | {"seed": 1}), ("/v1/responses", {"input": "hi"})):
        status, told, _ = ask(served, path, body, "k")
        assert status == 422 and json.loads(told)["error"]["param"] == "idempotency-key"
    assert num_run(served) == 1


def test_a_key_must_be_short_and_printable(served: Served) -> None:
    for key in ("x" * 256, "é", ""):
        status, told, _ = ask(served, "/v1/completions", {"prompt": "a"}, key)
        assert status == 400 and "1 to 255" in json.loads(told)["error"]["message"]
    assert ask(served, "/admin/keys", {}, "k")[0] == 400


def test_repeats_wait_for_the_first_call(served: Served) -> None:
    """Eight at once, whole and streamed: one runs, all get its bytes; one with another body is told at once."""
    for number, stream in enumerate((False, True)):
        key, body = f"k{number}", CHAT | {"stream": stream}
        served.call(served.script.go.clear)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, served, "/v1/chat/completions", body, key) for _ in range(8)]
            served.wait_until(lambda: served.client.num_open == 1)
            assert ask(served, "/v1/chat/completions", CHAT | {"seed": 3}, key)[0] == 422
            served.call(served.script.go.set)
            found = [each.result() for each in asked]
        assert len({told for _, told, _ in found}) == 1 and {status for status, _, _ in found} == {200}
        assert sum("idempotent-replayed" in headers for _, _, headers in found) == 7
        assert num_run(served) == number + 1


def request_of(body: dict[str, Any], key: str) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nIdempotency-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_repeats_that_are_being_received_count_as_held(answers: AnswerStore) -> None:
    """Bodies that are not whole yet too: together they are bounded, whoever sends them how slowly."""
    with Served(answers=answers, max_buffered_bytes=150_000) as served, contextlib.ExitStack() as stack:
        served.call(served.script.go.clear)
        first = stack.enter_context(served.connect())
        first.sendall(request_of({"prompt": "a"}, "k"))
        served.wait_until(lambda: served.client.num_open == 1)
        data = request_of({"prompt": "a", "user": "x" * 100_000}, "k")
        slow, other = (stack.enter_context(served.connect()) for _ in range(2))
        slow.sendall(data[:-10])
        served.wait_until(lambda: served.app.state.limits._buffered_bytes > 90_000)
        other.sendall(data[:-10])
        assert other.recv(1000).startswith(b"HTTP/1.1 429")
        slow.sendall(data[-10:])
        assert slow.recv(1000).startswith(b"HTTP/1.1 422")
        served.call(served.script.go.set)
        assert first.recv(1000).startswith(b"HTTP/1.1 200")
        served.wait_until(lambda: served.app.state.limits._buffered_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_outlives_its_client(served: Served, stream: bool) -> None:
    """The client is gone before the answer begins; its repeat gets the answer that was made for it."""
    body = {"prompt": "a", "max_tokens": 30, "stream": stream}
    served.call(served.script.go.clear)
    with served.connect() as client:
        client.sendall(request_of(body, "k"))
        served.wait_until(lambda: served.client.num_open == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    served.call(served.script.go.set)
    status, told, headers = ask(served, "/v1/completions", body, "k")
    assert status == 200 and headers["idempotent-replayed"] == "true"
    assert b"[DONE]" in told if stream else json.loads(told)["usage"]["completion_tokens"] == 30
    assert num_run(served) == 1 and billed(served) == 30


def test_what_failed_is_tried_again(answers: AnswerStore) -> None:
    """Refusals and streams that end with an error are not kept, and who waited for the failed call runs."""
    with Served(answers=answers, attach=False, max_queue_s=0.05) as served:
        assert ask(served, "/v1/chat/completions", CHAT, "k")[0] == 503
        served.restart_engine()
        served.wait_until(lambda: served.client.ready is not None)
        assert ask(served, "/v1/chat/completions", CHAT, "k")[0] == 200
    with Served(lambda prompt: "word " * 40, answers=answers, step_s=0.005) as served:
        body = {"prompt": "a", "max_tokens": 99, "stream": True}
        with served.connect() as client:
            served.call(served.script.go.clear)
            client.sendall(request_of(body, "s"))
            served.wait_until(lambda: served.client.num_open == 1)
            served.call(served.script.go.set)
            got = b""
            while got.count(b'"text":') < 3:
                got += client.recv(1 << 16)
            served.call(served.script.go.clear)
            waiting: list[tuple[int, bytes, dict[str, str]]] = []
            thread = threading.Thread(target=lambda: waiting.append(ask(served, "/v1/completions", body, "s")))
            thread.start()
            served.call(lambda: served.client.fail_open(EngineFailed("over")))
            served.wait_until(lambda: served.client.num_open > 0 and bool(served.client._streams))
            served.call(served.script.go.set)
            thread.join()
        status, told, headers = waiting[0]
        assert status == 200 and told.endswith(b"data: [DONE]\n\n") and "idempotent-replayed" not in headers


def test_keys_are_their_owners(answers: AnswerStore) -> None:
    """Equal keys of two API keys are two calls; and answers outlive the server."""
    for life in range(2):
        with Served(answers=answers, api_keys=("one", "two")) as served:
            told = {}
            for name in ("one", "two"):
                status, told[name], headers = ask(
                    served, "/v1/chat/completions", CHAT, "k", authorization=f"Bearer {name}"
                )
                assert status == 200 and ("idempotent-replayed" in headers) == (life == 1)
            assert told["one"] != told["two"]


def test_without_a_store_keys_are_refused() -> None:
    with Served() as served:
        status, told, _ = ask(served, "/v1/chat/completions", CHAT, "k")
        assert status == 400 and "--idempotency-store" in json.loads(told)["error"]["message"]


def test_the_store_forgets_the_old_and_what_is_too_much(tmp_path: Path) -> None:
    """After a day, and the oldest of who has most; nothing of a call but a digest is in the file."""
    now_s = [1e9]
    path = tmp_path / "answers.db"
    store = AnswerStore(str(path), max_bytes=10_000, wall_s=lambda: now_s[0])
    store.open()

    def has(served: Served, owner: str, key: str) -> bool:
        return asyncio.run_coroutine_threadsafe(store.claim(owner, key), served.loop).result(10) is not None

    def put(owner: str, key: str, size: int) -> None:
        store.put(owner, key, Taped(b"digest", 200, ((b"a", b"b"),), b"x" * size))

    with Served(answers=store) as served:
        put("small", "first", 900)
        now_s[0] += 1
        for number in range(12):
            put("large", f"secret {number}", 900)
            now_s[0] += 1
        assert (
            has(served, "small", "first") and not has(served, "large", "secret 0") and has(served, "large", "secret 11")
        )
        now_s[0] += 24 * 3600
        assert not has(served, "small", "first") and not has(served, "large", "secret 11")
    store.close()
    assert b"secret" not in path.read_bytes() and path.stat().st_mode & 0o777 == 0o600


def test_what_could_not_be_kept_is_not_carried_out_again(tmp_path: Path) -> None:
    """Where a call was carried out and the disk had no room for its answer, its repeat is refused, by the next server
    too; one that failed, or whose server was killed, is carried out."""
    path = str(tmp_path / "answers.db")
    store = AnswerStore(path)
    store.open()

    async def full() -> None:
        assert await store.claim("me", "failed") is None
        store.release("me", "failed")
        assert await store.claim("me", "failed") is None and await store.claim("me", "killed") is None
        assert await store.claim("me", "lost") is None
        await store._file.do(lambda: store._file.database.execute("PRAGMA max_page_count=1").fetchall())
        store.put("me", "lost", Taped(b"digest", 200, (), b"x" * 100_000))
        with pytest.raises(Unavailable, match="was carried out"):
            await store.claim("me", "lost")
        for number in range(200):  # until a page is full
            with contextlib.suppress(Unavailable):
                await store.claim("me", f"more {number}")
        with pytest.raises(Unavailable, match="full"):
            await store.claim("me", "new")

    async def later() -> None:
        assert await store.claim("me", "failed") is None and await store.claim("me", "killed") is None
        with pytest.raises(Unavailable, match="was carried out"):
            await store.claim("me", "lost")

    asyncio.run(full())
    store.close()
    store = AnswerStore(path)
    store.open()
    asyncio.run(later())
    store.close()
