"""Tenants of one server know nothing of each other: not what is kept, not what is cached, not what runs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tenants import ask, serving

from scripted import Served
from tokenmill.cluster.events import Ended
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Output, StepOutputs
from tokenmill.core.request import IDLE_PRIORITY, Request
from tokenmill.server.response_store import ResponseStore

CHAT = "/v1/chat/completions"


class Heard:
    """An Observer that keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def opened(self, requests: Sequence[Request], client: str) -> None:
        self.requests += requests

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TenantStore]:
    made = TenantStore(str(tmp_path / "tenants.db"))
    yield made
    made.close()


def chat(served: Served, key: str, text: str = "hello", **more: Any) -> tuple[int, Any]:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], **more}
    return ask(served, "POST", CHAT, body, key)[:2]


def upload(served: Served, key: str, lines: list[Any]) -> str:
    """The id of a file for a batch."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + content + b"\r\n--x--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=x", "x-api-key": key}
    with urllib.request.urlopen(urllib.request.Request(served.url + "/v1/files", parts, headers)) as answer:
        identifier: str = json.load(answer)["id"]
    return identifier


def line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "toy", "messages": [{"role": "user", "content": f"word {number}"}], **more}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


def start_batch(served: Served, key: str, lines: list[Any]) -> dict[str, Any]:
    wanted = {"input_file_id": upload(served, key, lines), "endpoint": CHAT, "completion_window": "24h"}
    status, batch, _ = ask(served, "POST", "/v1/batches", wanted, key)
    assert status == 200, batch
    made: dict[str, Any] = batch
    return made


def test_prompts_are_cached_for_their_tenant_alone(store: TenantStore) -> None:
    """A prompt that another has sent is not in the cache, one's own and that of one's cache group is; a client's
    cache_salt parts them further."""
    names = {"a": "", "b": "", "c": "team", "d": "team"}
    keys = {n: store.create_key(n, n, settings=TenantSettings(cache_group=group))[1] for n, group in names.items()}
    keys["flag"], keys["other"] = "one", "two"
    prompt = "the quick brown fox jumps over the lazy dog " * 8

    def cached(name: str, **more: Any) -> int:
        status, answer = chat(served, keys[name], prompt, max_tokens=2, **more)
        assert status == 200
        number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    engine = EngineConfig(groups=full_groups(512), max_model_len=512)
    with serving(store.path, api_keys=("one", "two"), engine=engine) as served:
        for name in ("a", "b", "c", "flag", "other"):
            assert cached(name) == 0 and cached(name) > 300, name
        assert cached("d") > 300
        assert cached("a", cache_salt="x") == 0 and cached("b", cache_salt="x") == 0 and cached("a", cache_salt="x") > 0
        keys["d"] = store.rotate_key("d")[1]
        assert cached("d") > 300


def test_requests_carry_their_tenants_terms(store: TenantStore) -> None:
    """Of a call as of a batch's line, which comes last and has no time to be over by."""
    settings = TenantSettings(priority_class=0, weight=3, kv_share=0.5, timeout_s=50, queue_s=5, max_concurrent=1)
    key = store.create_key("a", "acme", settings=settings)[1]
    heard = Heard()
    with serving(store.path, files_dir=str(Path(store.path).parent / "files")) as served:
        served.client.observers.added.append(heard)
        assert chat(served, key)[0] == 200
        assert heard.requests[0].terms == settings.terms("acme") and heard.requests[0].terms[:3] == ("acme", 0, 3)
        heard.requests.clear()
        batch = start_batch(served, key, [line(number, priority_class=1) for number in range(3)])
        served.wait_until(lambda: len(heard.requests) == 3)
        for request in heard.requests:
            assert (request.priority, request.terms.priority_class) == (IDLE_PRIORITY, 2)
            assert (request.terms.tenant, request.terms.timeout_s, request.terms.queue_s) == ("acme", 0, 0)
        served.wait_until(lambda: served.app.state.batches._batches[batch["id"]].has_ended)
        assert ask(served, "GET", f"/v1/batches/{batch['id']}", key=key)[1]["request_counts"]["completed"] == 3


def test_a_call_may_ask_for_a_later_class_and_for_no_earlier_one(store: TenantStore) -> None:
    """By priority_class or OpenAI's service_tier, in every API that reads either."""
    key = store.create_key("a", "a")[1]
    urgent = store.create_key("b", "b", settings=TenantSettings(priority_class=0))[1]
    heard = Heard()

    def asked(path: str, mine: str = key, **body: Any) -> int | str:
        heard.requests.clear()
        status, told, _ = ask(served, "POST", path, {"model": "toy", "max_tokens": 2, **body}, mine)
        return heard.requests[0].terms.priority_class if status == 200 else str(told["error"]["param"])

    messages = [{"role": "user", "content": "x"}]
    with serving(store.path) as served:
        served.client.observers.added.append(heard)
        assert asked(CHAT, messages=messages) == 1
        assert asked(CHAT, urgent, messages=messages) == 0
        assert asked(CHAT, urgent, messages=messages, priority_class=1) == 1
        assert asked(CHAT, messages=messages, priority_class=0) == "priority_class"
        assert asked(CHAT, messages=messages, priority_class=3) == "priority_class"
        for tier, found in (("flex", 2), ("auto", 1), ("priority", 1), ("default", 1), ("gold", "service_tier")):
            assert asked(CHAT, messages=messages, service_tier=tier) == found
        assert asked(CHAT, messages=messages, service_tier="flex", priority_class=1) == "service_tier"
        assert asked("/v1/completions", prompt="x", service_tier="flex") == 2
        assert asked("/v1/messages", messages=messages, priority_class=2) == 2
        status, told, _ = ask(served, "POST", "/v1/responses", {"input": "x", "service_tier": "flex"}, key)
        assert (status, told["service_tier"], heard.requests[-1].terms.priority_class) == (200, "flex", 2)


def test_what_is_kept_for_one_tenant_is_not_there_for_another(store: TenantStore, tmp_path: Path) -> None:
    """Responses, files and batches, by every path that names one, in lists, and as what a call goes on from. A further
    key of the tenant finds all."""
    mine, theirs = store.create_key("a", "a")[1], store.create_key("b", "b", is_admin=True)[1]
    responses = ResponseStore(str(tmp_path / "responses.db"))
    responses.open()
    flags = ("flag", "flag2")
    with serving(store.path, store=responses, files_dir=str(tmp_path / "files"), api_keys=flags) as served:
        for own, others in ((mine, (theirs, "flag")), ("flag", (mine, theirs, "flag2"))):
            status, response, _ = ask(served, "POST", "/v1/responses", {"input": "x", "metadata": {}}, own)
            assert status == 200
            batch = start_batch(served, own, [line(0)])
            served.wait_until(lambda batch=batch: served.app.state.batches._batches[batch["id"]].has_ended)  # type: ignore[misc]
            batch = ask(served, "GET", f"/v1/batches/{batch['id']}", key=own)[1]
            ids = {
                "response_id": response["id"],
                "batch_id": batch["id"],
                "file_id": batch["output_file_id"],
            }
            walked = 0
            for route in served.app.routes:
                field = next((name for name in ids if f"{{{name}}}" in route.path), None)
                for method in sorted(route.methods) if field else ():
                    walked += 1
                    path = route.path.replace(f"{{{field}}}", ids[str(field)])
                    for key in others:
                        assert ask(served, method, path, key=key)[0] == 404, (method, path)
            assert walked >= 12
            for key in others:
                for path in ("/v1/files", "/v1/batches"):
                    listed = {item["id"] for item in ask(served, "GET", path, key=key)[1]["data"]}
                    assert listed.isdisjoint(ids.values())
                again = {"input": "x", "previous_response_id": response["id"]}
                assert ask(served, "POST", "/v1/responses", again, key)[0] == 404
                wanted = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
                assert ask(served, "POST", "/v1/batches", wanted, key)[0] == 404
            if own == mine:
                second = store.create_key("a2", "a")[1]
                for path in (f"/v1/responses/{response['id']}", f"/v1/files/{batch['output_file_id']}/content"):
                    assert ask(served, "GET", path, key=second)[0] == 200
    responses.close()


def test_a_batch_ends_with_its_tenant(store: TenantStore) -> None:
    """What has been answered stays, and nothing more is computed for who is gone."""
    key = store.create_key("a", "a")[1]
    with serving(
        store.path, lambda prompt: "hello " * 300, step_s=0.01, files_dir=str(Path(store.path).parent / "f")
    ) as served:
        batch = start_batch(served, key, [line(number, max_tokens=300) for number in range(600)])
        served.wait_until(lambda: served.client.num_open > 0)
        store.delete_tenant("a")
        batches = served.app.state.batches._batches
        served.wait_until(lambda: batches[batch["id"]].status == "failed")
        assert batches[batch["id"]].faults[0].code == "owner_gone"
        served.wait_until(lambda: served.client.num_open == 0)
