"""`serve --launcher ray` on one machine: two actors serve, one dies, and no stream notices but by a pause."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Server, wait_until

from tokenmill.cli.launchers.child import RUNNING
from tokenmill.cli.launchers.ray_options import RayOptions
from tokenmill.cli.launchers.ray_workers import UNREACHABLE, RayWorkers, WorkerCommand

ray = pytest.importorskip("ray", reason="there is no Ray here")

SMALL = ("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "1024")
NUM_STREAMS, NUM_TOKENS = 6, 150


class RayServer(Server):
    """Ray gives a start up after half a minute, which a busy machine may take: then it is started again."""

    def __init__(self, *args: str, **options: Any) -> None:
        super().__init__("--launcher", "ray", *args, **options)

    def __enter__(self) -> Server:
        for _ in range(2):
            try:
                return super().__enter__()
            except AssertionError:
                if "timed out during startup" not in self.output:
                    raise
                self.lines.clear()
        return super().__enter__()


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """Folders of its own, with short names: Ray's sockets lie in one of them."""
    cache = os.environ.get("TOKENMILL_CACHE", str(Path.home() / ".cache" / "tokenmill"))
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        yield {"TMPDIR": folder, "HOME": folder, "TOKENMILL_CACHE": cache}
        assert not [each.name for each in Path(folder).iterdir() if each.name.startswith("tm-ray-")]


@pytest.fixture(scope="module")
def server(smollm2: Path, env: dict[str, str]) -> Iterator[Server]:
    with RayServer("--workers", "2", *SMALL, model=str(smollm2), env=env) as running:
        wait_until(lambda: running.output.count("has joined") >= 2, "both workers")
        yield running


def workers(server: Server) -> dict[str, int]:
    """Processes of workers by their id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "worker" in line and any(each == f"--connect={joined_at(server)}" for each in line):
            found[next(each for each in line if each.startswith("--worker-id="))] = int(entry.name)
    return found


def joined_at(server: Server) -> str:
    found = re.search(r"workers may join at (\S+)", server.output)
    assert found is not None, server.output
    return found[1]


def complete(server: Server, number: int) -> str:
    body = {"prompt": f"Once upon a time, {number}", "max_tokens": NUM_TOKENS, "seed": number, "ignore_eos": True,
            "temperature": 0.8, "stream": True}  # fmt: skip
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def all_texts(server: Server) -> list[str]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: complete(server, number), range(NUM_STREAMS)))


def test_a_head_that_does_not_answer_ends_nothing_while_an_actor_does() -> None:
    """The server goes on as long as somebody of Ray answers; what the head says of this machine decides."""
    answers: list[object] = []

    def nodes() -> object:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    subject = RayWorkers(RayOptions(), WorkerCommand("model", [], {}), ["mixed"] * 2, 1.0)
    node = SimpleNamespace(get_node_id=lambda: "here")
    subject._ray = SimpleNamespace(nodes=nodes, exceptions=ray.exceptions, get_runtime_context=lambda: node)
    answers += [ray.exceptions.RaySystemError("gone")] * 3 + [[{"NodeID": "here", "Alive": alive}] for alive in (1, 0)]
    found = []
    for states in ({}, {0: UNREACHABLE, 1: RUNNING}, {0: UNREACHABLE, 1: UNREACHABLE}, {0: UNREACHABLE}, {0: RUNNING}):
        subject._states = states
        found.append(asyncio.run(subject._is_node_alive()))
    assert found == [True, True, False, True, False]


@pytest.mark.sampled(1 / 2)
@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the worker", "its actor"])
def test_two_actors_serve_and_a_kill_loses_no_stream(server: Server, whose: str) -> None:
    expected = all_texts(server)
    before = workers(server)
    assert len(before) == 2
    pid = before["--worker-id=ray-0"]
    victim = pid if whose == "the worker" else int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    num_joined = server.output.count("has joined")
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = [pool.submit(complete, server, number) for number in range(NUM_STREAMS)]
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == NUM_STREAMS, "all to run")
        os.kill(victim, signal.SIGKILL)
        assert [text.result() for text in texts] == expected
    wait_until(lambda: server.output.count("has joined") > num_joined, "the worker's return")
    wait_until(lambda: len(workers(server)) == 2, "both workers")
    after = workers(server)
    assert after["--worker-id=ray-0"] != pid and after["--worker-id=ray-1"] == before["--worker-id=ray-1"]
    assert all_texts(server) == expected


@pytest.mark.sampled(1 / 3)
def test_nothing_is_left_behind(smollm2: Path, env: dict[str, str]) -> None:
    with RayServer(*SMALL, model=str(smollm2), env=env) as running:
        wait_until(lambda: len(workers(running)) == 1, "the worker")
        pids = [*workers(running).values(), *running.pids()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of all")


@pytest.mark.sampled(1 / 3)
def test_a_server_whose_ray_has_died_ends_for_its_supervisor(smollm2: Path, env: dict[str, str]) -> None:
    """Without the raylet no actor can be reached or started; to wait for one would be to wait for ever."""
    with RayServer(*SMALL, model=str(smollm2), env=env) as running:
        pids = running.pids()
        (raylet,) = (pid for pid in pids if b"/raylet/raylet\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(raylet, signal.SIGKILL)
        assert running.process.wait(90) == 2
        assert "Ray's process of this machine (raylet) has ended" in running.output
        assert "Traceback" not in running.output


def test_a_worker_that_cannot_start_is_told_of(smollm2: Path, env: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match=r"No worker can be started: .*--kv-cache-memory-bytes"):
        RayServer("--kv-cache-memory-bytes", "1KiB", model=str(smollm2), env=env).__enter__()
