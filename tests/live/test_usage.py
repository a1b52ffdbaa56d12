"""What answers tell as usage is what is billed, for every API and however a call ends; and who may read it."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_batches import client_of, jsonl, line, wait

from scripted import Served
from tokenmill.control.tenants.access import Access
from tokenmill.control.tenants.store import TenantStore
from tokenmill.control.usage.accounting import Accounting
from tokenmill.server.response_store import ResponseStore

WORDS = "one two three four five six seven eight nine ten "
CHAT = [{"role": "user", "content": "count"}]


@pytest.fixture
def accounting(tmp_path: Path) -> Iterator[Accounting]:
    accounting = Accounting(tmp_path / "usage", fold_s=0.01)
    accounting.open()
    yield accounting
    accounting.close()


@pytest.fixture
def served(accounting: Accounting, tmp_path: Path) -> Iterator[Served]:
    store = ResponseStore(str(tmp_path / "responses.db"))
    store.open()
    with Served(lambda prompt: WORDS, accounting=accounting, store=store, files_dir=str(tmp_path / "files")) as one:
        yield one
    store.close()


def billed(served: Served, query: str = "") -> dict[str, int]:
    """Sums of all buckets."""
    status, text, _ = served.ask(f"/v1/usage?bucket_width=1d{query}")
    assert status == 200, text
    results = [each for bucket in json.loads(text)["data"] for each in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    return {name: sum(each[name] for each in results) for name in names}


def added(served: Served, before: dict[str, int]) -> tuple[int, ...]:
    after = billed(served)
    return tuple(after[name] - before[name] for name in after)


def told_by(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an answer, streamed or whole, as events or as lines."""
    if not text.startswith(("data:", "event:")):
        return [json.loads(each) for each in text.splitlines() if each]
    data = [each.removeprefix("data: ") for each in text.splitlines() if each.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def usage_of(text: str) -> tuple[int, int]:
    """(prompt tokens, output tokens) as an answer of any API tells them."""
    found: dict[str, int] = {}
    for body in told_by(text):
        spoken = [body, *(body.get(name) for name in ("usage", "response", "message", "meta_info"))]
        spoken += [each.get("usage") for each in spoken if isinstance(each, dict)]
        for usage in [each for each in spoken if isinstance(each, dict)]:
            cached = usage.get("cache_read_input_tokens", 0)
            for name in ("prompt_tokens", "prompt_eval_count", "tokens_evaluated", "input_tokens"):
                if usage.get(name) is not None:
                    found["prompt"] = usage[name] + cached
            for name in ("completion_tokens", "eval_count", "tokens_predicted", "output_tokens"):
                if usage.get(name) is not None:
                    found["output"] = usage[name]
    return found["prompt"], found["output"]


CALLS: list[tuple[str, str, dict[str, Any], bool]] = [
    ("chat", "/v1/chat/completions", {"messages": CHAT}, True),
    ("several choices", "/v1/chat/completions", {"messages": CHAT, "n": 3}, True),
    ("several prompts", "/v1/completions", {"prompt": ["a b", "c d e", "f"], "n": 2}, True),
    ("a stop string", "/v1/completions", {"prompt": "count", "stop": ["ree f"]}, True),
    ("a cut answer", "/v1/completions", {"prompt": "count", "max_tokens": 3}, True),
    ("log probabilities", "/v1/completions", {"prompt": "count", "logprobs": 2}, True),
    ("a prompt that is only scored", "/v1/completions", {"prompt": "a b c", "echo": True, "max_tokens": 0}, False),
    ("intervals", "/v1/completions", {"prompt": "count", "stream_interval": 7}, True),
    ("beams", "/v1/completions", {"prompt": "a", "n": 2, "use_beam_search": True, "max_tokens": 3}, False),
    ("a response", "/v1/responses", {"input": "count"}, True),
    ("a message", "/v1/messages", {"messages": CHAT, "max_tokens": 30}, True),
    ("Ollama's chat", "/api/chat", {"messages": CHAT}, True),
    ("Ollama's generate", "/api/generate", {"prompt": "count"}, True),
    ("llama-server's", "/completion", {"prompt": "count"}, True),
    ("SGLang's", "/generate", {"text": "count"}, True),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_usage_that_is_told_is_billed(served: Served, streamed: bool) -> None:
    """Of each API, whole and streamed: prompt and output of the answer's usage, and one call."""
    for name, path, body, can_stream in CALLS:
        if streamed and not can_stream:
            continue
        before = billed(served)
        extras: dict[str, Any] = {"stream": streamed, "model": "toy"}
        if streamed and path.startswith("/v1/c"):
            extras["stream_options"] = {"include_usage": True}
        status, text, _ = served.ask(path, extras | body)
        assert status == 200, (name, text)
        calls, prompt, _, output = added(served, before)
        assert (calls, prompt, output) == (1, *usage_of(text)), (name, text)


def test_cached_tokens_are_told_apart(served: Served) -> None:
    body = {"prompt": "the same long prompt for two calls, longer than a block of the cache"}
    served.ask("/v1/completions", body)
    before = billed(served)
    _, text, _ = served.ask("/v1/completions", body)
    cached = json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and added(served, before)[2] == cached


def test_what_is_refused_costs_nothing(served: Served) -> None:
    before = billed(served)
    assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": -1})[0] == 400
    assert served.ask("/v1/completions", {"prompt": "a", "model": "other"})[0] == 404
    assert served.ask("/v1/completions", {"prompt": "long " * 600})[0] == 400
    assert added(served, before) == (0, 0, 0, 0)


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


def leaving(served: Served) -> socket.socket:
    """A connection that is reset where it is closed: the server hears of it without writing."""
    client = served.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return client


def test_a_client_that_leaves_pays_for_what_was_written_to_it(accounting: Accounting) -> None:
    """A stream pays its prompt and the tokens that were written; a whole answer that nobody gets, nothing."""
    with Served(lambda prompt: WORDS * 20, accounting=accounting, step_s=0.002) as served:
        with leaving(served) as client:
            client.sendall(request_of({"prompt": "count", "max_tokens": 300, "stream": True}))
            got = b""
            while got.count(b'"text":') < 5:
                got += client.recv(1 << 16)
            served.call(served.script.go.clear)
            (entry,) = served.client.gateway._entries.values()
        served.wait_until(lambda: not served.client._streams)
        found = billed(served)
        assert found["input_tokens"] == len(served.text.tokenizer.encode("count"))
        assert found["output_tokens"] == len(entry.tokens) >= got.count(b'"text":')
        with leaving(served) as client:
            client.sendall(request_of({"prompt": "again"}))
            served.wait_until(lambda: bool(served.client._streams))
        served.wait_until(lambda: not served.client._streams)
        served.call(served.script.go.set)
        served.wait_until(lambda: not served.client.num_open)
        assert billed(served) == found


def test_an_engine_that_dies_is_not_paid_twice(accounting: Accounting) -> None:
    """A call that goes on in the next engine costs what it tells, its prompt once."""
    with Served(lambda prompt: WORDS * 8, accounting=accounting, step_s=0.001) as served:
        answers: list[str] = []
        bodies = [
            {"prompt": "count", "max_tokens": 150, "stream": number % 2 == 0, "seed": number} for number in range(6)
        ]

        def ask(body: dict[str, Any]) -> None:
            if body["stream"]:
                body["stream_options"] = {"include_usage": True}
            answers.append(served.ask("/v1/completions", body)[1])

        threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        entries = served.client.gateway._entries
        for number in range(3):
            least = 10 + 40 * number
            served.wait_until(
                lambda least=least: len(entries) == 6 and all(len(each.tokens) > least for each in entries.values())
            )
            served.kill_engine()
            served.wait_until(lambda: served._engine is not None and served._engine.done())
            served.call(lambda: served.client.detach(served.link, "killed"))
            served.restart_engine()
        for thread in threads:
            thread.join()
        told = [usage_of(answer) for answer in answers]
        found = billed(served)
        assert len(told) == 6 and found["num_model_requests"] == 6
        assert (found["input_tokens"], found["output_tokens"]) == tuple(map(sum, zip(*told, strict=True)))


def test_a_batch_pays_for_its_lines(served: Served) -> None:
    with client_of(served) as client:
        file = client.files.create(file=("in.jsonl", jsonl([line(number) for number in range(9)])), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        output = wait(client, made.id).output_file_id
        lines = client.files.content(output).text.splitlines()
    told = [usage_of(json.dumps(json.loads(each)["response"]["body"])) for each in lines]
    found = billed(served)
    assert found["num_model_requests"] == 9
    assert (found["input_tokens"], found["output_tokens"]) == tuple(map(sum, zip(*told, strict=True)))


def test_usage_is_told_by_model_and_to_operators_only_of_all(served: Served, accounting: Accounting) -> None:
    served.ask("/v1/completions", {"prompt": "count", "max_tokens": 2})
    _, text, _ = served.ask("/v1/usage?group_by=model&bucket_width=1h&limit=2")
    told = json.loads(text)
    assert told["object"] == "page" and [bucket["object"] for bucket in told["data"]] == ["bucket", "bucket"]
    (result,) = told["data"][-1]["results"]
    assert (result["model"], result["num_model_requests"], result["output_tokens"]) == ("toy", 1, 2)
    assert result["tenant_id"] is None and billed(served, "&models=other")["output_tokens"] == 0
    (result,) = json.loads(served.ask("/admin/usage?group_by[]=tenant_id")[1])["data"][-1]["results"]
    assert result["tenant_id"] == "" and result["output_tokens"] == 2
    assert served.ask("/v1/usage?group_by=tenant_id")[0] == 400
    with Served(api_keys=("secret",), accounting=None) as other:
        for path, status in (("/admin/usage", 403), ("/v1/usage", 404)):
            call = urllib.request.Request(other.url + path, headers={"Authorization": "Bearer secret"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(call, timeout=20)
            with refused.value as answer:
                assert answer.status == status


def test_each_tenant_sees_its_own_usage(tmp_path: Path, accounting: Accounting) -> None:
    """By key and model; an admin sees all tenants, and what a tenant asks of others' is nothing."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    keys = {name: store.create_key(name, tenant) for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b"))}
    _, admin = store.create_key("ops", "ops", is_admin=True)
    store.close()
    access = Access((), str(tmp_path / "tenants.db"))
    access.open()
    try:
        with Served(lambda prompt: WORDS, accounting=accounting, access=access) as served:
            for number, (_, key) in enumerate(keys.values(), 1):
                body = {"prompt": "count", "max_tokens": number}
                assert get(served, "/v1/completions", key, body)[0] == 200

            def told(path: str, key: str, *names: str) -> dict[tuple[Any, ...], int]:
                status, page = get(served, path, key)
                assert status == 200, page
                results = [each for bucket in page["data"] for each in bucket["results"]]
                return {tuple(each[name] for name in names): each["output_tokens"] for each in results}

            ids = {name: record.id for name, (record, _) in keys.items()}
            of_a, of_b = keys["a1"][1], keys["b1"][1]
            assert told("/v1/usage?group_by=api_key_id", of_a, "api_key_id") == {(ids["a1"],): 1, (ids["a2"],): 2}
            assert told("/v1/usage", of_b) == {(): 3}
            assert told(f"/v1/usage?api_key_ids={ids['a1']}&tenant_ids=a", of_b) == {}
            assert get(served, "/admin/usage", of_a)[0] == 403
            assert told("/admin/usage?group_by=tenant_id", admin, "tenant_id") == {("a",): 3, ("b",): 3}
            assert told("/admin/usage?tenant_ids=b&group_by=tenant_id", admin, "tenant_id") == {("b",): 3}
    finally:
        access.close()


def get(served: Served, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"x-api-key": key})
    try:
        answer = urllib.request.urlopen(call, timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, json.loads(answer.read())
