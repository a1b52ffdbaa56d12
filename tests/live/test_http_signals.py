"""Signals to a serving process: the first lets open calls finish for as long as told, the second ends at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = """
import asyncio, sys
from scripted import Served
served = Served(lambda prompt: "abcdefghij" * 10, step_s=float(sys.argv[1]), drain_s=float(sys.argv[2]))
async def main():
    asyncio.get_running_loop().create_task(tell())
    await served._main()
async def tell():
    while not served._started.is_set():
        await asyncio.sleep(0.01)
    print(served.address[1], flush=True)
asyncio.run(main())
print("ended well", flush=True)
"""


class Child:
    """A server process in the middle of streaming one answer of 100 tokens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.stdout = process.stdout
        self.port = int(self.stdout.readline())
        self.raw = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        body = json.dumps({"prompt": "x", "max_tokens": 100, "stream": True}).encode()
        self.raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.text = self.raw.recv(100)

    def rest(self) -> str:
        """All that the server still sends."""
        with self.raw:
            while part := self.raw.recv(65536):
                self.text += part
        return self.text.decode()

    def end(self) -> tuple[int, str]:
        return self.process.wait(20), self.stdout.read()


@contextlib.contextmanager
def streaming(step_s: float, drain_s: float) -> Iterator[Child]:
    command = [sys.executable, "-c", SERVER, str(step_s), str(drain_s)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *(os.path.abspath(path) for path in sys.path)])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    ) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def test_the_first_signal_drains() -> None:
    with streaming(step_s=0.005, drain_s=20) as child:
        child.process.send_signal(signal.SIGTERM)
        assert "[DONE]" in child.rest()
        assert child.end() == (0, "ended well\n")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", child.port), timeout=5)


def test_what_does_not_finish_in_time_ends_with_an_error_event() -> None:
    with streaming(step_s=0.2, drain_s=0.3) as child:
        child.process.send_signal(signal.SIGTERM)
        text = child.rest()
        assert "[DONE]" not in text and "shutting down" in text.split("data: ")[-1]
        assert child.end() == (0, "ended well\n")


def test_the_second_signal_ends_at_once() -> None:
    with streaming(step_s=0.2, drain_s=600) as child:
        child.process.send_signal(signal.SIGTERM)
        child.process.send_signal(signal.SIGINT)
        text = child.rest()
        assert "[DONE]" not in text and "shutting down" in text.split("data: ")[-1]
        assert child.end() == (0, "ended well\n")
