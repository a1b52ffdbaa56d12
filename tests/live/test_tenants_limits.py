"""Limits of tenants over HTTP: 429 when it is due, with truthful headers, on all front ends of a machine together."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tenants import ask, serving

from scripted import Served
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TenantStore]:
    made = TenantStore(str(tmp_path / "tenants.db"))
    yield made
    made.close()


def key_of(store: TenantStore, name: str, **settings: Any) -> str:
    return store.create_key(name, name, settings=TenantSettings(**settings))[1]


def chat(served: Served, key: str, text: str = "hello", **more: Any) -> tuple[int, Any, Any]:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}
    return ask(served, "POST", CHAT, body, key)


def test_two_front_ends_let_in_what_one_would(store: TenantStore) -> None:
    """Of calls that come to both at once exactly as many as the limit says; the rest is told when to come back."""
    key = key_of(store, "a", requests_per_minute=10)
    free = key_of(store, "b")
    with ExitStack() as stack:
        served = [stack.enter_context(serving(store.path)) for _ in range(2)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda number: chat(served[number % 2], key), range(30)))
        statuses = [status for status, _, _ in found]
        assert statuses.count(200) == 10 and statuses.count(429) == 20
        for status, body, headers in found:
            assert headers["x-ratelimit-limit-requests"] == "10"
            assert 0 <= int(headers["x-ratelimit-remaining-requests"]) < 10
            if status == 429:
                assert body["error"]["code"] == "rate_limit_exceeded"
                assert 1 <= int(headers["retry-after"]) <= 6
        assert {int(each[2]["x-ratelimit-remaining-requests"]) for each in found if each[0] == 200} == set(range(10))
        status, _, headers = chat(served[0], free)
        assert status == 200 and not any(name.startswith("x-ratelimit") for name in headers)


def test_tokens_count_with_what_they_were(store: TenantStore) -> None:
    """In every API; what a refused call asked for is not taken, and what no minute allows is a 400."""
    key, small = key_of(store, "a", tokens_per_minute=600), key_of(store, "b", tokens_per_minute=20)
    with serving(store.path, lambda prompt: "hello") as served:

        def left(headers: Any) -> int:
            return int(headers["x-ratelimit-remaining-tokens"])

        status, body, headers = chat(served, key, max_tokens=300)
        used = body["usage"]["total_tokens"]
        assert status == 200 and left(headers) <= 300 and used < 50
        status, _, headers = chat(served, key, max_tokens=300)
        assert status == 200 and left(headers) >= 250 - 2 * used, "the first call gave back what it did not use"
        for path, asked in (
            ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
            (
                "/api/chat",
                {
                    "model": "toy",
                    "messages": [{"role": "user", "content": "x"}],
                    "stream": False,
                    "options": {"num_predict": 2},
                },
            ),
            ("/completion", {"prompt": "hello", "n_predict": 2}),
            ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": True}),
            ("/v1/completions", {"prompt": "hello", "max_tokens": 2, "use_beam_search": True, "n": 2}),
        ):
            status, told, headers = ask(served, "POST", path, asked, key)
            assert status == 200 and left(headers) > 0, (path, told)
        long = "word " * 90
        for _ in range(20):
            status, told, headers = chat(served, key, long, max_tokens=5)
            if status == 429:
                break
        assert status == 429 and "tokens a minute" in told["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 60
        status, told, _ = chat(served, small, "word " * 20)
        assert (status, told["error"]["param"]) == (400, "messages") and "20 a minute" in told["error"]["message"]
        assert "tenant_tokens" in ask(served, "GET", "/metrics")[1]


def test_open_calls_are_counted_until_they_end(store: TenantStore) -> None:
    """On both front ends together; a client that leaves makes room, and so does every other end."""
    key = key_of(store, "a", max_concurrent=2)
    with ExitStack() as stack:
        served = [
            stack.enter_context(serving(store.path, lambda prompt: "hello " * 400, step_s=0.01)) for _ in range(2)
        ]
        leaving = threading.Event()

        def stream(front: Served) -> None:
            body = b'{"model":"toy","prompt":"x","max_tokens":400,"stream":true}'
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with front.connect() as raw:
                raw.sendall(head.encode() + body)
                assert raw.recv(1000).startswith(b"HTTP/1.1 200")
                begun.release()
                leaving.wait(20)

        begun = threading.Semaphore(0)
        threads = [threading.Thread(target=stream, args=(front,)) for front in served]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=20)
        for front in served:
            status, told, headers = chat(front, key)
            assert (status, "2 open requests" in told["error"]["message"]) == (429, True)
            assert int(headers["retry-after"]) >= 1
        leaving.set()
        for thread in threads:
            thread.join(20)
        for front in served:
            front.wait_until(lambda front=front: front.client.num_open == 0)  # type: ignore[misc]
        for _ in range(4):
            assert all(chat(front, key)[0] == 200 for front in served)


def test_a_call_that_never_comes_to_the_engine_counts_not_at_all(store: TenantStore) -> None:
    """One that the server refuses for what others have open, after the tenant's limits have let it in."""
    key, other = key_of(store, "a", requests_per_minute=5, max_concurrent=1), key_of(store, "b")
    prompt = list(range(10, 60))
    with serving(store.path, lambda prompt: "hello " * 400, step_s=0.01, max_open_tokens=80) as served:
        body = json.dumps({"prompt": prompt, "max_tokens": 400, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {other}\r\ncontent-length: {len(body)}\r\n\r\n"
        with served.connect() as raw:
            raw.sendall(head.encode() + body)
            assert raw.recv(1000).startswith(b"HTTP/1.1 200")
            for _ in range(8):
                status, told, _ = ask(served, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2}, key)
                assert (status, told["error"]["code"]) == (429, "overloaded")
        served.wait_until(lambda: served.client.num_open == 0)
        status, _, headers = ask(served, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2}, key)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "4")


def test_a_beam_search_is_one_call(store: TenantStore) -> None:
    """It holds one of the tenant's open calls until it is over, however it ends."""
    key = key_of(store, "a", max_concurrent=1, tokens_per_minute=1000)
    with serving(store.path) as served:
        for _ in range(3):
            asked = {"prompt": "hello", "max_tokens": 3, "use_beam_search": True, "n": 2}
            status, told, headers = ask(served, "POST", "/v1/completions", asked, key)
            assert status == 200, told
        assert int(headers["x-ratelimit-remaining-tokens"]) > 900
        assert ask(served, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, key)[0] == 200


def test_a_limit_that_is_changed_holds_at_once(store: TenantStore) -> None:
    """Raised, lowered and taken away while the server runs, for calls that come after it is known."""
    key = key_of(store, "a", requests_per_minute=1)
    admin = store.create_key("ops", "ops", is_admin=True)[1]
    with serving(store.path) as served:
        assert [chat(served, key)[0] for _ in range(2)] == [200, 429]
        assert ask(served, "PATCH", "/admin/tenants/a", {"requests_per_minute": 0}, admin)[0] == 200
        assert [chat(served, key)[0] for _ in range(3)] == [200] * 3
        assert (
            ask(served, "PATCH", "/admin/tenants/a", {"requests_per_minute": 2, "max_concurrent": 1}, admin)[0] == 200
        )
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(lambda _: chat(served, key)[0], range(3))).count(429) >= 1


def test_keys_rotate_under_load_without_a_refusal(store: TenantStore) -> None:
    """With an overlap no call fails, though keys change all the time; without one the old key ends."""
    first = store.create_key("a", "t", settings=TenantSettings(requests_per_minute=10**6))[1]
    with ExitStack() as stack:
        served = [stack.enter_context(serving(store.path)) for _ in range(2)]
        current, stop = [first], threading.Event()

        def call(number: int) -> list[int]:
            found = []
            while not stop.is_set():
                found.append(chat(served[number % 2], current[0], max_tokens=2)[0])
            return found

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(call, number) for number in range(4)]
            try:
                for _ in range(8):
                    current[0] = store.rotate_key("a", 600.0)[1]
                    assert chat(served[0], current[0])[0] == chat(served[1], first)[0] == 200
            finally:
                stop.set()
            statuses = [status for each in running for status in each.result(20)]
        assert len(statuses) > 20 and set(statuses) == {200}
        key = ask(served[0], "GET", "/v1/models", key=first)[0]
        assert key == 200
        last = store.rotate_key("a")[1]
        assert chat(served[0], last)[0] == 200
        assert chat(served[0], current[0])[0] == 401


def test_a_flood_of_wrong_keys_is_cheap_and_locks_nobody_out(store: TenantStore) -> None:
    """Wrong keys that come together ask the store once for all of them; good ones do not wait."""
    key = key_of(store, "a")
    with serving(store.path) as served:
        access, looks = served.app.state.access, []
        look = access._look
        access._look = lambda: (looks.append(1), look())
        with ThreadPoolExecutor(16) as pool:
            wrong = [pool.submit(ask, served, "GET", "/v1/models", None, f"tm-{number}") for number in range(64)]
            assert ask(served, "GET", "/v1/models", key=key)[0] == 200
            assert {each.result(20)[0] for each in wrong} == {401}
        assert 1 <= len(looks) < 32

        async def cost() -> int:
            return len(asyncio.all_tasks())

        assert asyncio.run_coroutine_threadsafe(cost(), served.loop).result(5) < 30
