"""Stores that remote tiers are tried against, each in a process of its own on loopback, and a tier's host memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ports import free_port
from tokenmill.core.tiers import NO_PLACE, BlockFacts, LoadFrom, LookIn, SaveTo, Tier, TierKey
from tokenmill.kv.transfer.checksum import block_sum

BLOCK_BYTES = (24 * 1024, 5000)
"""Of two KV groups."""

SLOT_BYTES = 28 * 1024
KEY = bytes(range(32))


class Host:
    """Host memory of so many slots, and blocks whose bytes follow from their keys."""

    def __init__(self, num_slots: int = 64) -> None:
        self._arena = memoryview(bytearray(num_slots * SLOT_BYTES))

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self._arena[offset : offset + num_bytes]

    def slot(self, nth: int, block: TierKey) -> memoryview:
        return self.view(nth * SLOT_BYTES, BLOCK_BYTES[block[0]])

    def saves(self, blocks: Sequence[TierKey], tier: str = "remote") -> SaveTo:
        """Slots filled with these blocks, in their order, and the job that saves them."""
        for nth, block in enumerate(blocks):
            self.slot(nth, block)[:] = content(block)
        facts = tuple((BlockFacts(block), nth * SLOT_BYTES, sum_of(block)) for nth, block in enumerate(blocks))
        return SaveTo(1, tier, facts)

    def loads(self, blocks: Sequence[TierKey], places: Sequence[int] | None = None, tier: str = "remote") -> LoadFrom:
        """Zeroed slots, and the job that fills them."""
        for nth, block in enumerate(blocks):
            self.slot(nth, block)[:] = bytes(BLOCK_BYTES[block[0]])
        places = places or [0] * len(blocks)
        return LoadFrom(2, tier, tuple((block, places[nth], nth * SLOT_BYTES) for nth, block in enumerate(blocks)))

    def has(self, nth: int, block: TierKey) -> bool:
        return bytes(self.slot(nth, block)) == content(block)


def block(number: int) -> TierKey:
    return number % 2, number.to_bytes(16, "big")


def content(block: TierKey) -> bytes:
    word = bytes([block[0]]) + block[1][8:]
    return (word * (BLOCK_BYTES[block[0]] // len(word) + 1))[: BLOCK_BYTES[block[0]]]


def sum_of(block: TierKey) -> int:
    return block_sum(block, content(block))


async def look(tier: Tier, blocks: Sequence[TierKey], name: str = "remote") -> list[bool]:
    return [place != NO_PLACE for place in await tier.look(LookIn(3, name, tuple(blocks)))]


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for it."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


class RedisServer:
    """Debian's redis-server in a folder of its own, on a Unix socket and, with `port`, on loopback."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self._folder = folder
        self._options = options
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        pytest.importorskip("redis", reason="redis is not installed (pip install 'tokenmill[kv-redis]')")
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed (apt-get install redis-server)")
        fixed = ["--port", str(self._port), "--bind", "127.0.0.1", "--unixsocket", str(self.path)]
        fixed += ["--dir", str(self._folder), "--save", "", "--appendonly", "no", "--daemonize", "no"]
        self.path.unlink(missing_ok=True)
        self._process = subprocess.Popen([program, *fixed, *self._options], stdout=subprocess.DEVNULL)
        _wait_for(lambda: _answers(socket.AF_UNIX, str(self.path)), self._process)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """It does nothing until `go_on`, but connections stand."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class S3Server:
    """moto's: it keeps what it is given in its memory, and lets everybody in."""

    BUCKET = "blocks"

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[server]')")
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.url = f"s3://{self.BUCKET}/some/prefix?endpoint={self.endpoint}&region=us-east-1"

    def __enter__(self) -> S3Server:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(lambda: _answers(socket.AF_INET, ("127.0.0.1", self._port)), self._process)
        try:
            self._make_bucket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _make_bucket(self) -> None:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        connection.request("PUT", f"/{self.BUCKET}")
        status = connection.getresponse().status
        connection.close()
        assert status == 200, status


def _answers(family: socket.AddressFamily, where: object) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex(where) == 0  # type: ignore[arg-type]


def _wait_for(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float = 60.0) -> None:
    until_s = time.monotonic() + limit_s
    try:
        while not is_ready():
            assert process.poll() is None, "the store ended at once"
            assert time.monotonic() < until_s, "the store did not start"
            time.sleep(0.02)
    except BaseException:
        process.kill()
        process.wait()
        raise
