"""KV tiers as their users meet them: what was evicted, restarted, killed or damaged is answered as before, and mostly
without computing it anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import Server, wait_until

from tokenmill import LLM, SamplingParams

ARGS = ("--kv-cache-memory-bytes", "12MiB", "--disable-access-log")
"""A pool that holds two of the prompts."""

MUCH = 180
"""Of the 250 tokens of a prompt."""


def body(number: int) -> dict[str, Any]:
    items = " ".join(f"Item {item} of list {number} costs {item * 7 % 50} coins." for item in range(18))
    return {"prompt": f"List {number}. {items}", "max_tokens": 12, "temperature": 0.8, "seed": 11, "logprobs": 2}


def ask(server: Server, number: int) -> tuple[dict[str, Any], int]:
    """(the choice, cached tokens)"""
    status, text = server.request("POST", "/v1/completions", body(number))
    answer = json.loads(text)
    assert status == 200, answer
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def tiers(server: Server) -> dict[str, dict[str, Any]]:
    status, text = server.request("GET", "/admin/kv/tiers")
    assert status == 200, text
    told: dict[str, dict[str, Any]] = json.loads(text)["tiers"]
    return told


def is_written(server: Server, tier: str, num_blocks: int) -> bool:
    """And the store is there."""
    status, text = server.request("GET", "/admin/kv/tiers")
    return status == 200 and bool(json.loads(text)["tiers"][tier]["blocks"] >= num_blocks)


def store_pid(server: Server) -> int:
    """0: it is not there now."""
    return server._child("tokenmill.cli.kv_store") or 0


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    server._reader.join(10)


@pytest.mark.sampled(1 / 3)
def test_what_the_pool_has_given_up_comes_back_from_host_memory(smollm2: Path) -> None:
    with Server(*ARGS, "--kv-host", "200MB") as server:
        assert "host 190.7 MiB" in server.output and "KV store" in server.output
        first, cached = ask(server, 0)
        assert cached == 0
        for number in range(1, 5):
            assert ask(server, number)[1] < 32
        wait_until(lambda: is_written(server, "host", 60), "blocks in host memory")
        again, cached = ask(server, 0)
        assert again == first and cached > MUCH
        metrics = server.metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] >= cached - 16
        assert metrics["tokenmill:kv_tier_hits_total"] > MUCH // 16 and metrics["tokenmill:kv_store_up"] == 1


@pytest.mark.sampled(1 / 3)
def test_a_restarted_server_answers_from_disk_and_never_from_what_is_damaged(smollm2: Path, tmp_path: Path) -> None:
    """Warmed by the command, over a kill; then with every file changed in places."""
    args = (*ARGS, "--kv-disk", f"{tmp_path / 'kv'}:300MB")
    with Server(*args) as server:
        first, _ = ask(server, 0)
        asked = {"kv_transfer_params": {"do_remote_decode": True}, **body(0), "max_tokens": 1}
        status, text = server.request("POST", "/v1/completions", asked)
        assert status == 200 and json.loads(text)["kv_transfer_params"] is not None, text
        assert tiers(server)["disk"]["blocks"] > MUCH // 16
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
    with Server(*args) as server:
        again, cached = ask(server, 0)
        assert again == first and cached > MUCH
        stop(server)
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            with path.open("r+b") as file:
                for at in range(1 << 16, path.stat().st_size, 100_003):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x40]))
    with Server(*args) as server:
        third, cached = ask(server, 0)
        assert third == first and cached == 0


@pytest.mark.sampled(1 / 3)
def test_what_one_worker_computed_another_gets_from_the_store(smollm2: Path) -> None:
    with Server(*ARGS, "--workers", "2", "--kv-host", "200MB") as server:
        first, _ = ask(server, 0)
        wait_until(lambda: is_written(server, "host", MUCH // 16), "blocks in host memory")
        for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]:
            os.kill(each["pid"], signal.SIGKILL)
        again, cached = ask(server, 0)
        assert again == first and cached > MUCH


@pytest.mark.sampled(1 / 3)
def test_a_store_that_is_killed_or_stopped_costs_time_alone(smollm2: Path) -> None:
    """Under load, again and again: every answer is the one without; then the store is there again."""
    with Server(*ARGS) as server:
        expected = [ask(server, number)[0] for number in range(4)]
    with Server(*ARGS, "--kv-host", "200MB") as server:
        wrong: list[str] = []
        is_over = threading.Event()

        def load(first: int) -> None:
            number = first
            while not is_over.is_set():
                number = (number + 1) % len(expected)
                if ask(server, number)[0] != expected[number]:
                    wrong.append(f"the answer to {number}")

        threads = [threading.Thread(target=load, args=(first,)) for first in (0, 2)]
        for thread in threads:
            thread.start()
        try:
            for kind in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
                wait_until(lambda: is_written(server, "host", 30), "blocks in host memory")
                before = store_pid(server)
                os.kill(before, kind)
                if kind == signal.SIGSTOP:
                    wait_until(lambda: server.metrics()["tokenmill:kv_store_up"] == 0, "it is missed")
                    os.kill(before, signal.SIGCONT)
                    wait_until(lambda: server.metrics()["tokenmill:kv_store_up"] == 1, "it is back")
                else:
                    wait_until(lambda before=before: store_pid(server) not in (0, before), "another")  # type: ignore[misc]
        finally:
            is_over.set()
            for thread in threads:
                thread.join(60)
        assert not wrong
        wait_until(lambda: server.metrics()["tokenmill:kv_store_up"] == 1, "the store is back")


def test_a_model_in_this_process_has_tiers_too(smollm2: Path, tmp_path: Path) -> None:
    prompts = [str(body(number)["prompt"]) for number in range(5)]
    sampling = SamplingParams(temperature=0, max_tokens=8)
    options: dict[str, Any] = {"kv_cache_memory_bytes": "12MiB"}
    with LLM("smollm2", **options) as llm:
        expected = [each.token_ids for each in llm.generate(prompts, sampling)]
    with LLM("smollm2", kv_host="200MB", kv_disk=f"{tmp_path / 'kv'}:200MB", **options) as llm:
        assert dict(llm.ready.facts)["kv_tiers"].startswith("host")
        for _ in range(2):
            assert [llm.generate(prompt, sampling)[0].token_ids for prompt in prompts] == expected
        wait_until(lambda: llm.generate(prompts[0], sampling)[0].usage.cached_tokens > MUCH, "it is fetched", 20)


@pytest.mark.sampled(1 / 3)
def test_servers_share_a_store_that_outlives_them_and_refuses_what_is_unlike(smollm2: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    command = [sys.executable, "-m", "tokenmill.cli.main", "kv", "serve", "--socket", path, "--kv-host", "100MB"]
    with Server(*ARGS, "--kv-store", path) as server:  # before there is one
        assert "none yet: no KV store answers" in server.output
        store = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: is_written(server, "host", 0), "the server joins")
            number = 0
            while not is_written(server, "host", 1):  # what an engine computes before it has joined is not stored
                ask(server, number := number + 1)
            first, _ = ask(server, 0)
            wait_until(lambda: is_written(server, "host", 2 * (MUCH // 16)), "blocks of two prompts in host memory")
            stop(server)
            with Server(*ARGS, "--kv-store", path) as other:
                again, cached = ask(other, 0)
                assert again == first and cached > MUCH
            unlike = Server(*ARGS, "--kv-store", path, "--kv-cache-dtype", "int8")
            with pytest.raises(AssertionError, match="KV of another model"), unlike:
                pass
        finally:
            store.send_signal(signal.SIGTERM)
            assert store.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--kv-disk", "kv:4GB", "--kv-save", "kv"), "both name the folder"),
        (("--kv-host", "4GB", "--kv-store", "socket"), "tokenmill kv serve"),
        (("--kv-quota", "1GB"), "need a tier"),
        (("--kv-host", "900TB"), "more than"),
        (("--kv-remote", "redis://127.0.0.1:1"), "--kv-key-file"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(AssertionError, match=says), Server(*args):
        pass
