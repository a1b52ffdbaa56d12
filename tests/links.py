"""Links of every kind, both ends in one process, and what they need: certificates, a secret, clocks that differ."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.events import Ready, WorkerFacts
from tokenmill.core.ports import Clock
from tokenmill.net.handshake import Identity, mutual_tls
from tokenmill.net.link import FrontLink
from tokenmill.net.system import new_event_loop
from tokenmill.net.tcp import Credentials, LinkBounds, WorkerListener, join
from tokenmill.net.unix import UnixEngineEnd, UnixFrontEnd, private_address

SECRET = b"sixteen bytes or more"
WORKER = WorkerFacts("worker-1", "engine-1")
IDENTITY = Identity("weights", Ready("model", 64, 128, (), "numerics", 16, 8, worker=WORKER))
KINDS = ("unix", "tcp", "tls")


@dataclass(frozen=True)
class Stopped:
    """A clock that stands still."""

    at_s: float = 0.0

    def now(self) -> float:
        return self.at_s


def run(main: Coroutine[Any, Any, None], timeout_s: float = 20) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(asyncio.wait_for(main, timeout_s))


@cache
def certificate() -> str:
    """A file with a certificate for this machine that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-test-"))
    try:
        request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", f"{folder}/key", "-out", f"{folder}/certificate"]
        subprocess.run([*request, "-days", "2", *names, *files], check=True, capture_output=True)
        return (folder / "key").read_text() + (folder / "certificate").read_text()
    finally:
        shutil.rmtree(folder)


def credentials(kind: str, *, is_front_end: bool, secret: bytes = SECRET) -> Credentials:
    if kind != "tls":
        return Credentials(secret)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(certificate())
        file.flush()
        return Credentials(secret, mutual_tls(file.name, file.name, file.name, is_front_end=is_front_end))


@contextlib.contextmanager
def listening_socket() -> Iterator[tuple[socket.socket, int]]:
    """With the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, listener.getsockname()[1]


@contextlib.asynccontextmanager
async def worker_listener(
    kind: str = "tcp",
    *,
    judge: Callable[[Identity], str] = lambda identity: "",
    bounds: LinkBounds | None = None,
    clock: Clock = Stopped(),
) -> AsyncIterator[tuple[int, asyncio.Queue[FrontLink]]]:
    """A listener's port, and the links of the workers that joined."""
    joined: asyncio.Queue[FrontLink] = asyncio.Queue()
    with listening_socket() as (listener, port):
        taker = WorkerListener(
            listener,
            credentials(kind, is_front_end=True),
            clock,
            judge,
            lambda identity, link, address: joined.put_nowait(link),
            bounds,
        )
        taker.open()
        try:
            yield port, joined
        finally:
            taker.close()


@contextlib.asynccontextmanager
async def linked(
    kind: str,
    front_clock: Clock = Stopped(),
    engine_clock: Clock = Stopped(),
    bounds: LinkBounds | None = None,
) -> AsyncIterator[tuple[Any, Any]]:
    """The front end's end and the engine's."""
    if kind == "unix":
        with private_address() as address:
            front: Any = UnixFrontEnd(address, front_clock)
            front.open()
            engine: Any = UnixEngineEnd(address, engine_clock)
            engine.open()
            try:
                yield front, engine
            finally:
                engine.close()
                front.close()
        return
    async with worker_listener(kind, bounds=bounds, clock=front_clock) as (port, joined):
        mine = credentials(kind, is_front_end=False)
        engine = await join("127.0.0.1", port, mine, IDENTITY, engine_clock, bounds)
        front = await joined.get()
        try:
            yield front, engine
        finally:
            engine.close()
            front.close()
