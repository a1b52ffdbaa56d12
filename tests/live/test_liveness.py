"""An engine that is stopped is taken out while its requests go on in another; one that is only slow is left alone."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kill import ARGS, ask, write_model
from serving import Server, wait_until

BODY: dict[str, Any] = {
    "model": "tiny", "prompt": list(range(3, 60)), "max_tokens": 3000, "seed": 1, "ignore_eos": True, "stream": True,
}  # fmt: skip


@pytest.mark.sampled(1 / 3)
def test_a_stopped_engine_is_replaced_and_an_idle_one_that_was_stopped_is_not(tmp_path: Path) -> None:
    """What is idle is found out when it gets work and does not do it."""
    with Server(*ARGS, model=str(write_model(tmp_path))) as server, ThreadPoolExecutor(1) as pool:
        expected = ask(server, BODY)
        first = server.engine_pid
        assert first is not None and expected.status == 200
        answer = pool.submit(ask, server, BODY)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] > 0, "the call to run")
        os.kill(first, signal.SIGSTOP)
        assert answer.result(60).key() == expected.key()
        second = server.engine_pid
        assert second not in (None, first) and "It has work and has said nothing for" in server.output
        assert second is not None
        wait_until(server.idle, "nothing to be open")
        os.kill(second, signal.SIGSTOP)
        answer = pool.submit(ask, server, BODY)
        assert answer.result(60).key() == expected.key()
        assert server.engine_pid not in (None, second)


@pytest.mark.sampled(1 / 3)
@pytest.mark.slow
def test_a_long_prefill_is_no_false_alarm(smollm2: Path) -> None:
    """8,000 tokens in one step, which takes longer than the limit, and many short ones beside a second such prompt."""
    flags = ("--kv-cache-memory-bytes", "512MiB", "--max-model-len", "8192", "--max-num-batched-tokens", "8192")
    prompts = [{"prompt": [1000 + seed] * 8000, "max_tokens": 4, "ignore_eos": True} for seed in range(2)]
    with Server(*flags, "--threads", "1", "--liveness-s", "6") as server, ThreadPoolExecutor(2) as pool:
        engine = server.engine_pid
        for answer in pool.map(lambda body: server.request("POST", "/v1/completions", body, timeout_s=700), prompts):
            assert answer[0] == 200 and json.loads(answer[1])["usage"]["completion_tokens"] == 4
        assert server.engine_pid == engine and "taken out" not in server.output
