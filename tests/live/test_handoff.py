"""Prompts computed by one process and answers drawn by another, and streams that move when theirs is drained: answers
are those of one engine, by reading of memory and over TCP."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import kill
import pytest
from serving import Server, wait_until

SMALL = (*kill.ARGS, "--threads", "1", "--max-queue-s", "60")
BODIES = [body for body in kill.calls(random.Random(7), 600) if "stop_of" not in body]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """What an engine alone says."""
    with Server(*SMALL, model=str(folder)) as server:
        return answers(server)


@pytest.fixture(scope="module", params=["memory", "tcp"])
def two_pools(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    args = ("--prefill-workers", "1", "--decode-workers", "2", "--disaggregation", "always")
    with Server(*SMALL, *args, "--kv-transfer", request.param, model=str(folder)) as server:
        wait_until(lambda: len(server.forked_pids()) == 3, "three engines")
        yield server


def answers(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return [said.key() for said in pool.map(lambda body: kill.ask(server, body), BODIES)]


def count(server: Server, name: str, *labels: str) -> float:
    lines = server.request("GET", "/metrics")[1].splitlines()
    wanted = (f"tokenmill:{name}{{", *labels)
    return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))


def moved(server: Server, reason: str) -> float:
    """How many requests were, for this reason."""
    return count(server, "requests_moved_total", 'outcome="moved"', f'reason="{reason}"')


def test_answers_of_two_pools_are_those_of_one_engine(two_pools: Server, expected: list[str]) -> None:
    assert answers(two_pools) == expected
    assert count(two_pools, "moved_kv_tokens_total") > 100 and moved(two_pools, "split") >= 3


def running(server: Server) -> dict[str, int]:
    """How many answers each worker that serves has under way."""
    workers = json.loads(server.request("GET", "/admin/workers")[1])["workers"]
    return {each["id"]: each["num_running"] for each in workers if each["state"] == "ready"}


def is_busy_or_done(server: Server, name: str, found: Future[list[str]]) -> bool:
    """Whether this worker has answers and the others are there to take them, or nobody has any more."""
    seen = running(server)
    return found.done() or (len(seen) == 3 and seen[name] > 0)


def drains(server: Server, name: str) -> bool:
    return server.request("POST", f"/admin/workers/{name}/drain?restart=true")[0] == 202


def test_answers_survive_a_drain(two_pools: Server, expected: list[str]) -> None:
    """Each decode worker is drained while it answers, and started again; until one was drained that still had some."""
    for _ in range(8):
        wait_until(lambda: len(running(two_pools)) == 3, "three workers that serve")
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(answers, two_pools)
            for name in ("w1", "w2"):
                wait_until(partial(is_busy_or_done, two_pools, name, found), "requests")
                wait_until(partial(drains, two_pools, name), "the worker, which may just be joining again, drains")
                wait_until(lambda: len(two_pools.forked_pids()) == 3, "three engines")
            assert found.result() == expected
        if moved(two_pools, "drain"):
            return
    raise AssertionError("no drained worker had anything to give away")
