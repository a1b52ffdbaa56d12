"""What comes to the workers' port and is no worker, and what is done to the bytes of one that is: it costs a line, and
streams do not notice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from front_ends import SECRET, Worker, front_end
from kill import ask, write_model
from serving import Server, wait_until

from ports import free_port
from tokenmill.core.mac import TAMPERED
from tokenmill.net.handshake import GREETING_BYTES, PROTOCOL

BODY: dict[str, Any] = {
    "model": "tiny", "prompt": list(range(3, 60)), "max_tokens": 3000, "seed": 1, "ignore_eos": True, "stream": True,
}  # fmt: skip
HELLO = b"tokenmill" + PROTOCOL.to_bytes(2, "little") + b"worker" + bytes(32)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


ATTACKS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "4 GB announced": (2**32 - 1).to_bytes(4, "little") + b"x" * 1000,
    "half a hello": frame(HELLO)[:20],
    "a hello and nothing": frame(HELLO),
    "a hello and a wrong proof": frame(HELLO) + frame(bytes(32)),
    "a hello of another version": frame(HELLO.replace(PROTOCOL.to_bytes(2, "little"), b"\x01\x00")),
    "keepalives": bytes(4) * 500,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[tuple[int, Server]]:
    port = free_port()
    with Worker(model, port), front_end(model, port) as server:
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "the worker")
        yield port, server


@pytest.mark.sampled(1 / 3)
def test_strangers_are_turned_away_and_a_stream_goes_on(served: tuple[int, Server]) -> None:
    """1,000 connections, some of which stay as long as they may, while an answer is streamed."""
    port, server = served
    expected = ask(server, BODY).key()
    rng = random.Random(1)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        answer = pool.submit(lambda: [ask(server, BODY).key() for _ in range(3)])
        for number in range(1000):
            end = socket.create_connection(("127.0.0.1", port), timeout=10)
            with contextlib.suppress(OSError):
                end.sendall(rng.choice([*ATTACKS.values(), rng.randbytes(rng.randrange(200))]))
            if number % 10:
                end.close()
            else:
                held.enter_context(end)
        assert answer.result(120) == [expected] * 3
        assert server.request("GET", "/health")[0] == 200
        said = [line for line in server.lines if "joined" in line or "has left:" in line]
        assert len(said) == 1, "the worker stayed, and nobody else got in"
        with Worker(server.model, port, env={"TOKENMILL_WORKER_SECRET": "another secret of the tests"}) as stranger:
            assert stranger.ended() == 2
    assert ask(server, BODY).key() == expected


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_each_costs_its_own_connection_and_one_line(served: tuple[int, Server], attack: bytes) -> None:
    port, server = served
    before = len(server.lines)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as end:
        end.sendall(attack)
        end.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while end.recv(4096):
                pass
    wait_until(lambda: len(server.lines) > before, "the line")
    assert "Traceback" not in server.output and server.request("GET", "/health")[0] == 200


def test_a_taken_port_is_one_line_and_exit_code_2(served: tuple[int, Server]) -> None:
    port, server = served
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", server.model, "--port", "0", "--no-engine"]
    done = subprocess.run(
        [*command, "--listen-workers", f"127.0.0.1:{port}"],
        env={**os.environ, **SECRET, "TOKENMILL_STATE": str(Path(server.model) / "state")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "in use" in done.stderr and "Traceback" not in done.stderr


def test_a_worker_of_another_model_is_refused_with_the_reason(served: tuple[int, Server], tmp_path: Path) -> None:
    port, server = served
    other = write_model(tmp_path)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with Worker(str(other), port) as stranger:
        assert stranger.ended() == 2
        assert stranger.says("other weights than this front end's")
    with Worker(server.model, port, args=("--kv-cache-dtype", "f32")) as stranger:
        assert stranger.ended() == 2
        assert stranger.says("Its --kv-cache-dtype is f32; the front end was given int8.")
    assert json.loads(server.request("GET", "/admin/workers")[1])["workers"][0]["state"] == "ready"


def test_the_flags_of_a_front_end_without_an_engine_decide_who_may_join(model: str) -> None:
    """Not the first that comes: one with another type of KV ends, and the right one serves."""
    port = free_port()
    flags = ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", "4096", "--kv-cache-dtype")
    with Worker(model, port, kv=(*flags, "int8")) as stranger, Worker(model, port, kv=(*flags, "f16")):
        server = Server(
            "--no-engine", "--listen-workers", f"127.0.0.1:{port}", *flags, "f16", model=model, env=SECRET
        )  # fmt: skip
        with server:
            assert server.request("GET", "/health")[0] == 200
            assert stranger.ended() == 2
            assert stranger.says("Its --kv-cache-dtype is int8; the front end was given f16.")


class NoisyWire:
    """Passes connections on to `port`, and changes a bit of each after some kilobytes, until `num_left` were."""

    def __init__(self, port: int, num_flips: int, seed: int) -> None:
        self._to_port = port
        self.num_left = num_flips
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> NoisyWire:
        self._begin(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()

    def _begin(self, target: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._ends.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self._to_port), timeout=60)
                except ConnectionRefusedError:  # the front end does not listen yet
                    near.close()
                    continue
                self._ends.append(far)
                self._begin(self._pass, near, far)
                self._begin(self._pass, far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        quiet_bytes = GREETING_BYTES + self._rng.randrange(10_000)
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if 0 <= quiet_bytes < len(data) and self.num_left > 0:
                    self.num_left -= 1
                    data[quiet_bytes] ^= 1 << self._rng.randrange(8)
                quiet_bytes -= len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.sampled(1 / 3)
def test_bits_that_change_on_the_way_end_links_and_no_stream_says_another_thing(model: str) -> None:
    """Both workers come by wires that flip three bits each. Streams go on in the other worker, or wait for one."""
    port = free_port()
    bodies = [BODY | {"seed": seed, "max_tokens": 500} for seed in range(6)]
    with contextlib.ExitStack() as held:
        wires = [held.enter_context(NoisyWire(port, 0, seed)) for seed in range(2)]
        for wire in wires:
            held.enter_context(Worker(model, wire.port))
        server = held.enter_context(front_end(model, port))
        wait_until(lambda: server.output.count("has joined") == 2, "both workers")
        expected = [ask(server, body).key() for body in bodies]
        for wire in wires:
            wire.num_left = 3
        with ThreadPoolExecutor(len(bodies)) as pool:
            while any(wire.num_left for wire in wires):
                assert [said.key() for said in pool.map(lambda body: ask(server, body), bodies)] == expected
        assert server.output.count(TAMPERED) >= 1
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "a worker")
