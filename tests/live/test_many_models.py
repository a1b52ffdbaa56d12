"""Several models of one machine behind one front end, loaded and unloaded while it serves."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill import write_model
from serving import Server, alive, wait_until

BYTES = ("--kv-cache-memory-bytes", "32MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    return str(write_model(folder))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[Server]:
    with Server(*BYTES, "--served-model-name", "one", model=model) as server:
        yield server


def ask(server: Server, name: str, **more: Any) -> tuple[int, Any]:
    body = {"model": name, "prompt": "abc", "max_tokens": 8, "seed": 3, "ignore_eos": True} | more
    status, text = server.request("POST", "/v1/completions", body)
    return status, json.loads(text)


def names(server: Server) -> list[str]:
    return [card["id"] for card in json.loads(server.request("GET", "/v1/models")[1])["data"]]


def load(server: Server, model: str, name: str, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "name": name, "kv_cache_memory_bytes": 32 << 20} | more
    status, text = server.request("POST", "/admin/models", body)
    return status, json.loads(text)


def engines(server: Server) -> list[int]:
    found = []
    for pid in server.pids():
        if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found


def test_a_model_comes_answers_and_goes(server: Server, model: str) -> None:
    """With an engine of its own, equal answers for equal weights, and series, views and usage under its own name; when
    it goes, so do its processes, and its name is free again."""
    before = engines(server)
    status, told = load(server, model, "two")
    assert status == 201 and told["state"] == "ready" and told["memory_bytes"]["KV"] == 32 << 20, told
    assert names(server) == ["one", "two"]
    (mine,) = set(engines(server)) - set(before)
    own, other = ask(server, "one"), ask(server, "two")
    assert own[0] == other[0] == 200 and own[1]["choices"] == other[1]["choices"] and other[1]["model"] == "two"
    metrics = server.request("GET", "/metrics")[1]
    assert metrics.count("# TYPE vllm:generation_tokens_total counter") == 1
    assert 'vllm:generation_tokens_total{engine="0",model_name="two"} 8.0' in metrics
    shown = [json.loads(server.request("GET", f"/admin/requests{of}")[1])["data"] for of in ("", "?model=two")]
    assert [len(rows) for rows in shown] == [1, 1] and shown[0][0]["id"] != shown[1][0]["id"]
    props = [json.loads(server.request("GET", f"/props{of}")[1]) for of in ("", "?model=two")]
    assert [each["model_path"] for each in props] == ["one", "two"]
    assert all(server.request("GET", f"{path}?model=two")[0] == 200 for path in ("/slots", "/lora-adapters"))
    assert load(server, model, "two")[0] == 400
    status, text = server.request("DELETE", "/admin/models/two")
    assert status == 200 and json.loads(text)["calls_ended"] == 0
    wait_until(lambda: not alive(mine), "the engine's end")
    assert names(server) == ["one"] and ask(server, "two")[0] == 404 and ask(server, "one")[0] == 200
    assert server.request("DELETE", "/admin/models/two")[0] == 404


def test_what_cannot_be_loaded_is_refused_and_leaves_nothing(server: Server, model: str, tmp_path: Path) -> None:
    """No such model, no model at all, more memory than there is: the reason, and no process or name that stays."""
    before = engines(server)
    (tmp_path / "config.json").write_text("{}")
    for body in (
        {"model": str(tmp_path / "none")},
        {"model": str(tmp_path)},
        {"model": model, "kv_cache_memory_bytes": 1 << 49},
    ):
        status, told = load(server, body.pop("model"), "three", **body)  # type: ignore[arg-type]
        assert status == 400 and "cannot be loaded" in told["error"]["message"], told
    assert load(server, model, "one")[0] == 400
    assert engines(server) == before and names(server) == ["one"] and ask(server, "one")[0] == 200


def test_a_model_that_goes_lets_its_calls_end(server: Server, model: str) -> None:
    """Unloading waits for what is open; new calls find no such model at once."""
    assert load(server, model, "four")[0] == 201
    answers: list[tuple[int, Any]] = []
    call = threading.Thread(target=lambda: answers.append(ask(server, "four", max_tokens=400)))
    call.start()
    shown = "/admin/models"
    wait_until(lambda: json.loads(server.request("GET", shown)[1])["data"][0]["num_open"] == 1, "the call's begin")
    going = threading.Thread(target=lambda: server.request("DELETE", "/admin/models/four"))
    going.start()
    wait_until(lambda: ask(server, "four")[0] == 404, "the name's end")
    call.join()
    going.join()
    (answer,) = answers
    assert answer[0] == 200 and answer[1]["usage"]["completion_tokens"] == 400


def test_models_from_the_start_share_the_machine(model: str) -> None:
    """Each plans its memory as one of several; a killed engine of one comes back, and the other notices nothing."""
    args = ("--served-model-name", "one", "--add-model", f"two={model}", "--canary", "both=50:one,50:two")
    with Server("--max-num-seqs", "4", *args, model=model) as server:
        assert names(server) == ["one", "two", "both"]
        assert ask(server, "both")[0] == 200
        first, second = engines(server)

        os.kill(second, signal.SIGKILL)
        assert ask(server, "two")[0] == 200 and ask(server, "one")[0] == 200
        assert first in engines(server) and second not in engines(server)
        held = json.loads(server.request("GET", "/admin/models")[1])["data"][0]["memory_bytes"]
        assert sum(held.values()) < 0.6 * free_bytes()


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
