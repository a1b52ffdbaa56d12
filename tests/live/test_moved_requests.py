"""Requests that two engines compute, and requests that change engines while they run: what clients get is the same."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kill
import pytest
from serving import Server, wait_until

SMALL = (*kill.ARGS, "--threads", "1", "--max-queue-s", "60")
BODIES = [body for body in kill.calls(random.Random(7), 300) if body["model"] == "tiny" and "stop_of" not in body]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """What an engine alone says."""
    with Server(*SMALL, model=str(folder)) as server:
        return answers(server)


def answers(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return [said.key() for said in pool.map(lambda body: kill.ask(server, body), BODIES)]


def moved(server: Server, reason: str) -> float:
    """How many requests were, for this reason."""
    lines = server.request("GET", "/metrics")[1].splitlines()
    wanted = ("requests_moved_total{", 'outcome="moved"', f'reason="{reason}"')
    return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))


def test_a_prompt_computed_by_one_engine_and_its_answer_by_another_are_what_one_says(
    folder: Path, expected: list[str]
) -> None:
    args = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregation", "always", "--migration", "off")
    with Server(*SMALL, *args, model=str(folder)) as server:
        wait_until(lambda: "1 prefill" in server.output and "1 decode" in server.output, "both engines")
        assert answers(server) == expected
        assert moved(server, "split") >= 3, server.request("GET", "/metrics")[1]


def test_running_requests_leave_a_worker_that_is_drained_with_what_they_have(folder: Path, expected: list[str]) -> None:
    with Server(*SMALL, "--workers", "2", model=str(folder)) as server:
        wait_until(lambda: len(workers(server)) == 2, "both engines")
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answers, server)
            wait_until(lambda: server.metrics()["vllm:num_requests_running"] >= 4, "requests to run")
            leaver = workers(server)[0]
            assert server.request("POST", f"/admin/workers/{leaver}/drain")[0] == 202
            assert answered.result(60) == expected
        assert moved(server, "drain") >= 1, server.request("GET", "/metrics")[1]


def workers(server: Server) -> list[str]:
    told = server.request("GET", "/admin/workers")[1]
    shown = json.loads(told) if isinstance(told, str) else told
    return [each["id"] for each in shown["workers"] if each["state"] == "ready"]
