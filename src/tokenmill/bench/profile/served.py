"""A server for `bench profile`: started, streamed from, and its processes' processor time read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ...core.errors import TokenmillError

START_S = 120.0


class Server:
    """A context in which `command`, given a --port, serves on 127.0.0.1."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process = subprocess.Popen([*self._command, "--port", str(self.port)], env=self._environment)
        give_up_s = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.__exit__(None, None, None)
                raise TokenmillError("The server to be profiled did not start.")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self, proc: Path = Path("/proc")) -> dict[str, float]:
        """Processor time so far of the front end and of the engine, its child; empty where there is no /proc."""
        assert self._process is not None
        front = self._process.pid
        if not (proc / str(front) / "schedstat").exists():
            return {}
        lists = (proc / str(front) / "task").glob("*/children")
        children = [int(pid) for path in lists for pid in path.read_text().split()]
        return {"front end": _cpu_seconds(proc, front), "engine": sum(_cpu_seconds(proc, pid) for pid in children)}

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in client.recv(64)
        return False


def _cpu_seconds(proc: Path, pid: int) -> float:
    """Of all threads that live: the first number of schedstat is nanoseconds on a processor."""
    total_ns = 0
    for task in (proc / str(pid) / "task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


async def run_streams(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
    """All prompts at once, streamed: for each, the seconds from sending to the arrival of every piece of text."""
    return list(await asyncio.gather(*(_stream(port, prompt, max_tokens) for prompt in prompts)))


async def _stream(port: int, prompt: Sequence[int], max_tokens: int) -> list[float]:
    fields = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start_s = time.perf_counter()
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - start_s)
        elif line.startswith(b"HTTP/") and b" 200 " not in line:
            raise TokenmillError(f"The server answered {line.decode().strip()}.")
    writer.close()
    return times
