"""Engines on other machines, played by this one: a front end and workers over TCP, with kills, strangers and TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from front_ends import SECRET, Worker
from serving import Server, wait_until

from links import certificate
from ports import free_port

SMALL = ("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "1024", "--threads", "1")
NUM_STREAMS = 8


def start_worker(port: int, *args: str, env: dict[str, str] | None = None, host: str = "127.0.0.1") -> Worker:
    return Worker("smollm2", port, args=args, env=env, kv=SMALL, host=host)


def front_end(port: int, *args: str, env: dict[str, str] = SECRET) -> Server:
    return Server("--no-engine", "--listen-workers", f"127.0.0.1:{port}", *args, env=env)


def texts(server: Server, max_tokens: int = 100) -> Iterator[str]:
    """Of so many calls at once, each with a seed of its own."""

    def call(seed: int) -> str:
        body = {
            "prompt": f"Story {seed}:",
            "max_tokens": max_tokens,
            "temperature": 1,
            "seed": seed,
            "ignore_eos": True,
        }
        status, answer = server.request("POST", "/v1/completions", body, timeout_s=120)
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["text"]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield from pool.map(call, range(NUM_STREAMS))


def running(server: Server) -> float:
    return server.metrics()["vllm:num_requests_running"]


def num_ready(server: Server) -> int:
    """Workers that the front end gives work to; one says that it has joined a moment before it is."""
    workers = json.loads(server.request("GET", "/admin/workers")[1])["workers"]
    return sum(each["state"] == "ready" for each in workers)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pair(smollm2: Path, port: int) -> Iterator[tuple[Server, Worker]]:
    """The worker is there first: it tries until the front end is."""
    with start_worker(port) as worker, front_end(port) as server:
        yield server, worker


def test_a_killed_worker_loses_nothing_and_one_that_comes_back_is_taken_in(
    pair: tuple[Server, Worker], port: int
) -> None:
    server, stays = pair
    expected = list(texts(server, 400))
    with start_worker(port) as victim, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: num_ready(server) == 2, "the second worker")
        answers = pool.submit(lambda: list(texts(server, 400)))
        wait_until(lambda: running(server) >= NUM_STREAMS, "all to run")
        victim.process.send_signal(signal.SIGKILL)
        assert answers.result(120) == expected
    wait_until(lambda: "are resumed" in server.output, "the front end's line")
    assert " 0 are resumed" not in server.output, "the victim had nothing to do"
    with start_worker(port) as again:
        wait_until(lambda: again.has_said("Joined"), "another in its place")
    assert not stays.has_said("left") and server.request("GET", "/health")[0] == 200


def test_a_worker_told_to_end_finishes_what_it_has(pair: tuple[Server, Worker], port: int) -> None:
    server, _ = pair
    expected = list(texts(server))
    resumed = server.output.count("are resumed")
    with start_worker(port) as leaver, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: num_ready(server) == 2, "the second worker")
        answers = pool.submit(lambda: list(texts(server)))
        wait_until(lambda: running(server) >= NUM_STREAMS, "all to run")
        leaver.process.send_signal(signal.SIGTERM)
        assert leaver.ended() == 0
        assert answers.result(120) == expected
    assert server.output.count("are resumed") == resumed


def test_who_lacks_the_secret_or_computes_otherwise_is_refused_at_both_ends(
    pair: tuple[Server, Worker], port: int
) -> None:
    server, _ = pair
    with start_worker(port, env={"TOKENMILL_WORKER_SECRET": "another secret of the tests"}) as stranger:
        assert stranger.ended() == 2
        assert stranger.says("refuses this worker: The secret is not this front end's.")
        assert sum("The secret is not" in line for line in stranger.lines) == 1
        wait_until(lambda: "does not have this front end's secret" in server.output, "the front end's line")
    with start_worker(port, "--kv-cache-dtype", "f32") as other:
        assert other.ended() == 2
        assert other.says("It computes otherwise")
        wait_until(lambda: "It computes otherwise" in server.output, "the front end's line")
    assert not any("secret of the tests" in line for line in (*server.lines, *stranger.lines))
    assert server.request("GET", "/health")[0] == 200


def test_a_worker_outlives_its_front_end_and_joins_the_next(smollm2: Path, tmp_path: Path) -> None:
    """With TLS: the front end is killed under streams; what the worker had is forgotten, its prefix cache is not."""
    port, pem, secret = free_port(), tmp_path / "both.pem", tmp_path / "secret"
    pem.write_text(certificate())
    secret.write_text("a secret of the tests only\n")
    secret.chmod(0o600)
    flags = ("--worker-tls-cert", str(pem), "--worker-tls-ca", str(pem), "--worker-secret-file", str(secret))
    prompt = {"prompt": "word " * 200, "max_tokens": 1}
    with start_worker(port, *flags, env={}) as worker:
        with front_end(port, *flags, env={}) as server, ThreadPoolExecutor(1) as pool:
            expected = list(texts(server))
            server.request("POST", "/v1/completions", prompt)
            lost = pool.submit(lambda: list(texts(server)))
            wait_until(lambda: running(server) >= NUM_STREAMS, "all to run")
            os.killpg(server.process.pid, signal.SIGKILL)
            with pytest.raises(Exception):  # noqa: B017 - whatever the HTTP library says
                lost.result(60)
        wait_until(lambda: worker.has_said("cannot be reached"), "the worker's line")
        with front_end(port, *flags, env={}) as server:
            assert worker.says("Joined", 2)
            usage = json.loads(server.request("POST", "/v1/completions", prompt)[1])["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 192
            assert list(texts(server)) == expected
            assert server.idle()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serve", "--listen-workers", "127.0.0.1:0"), "need a secret that they share"),
        (("serve", "--no-engine"), "needs --listen-workers"),
        (("serve", "--listen-workers", "0.0.0.0:0"), "is not this machine"),
        (("serve", "--listen-workers", "127.0.0.1:0", "--no-engine", "--kv-save", "x"), "give it to workers"),
        (("worker", "--connect", "192.0.2.1:7000"), "is not this machine"),
        (("worker",), "needs --connect"),
        (("worker", "--connect", "here"), "must be HOST:PORT"),
        (("worker", "--connect", "127.0.0.1:1", "--worker-tls-cert", "x.pem"), "go together"),
    ],
)
def test_what_cannot_be_linked_is_one_line_and_exit_code_2(args: tuple[str, ...], said: str) -> None:
    env = {**os.environ, **(SECRET if "need a secret" not in said else {})}
    command = [sys.executable, "-m", "tokenmill.cli.main", args[0], "smollm2", *args[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
