"""Front ends and workers of one machine: `tokenmill serve --no-engine` and `tokenmill worker` with a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from kill import ARGS
from serving import Server

SECRET = {"TOKENMILL_WORKER_SECRET": "a secret of the tests only"}
BYTES = ("--kv-cache-memory-bytes", "64MiB", "--kv-cache-dtype", "int8")


def front_end(model: str, port: int, *args: str) -> Server:
    return Server("--no-engine", "--listen-workers", f"127.0.0.1:{port}", *ARGS, *args, model=model, env=SECRET)


class Worker:
    """`tokenmill worker`; a context manager that leaves nothing running. kv: flags of its KV pool."""

    def __init__(
        self,
        model: str,
        *ports: int,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        kv: tuple[str, ...] = BYTES,
        host: str = "127.0.0.1",
    ) -> None:
        connect = [word for port in ports for word in ("--connect", f"{host}:{port}")]
        self._command = [sys.executable, "-m", "tokenmill.cli.main", "worker", model, *connect, *kv, *args]
        self._env = {**os.environ, **SECRET, **(env or {})}
        self.lines: list[str] = []

    def __enter__(self) -> Worker:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        """Waits for its end; the exit status."""
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def has_said(self, text: str, times: int = 1) -> bool:
        return sum(text in line for line in list(self.lines)) >= times

    def says(self, text: str, times: int = 1) -> bool:
        """Whether it has said so within a minute: what it prints, and that it is read, takes others' time."""
        deadline = time.monotonic() + 60
        while not (said := self.has_said(text, times)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return said

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
