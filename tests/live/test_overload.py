"""What a server refuses, ends and shortens when it cannot serve in time, over real sockets; the model is scripted."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tenants import ask as ask_with_key
from tenants import serving

from scripted import Served
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig

LONG = "abcdefghij" * 30
NARROW = EngineConfig(groups=full_groups(64), max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64)


def post(served: Served, body: dict[str, Any], **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    """(status, body, headers) of a completion; a stream's body is its events."""
    whole = {"prompt": "hello", "max_tokens": 400} | body
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    call = urllib.request.Request(
        served.url + "/v1/completions", json.dumps(whole).encode(), {"content-type": "application/json"} | names
    )
    try:
        answer = urllib.request.urlopen(call, timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        if "event-stream" not in answer.headers["content-type"]:
            return answer.status, json.loads(text), answer.headers
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return answer.status, list(map(json.loads, events[:-1])), answer.headers


def metric(served: Served, name: str, **labels: str) -> float:
    value = served.client.observers.metrics.registry.get_sample_value(
        name, {"model_name": "toy", "engine": "0"} | labels
    )
    return 0.0 if value is None else value


def test_a_request_that_takes_too_long_ends_with_what_it_has() -> None:
    """Whole or streamed: its tokens are the first of those that it would have had, and it says why it ended."""
    with Served(lambda prompt: LONG, step_s=0.01) as served:
        status, body, _ = post(served, {}, x_request_timeout_s="1")
        (choice,) = body["choices"]
        assert (status, choice["finish_reason"], choice["stop_reason"]) == (200, "length", "timeout")
        assert choice["text"] and LONG.startswith(choice["text"]) and choice["text"] != LONG
        assert body["usage"]["completion_tokens"] == len(choice["text"])
        _, events, _ = post(served, {"stream": True}, x_request_timeout_s="1")
        choices = [event["choices"][0] for event in events]
        text = "".join(each["text"] for each in choices)
        assert text and LONG.startswith(text) and text != LONG
        assert [each.get("stop_reason") for each in choices if each["finish_reason"]] == ["timeout"]
        served.wait_until(lambda: served.client.num_open == 0)
        assert metric(served, "tokenmill:requests_expired_total") == 2
        assert post(served, {"max_tokens": 3}, x_request_timeout_s="20")[1]["choices"][0]["stop_reason"] is None


def test_without_a_token_in_time_it_is_408_and_the_option_bounds_what_a_header_asks_for() -> None:
    with Served(lambda prompt: LONG, request_timeout_s=0.2) as served:
        served.call(served.script.go.clear)
        status, body, _ = post(served, {}, x_request_timeout_s="15")
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        assert body["error"]["message"] == "The request took longer than the 0.2 s that it may."
        served.call(served.script.go.set)
        served.wait_until(lambda: served.client.num_open == 0)
        for wrong in ("soon", "0", "-1", "inf", "nan"):
            status, body, _ = post(served, {}, x_request_timeout_s=wrong)
            assert (status, body["error"]["param"]) == (400, "x-request-timeout-s"), wrong


def test_a_target_that_cannot_be_met_is_refused_with_the_reason_or_watched_in_a_shadow() -> None:
    """Steps of 0.3 s cannot give a first token within 0.2 s, nor one every 0.2 s. A shadow serves both, and counts that
    they missed. With nothing else open a call is let in, since nothing else can tell what steps take now."""
    for mode in ("enforce", "shadow", "off"):
        with Served(lambda prompt: LONG, step_s=0.3, admission=mode) as served:
            assert post(served, {"max_tokens": 2}, x_slo_ttft_ms="200")[0] == 200
            served.wait_until(lambda: served.client.num_open == 0)
            assert post(served, {"max_tokens": 2}, x_slo_ttft_ms="200")[0] == 200, "it is known, but nothing is open"
            with served.connect() as other:
                body = json.dumps({"prompt": "hello", "max_tokens": 400}).encode()
                other.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
                )
                served.wait_until(lambda: served.client.num_open == 1)
                for target in ("ttft", "tpot"):
                    status, told, headers = post(served, {"max_tokens": 2}, **{f"x_slo_{target}_ms": "200"})
                    num_refused = metric(served, "tokenmill:calls_turned_away_total", reason=target)
                    if mode == "enforce":
                        assert (status, told["error"]["code"], num_refused) == (429, "overloaded", 1)
                        assert headers["retry-after"] == "1" and "wanted within 200 ms" in told["error"]["message"]
                    else:
                        assert (status, num_refused) == (200, 0)
                assert post(served, {"max_tokens": 2}, x_slo_ttft_ms="10000", x_slo_tpot_ms="5000")[0] == 200
            served.wait_until(lambda: served.client.num_open == 0)
            missed = metric(served, "tokenmill:shadow_refusals_total", outcome="missed")
            assert missed == (2 if mode == "shadow" else 0)
            assert metric(served, "tokenmill:ttft_prediction_error_ratio_count") >= 1


def test_a_burst_beyond_capacity_to_a_fresh_server_is_let_in() -> None:
    """Steps of one short call say nothing of full ones, and nobody is refused for what these are assumed to take: of
    thirty prompts for one row all enter, though by that the last would wait for longer than is allowed."""
    with Served(engine=NARROW, step_s=0.001, max_queue_s=0.01) as served, ThreadPoolExecutor(30) as pool:
        assert post(served, {"prompt": "a", "max_tokens": 5})[0] == 200
        served.wait_until(lambda: served.client.num_open == 0)
        served.call(served.script.go.clear)
        calls = [pool.submit(post, served, {"prompt": "word " * 80, "max_tokens": 1}) for _ in range(30)]
        served.wait_until(lambda: served.client.num_open + sum(each.done() for each in calls) == 30)
        assert served.client.num_open == 30, [each.result()[1] for each in calls if each.done()]
        served.call(served.script.go.set)
        assert {each.result()[0] for each in calls} == {200}


def test_what_waits_until_its_target_has_passed_is_refused_then_and_never_computed() -> None:
    """One row hangs; of two more, whose first tokens are wanted within 0.3 s, none is begun when it goes on."""
    with Served(engine=NARROW, step_s=0.001) as served, ThreadPoolExecutor(3) as pool:
        served.call(served.script.go.clear)
        first = pool.submit(post, served, {"prompt": "one"})
        served.wait_until(lambda: served.client.num_open == 1)
        late = [pool.submit(post, served, {"prompt": "two"}, x_slo_ttft_ms="300")]
        served.wait_until(lambda: served.client.num_open == 2)
        late.append(pool.submit(post, served, {"prompt": "three"}, x_slo_ttft_ms="300"))
        status, body, headers = late[1].result()
        assert (status, headers["retry-after"]) == (429, "1")
        assert body["error"]["message"] == "The request could not be started in time."
        served.call(served.script.go.set)
        assert first.result()[0] == 200
        assert late[0].result()[0] == 429
        served.wait_until(lambda: served.client.num_open == 0)
        assert len(served.script.introductions) == 1
        assert metric(served, "tokenmill:requests_expired_total") == 1
        assert metric(served, "tokenmill:engine_requests_expired_total") == 1


def test_answers_are_cut_under_load_where_the_tenant_allows_it_and_say_so(tmp_path: Path) -> None:
    """What is shortened is the beginning of what would have been; others are served as they ask."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    try:
        for tenant, most in (("cut", 4), ("whole", 0)):
            store.create_tenant(tenant, TenantSettings(shorten_to=most))
        keys = {tenant: store.create_key(tenant, tenant)[1] for tenant in ("cut", "whole")}
        with serving(tmp_path / "tenants.db") as served:

            def complete(tenant: str) -> tuple[int, str | None]:
                body = {"prompt": "hello", "max_tokens": 9}
                _, answer, headers = ask_with_key(served, "POST", "/v1/completions", body, keys[tenant])
                return answer["usage"]["completion_tokens"], headers["x-tokenmill-shortened"]

            calm = complete("cut")
            assert calm[0] > 4 and calm[1] is None
            served.call(
                lambda: [served.client.request_queue.pressure.note(1, 1.0, served.loop.time()) for _ in range(60)]
            )
            assert complete("cut") == (4, "4")
            assert complete("whole") == (calm[0], None)
    finally:
        store.close()
