"""A served model as its users meet it: the command in a process of its own, a port, and what /proc says of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = re.compile(r"ready at (?:https?://([\d.]+):(\d+)|Unix socket)")


class Server:
    """`tokenmill serve` on a free port; a context manager that leaves nothing running. model: "": none is named."""

    def __init__(self, *args: str, model: str = "smollm2", env: dict[str, str] | None = None) -> None:
        self.args = args
        self.model = model
        self.env = env or {}
        self.lines: list[str] = []

    def __enter__(self) -> Server:
        self._state = tempfile.TemporaryDirectory(prefix="tokenmill-state-")
        command = [
            sys.executable,
            "-m",
            "tokenmill.cli.main",
            "serve",
            *filter(None, [self.model]),
            "--port",
            "0",
            *self.args,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TOKENMILL_STATE": self._state.name, **self.env},
        )
        self._answer = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._answer.wait(120) or not hasattr(self, "port"):
            self.__exit__()
            raise AssertionError("the server did not become ready:\n" + self.output)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._state.cleanup()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if found := READY.search(line):
                self.port = int(found[2] or 0)
                self._answer.set()
        self._answer.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, if there is one now."""
        return self._child("tokenmill.cli.engine_process")

    @property
    def sandbox_pid(self) -> int | None:
        """The sandbox process, if there is one now."""
        return self._child("tokenmill.sandbox.child")

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks engines, if there is one now."""
        return self._child("tokenmill.cli.zygote_process")

    def forked_pids(self) -> list[int]:
        """Of the engines that the zygote forked."""
        zygote = self.zygote_pid
        return [int(pid) for pid in _read(f"/proc/{zygote}/task/{zygote}/children").split()] if zygote else []

    def pids(self) -> list[int]:
        """Of all its processes, the sandbox's children included."""
        found = [self.process.pid]
        for pid in found:
            found += [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]
        return found

    def _child(self, module: str) -> int | None:
        """The front end's only child process that runs `module`."""
        children = _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()
        found = [int(pid) for pid in children if module in _read(f"/proc/{pid}/cmdline")]
        assert len(found) <= 1, found
        return found[0] if found else None

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 60) -> tuple[int, str]:
        """(status, body text); `body` is sent as JSON, or as it is if it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Value by metric name, labels left out (one model, one engine); histograms by their _count and _sum."""
        values: dict[str, float] = {}
        for line in self.request("GET", "/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    def idle(self) -> bool:
        values = self.metrics()
        return all(values[f"vllm:{name}"] == 0 for name in ("num_requests_running", "num_requests_waiting")) and (
            values["vllm:kv_cache_usage_perc"] == 0
        )


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Polls: what is waited for happens in another process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for: {what}"
        time.sleep(0.02)


def resident_bytes(pid: int) -> int:
    """Memory that is the process's own: file pages mapped from disk come and go with the page cache."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has gone")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def alive(pid: int) -> bool:
    """Running, that is: a zombie that waits for its parent counts as gone."""
    state = _read(f"/proc/{pid}/stat")
    return bool(state) and state.rsplit(") ", 1)[1][0] not in "ZX"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
