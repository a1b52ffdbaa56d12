"""Workers that share a KV store: what one has computed the others need not, also when it has gone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from serving import Server

TEXT = " ".join(f"Item {number} of the list costs {number * 7 % 50} coins." for number in range(50))
BODY = {"prompt": TEXT, "max_tokens": 12, "temperature": 0.8, "seed": 11, "logprobs": 1}
SMALL = ("--kv-cache-memory-bytes", "60MB", "--max-model-len", "2048", "--kv-host", "256MB")


def ask(server: Server, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    status, text = server.request("POST", path, body or BODY)
    assert status in (200, 202), (status, text)
    return json.loads(text)


def num_cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_until(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def is_stored(server: Server, prompt: str | list[int], num_blocks: int) -> bool:
    found = ask(server, "/admin/kv/find", prompt=prompt)["num_stored"]
    return bool(found == num_blocks)


def states(server: Server) -> dict[str, str]:
    return {each["id"]: each["state"] for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]}


def metric(server: Server, name: str) -> float:
    lines = server.request("GET", "/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.sampled(1 / 3)
def test_a_worker_has_from_the_store_what_another_computed_before_it_left(smollm2: Path) -> None:
    """The front end knows of the store from one worker, and when that one has gone, from the other."""
    with Server("--workers", "2", "--replication", "off", *SMALL) as server:
        wait_until(lambda: states(server) == {"w0": "ready", "w1": "ready"}, "both are ready")
        first = ask(server)
        num_blocks = first["usage"]["prompt_tokens"] // 16
        assert num_cached(first) == 0
        wait_until(lambda: is_stored(server, TEXT, num_blocks), "what was computed is stored")
        assert server.request("POST", "/admin/workers/w0/drain")[0] == 202
        wait_until(lambda: states(server).get("w0") != "draining", "w0 has left")
        second = ask(server)
        assert second["choices"] == first["choices"]
        assert num_cached(second) == (first["usage"]["prompt_tokens"] - 1) // 16 * 16
        salted = ask(server, **BODY, cache_salt="other")
        assert salted["choices"] == first["choices"] and num_cached(salted) == 0


@pytest.mark.sampled(1 / 3)
def test_a_request_is_routed_to_what_the_store_has_and_a_prefetch_brings_it_into_a_pool(smollm2: Path) -> None:
    """Other prompts are brought into each pool by name: where requests would go depends on how fast steps were."""
    with Server("--workers", "2", "--replication", "off", *SMALL) as server:
        wait_until(lambda: states(server) == {"w0": "ready", "w1": "ready"}, "both are ready")
        first = ask(server)
        num_blocks = first["usage"]["prompt_tokens"] // 16
        wait_until(lambda: is_stored(server, TEXT, num_blocks), "it is stored")
        for number in range(3):  # a pool holds 160 blocks
            other = [number * 100 + 5 + each % 90 for each in range(900)]
            ask(server, prompt=other, max_tokens=1)
            wait_until(lambda other=other: is_stored(server, other, len(other) // 16), "the other one is stored")
            for name in ("w0", "w1"):
                said = ask(server, "/admin/kv/prefetch", prompt=other, to="pool", worker=name)
                assert said["num_cached"] == len(other) // 16, said
        again = ask(server)
        assert again["choices"] == first["choices"] and num_cached(again) > 0
        assert metric(server, 'tokenmill:requests_routed_total{engine="0",model_name="smollm2",reason="host"') >= 1
        for name in ("w0", "w1"):
            said = ask(server, "/admin/kv/prefetch", prompt=TEXT, to="pool", worker=name)
            assert said["num_cached"] == num_blocks, said
        assert ask(server, "/admin/kv/prefetch", prompt=TEXT)["to"] == "host"


@pytest.mark.sampled(1 / 3)
def test_prompt_and_answer_by_two_workers_that_meet_in_the_store_alone(smollm2: Path) -> None:
    with Server(*SMALL) as alone:
        wanted = [ask(alone, **BODY | {"seed": seed})["choices"] for seed in range(4)]
    split = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregation", "always", "--kv-transfer", "tier")
    with Server(*split, *SMALL) as server:
        wait_until(lambda: states(server) == {"w0": "ready", "w1": "ready"}, "both are ready")
        found = [ask(server, **BODY | {"seed": seed})["choices"] for seed in range(4)]
        assert found == wanted
        moved = 'tokenmill:requests_moved_total{engine="0",model_name="smollm2",outcome="moved",reason="split"'
        assert metric(server, moved) == 4
        assert metric(server, "vllm:external_prefix_cache_hits_total") > 3 * 16
