"""Two front ends on one set of two workers: both serve, and what happens to one of them the other does not notice."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from front_ends import Worker, front_end
from kill import ask, write_model
from serving import Server, wait_until

from ports import free_port

NUM_CALLS = 4


def bodies(seed: int, max_tokens: int = 1500) -> list[dict[str, Any]]:
    """Calls with logprobs, of other prompts for each front end."""
    return [
        {"model": "tiny", "prompt": [seed, number + 3, *range(3, 40)], "max_tokens": max_tokens, "seed": number,
         "ignore_eos": True, "stream": True, "logprobs": 1}
        for number in range(NUM_CALLS)
    ]  # fmt: skip


def answers(server: Server, asked: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(NUM_CALLS) as pool:
        said = list(pool.map(lambda body: ask(server, body), asked))
    assert all(each.status == 200 and not each.error for each in said)
    return [each.key() for each in said]


def running(server: Server) -> float:
    return server.metrics()["vllm:num_requests_running"]


def workers(server: Server) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def pair(model: str) -> Iterator[tuple[int, list[Worker], Server]]:
    """The second front end's port, the workers of both, and the first, which stays."""
    ports = free_port(), free_port()
    with (
        Worker(model, *ports, args=("--worker-id", "one")) as one,
        Worker(model, *ports, args=("--worker-id", "two", "--pool", "spare")) as two,
        front_end(model, ports[0]) as first,
    ):
        wait_until(lambda: len(workers(first)) == 2, "both workers")
        yield ports[1], [one, two], first


@pytest.fixture(scope="module")
def second(pair: tuple[int, list[Worker], Server], model: str) -> Iterator[tuple[int, Server, Server]]:
    """The second front end's next life, which stays, too: its port, it, and the first."""
    port, _, first = pair
    with front_end(model, port) as server:
        wait_until(lambda: len(workers(server)) == 2, "both workers again")
        yield port, server, first


@pytest.mark.sampled(1 / 3)
def test_a_killed_front_end_takes_its_requests_along_and_nothing_else(
    pair: tuple[int, list[Worker], Server], model: str
) -> None:
    """The other's streams go on as if they were alone, and the workers are free of what the dead one had asked for."""
    port, both, first = pair
    mine, others = bodies(3), bodies(5)
    expected = answers(first, mine)
    with front_end(model, port) as second:
        wait_until(lambda: len(workers(second)) == 2, "both workers")
        assert answers(second, others) == answers(first, others), "whoever asks, and of whichever worker"
        with ThreadPoolExecutor(2) as pool:
            lost = pool.submit(answers, second, bodies(7, 3000))
            wait_until(lambda: running(second) >= NUM_CALLS, "the second's calls to run")
            asked = pool.submit(answers, first, mine)
            wait_until(lambda: running(first) >= NUM_CALLS, "the first's calls to run")
            os.killpg(second.process.pid, signal.SIGKILL)
            assert asked.result(120) == expected
            with pytest.raises(Exception):  # noqa: B017 - whatever the HTTP library says
                lost.result(60)
    wait_until(lambda: running(first) == 0 and first.idle(), "the workers to be free")
    assert "resumed" not in first.output and "taken out" not in first.output
    assert all(not worker.has_said("Traceback") for worker in both)


def test_a_pool_that_one_front_end_chooses_is_known_to_both(second: tuple[int, Server, Server]) -> None:
    _, it, first = second
    assert workers(it)["two"]["pool"] == "spare"
    assert it.request("POST", "/admin/workers/two/pool", {"pool": "decode"})[0] == 200
    wait_until(lambda: workers(first)["two"]["pool"] == "decode", "the first to hear of it")
    assert first.request("POST", "/admin/workers/two/pool", {"pool": "mixed"})[0] == 200
    wait_until(lambda: workers(it)["two"]["pool"] == "mixed", "the second to hear of it")


def test_a_worker_that_leaves_finishes_what_it_has(second: tuple[int, Server, Server], model: str) -> None:
    port, it, first = second
    expected = answers(first, bodies(9))
    with Worker(model, port, args=("--worker-id", "three")) as leaver, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: len(workers(it)) == 3, "the workers")
        asked = pool.submit(answers, it, bodies(9))
        wait_until(lambda: running(it) >= NUM_CALLS, "all to run")
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.ended() == 0
        assert asked.result(120) == expected
    assert "three" not in workers(it) and "resumed" not in it.output


def test_a_later_life_of_a_worker_replaces_it(second: tuple[int, Server, Server], model: str) -> None:
    """The earlier one is refused from then on, and ends when nobody else wants it."""
    port, it, _ = second
    with Worker(model, port, args=("--worker-id", "four")) as early:
        wait_until(lambda: "four" in workers(it), "the early life")
        with Worker(model, port, args=("--worker-id", "four")) as late:
            wait_until(lambda: late.has_said("Joined"), "the later life")
            wait_until(lambda: workers(it)["four"]["pid"] == late.process.pid, "the later life to serve")
            assert early.ended() == 2
            assert early.says("A later life of the worker 'four' has joined")
            assert it.request("GET", "/health")[0] == 200


@pytest.mark.sampled(1 / 3)
def test_adapters_reach_workers_that_have_no_files_of_theirs(model: str, tmp_path: Path) -> None:
    """Late joiners too. One that had them in an earlier life needs no files of the front end any more."""
    port = free_port()
    adapter = tmp_path / "lora"
    shutil.copytree(Path(model) / "lora", adapter)
    caches = [{"TOKENMILL_CACHE": str(tmp_path / name)} for name in ("first", "second")]
    lora = ("--enable-lora", "--lora-modules", f"lora={adapter}")
    asked = [{**body, "model": "lora"} for body in bodies(3, 200)]
    with (
        Worker(model, port, args=("--enable-lora", "--worker-id", "one"), env=caches[0]) as one,
        front_end(model, port, *lora) as server,
    ):
        expected = answers(server, asked)
        assert expected != answers(server, bodies(3, 200)), "the adapter changes nothing"
        assert len(list((tmp_path / "first" / "adapters").iterdir())) == 1
        with Worker(model, port, args=("--enable-lora", "--worker-id", "two"), env=caches[1]):
            wait_until(lambda: len(workers(server)) == 2, "the late joiner")
            one.process.kill()
            assert answers(server, asked) == expected
        adapter.rename(tmp_path / "moved")
        with Worker(model, port, args=("--enable-lora", "--worker-id", "three"), env=caches[0]):
            wait_until(lambda: "three" in workers(server), "one that has the adapter from before")
            assert answers(server, asked) == expected
