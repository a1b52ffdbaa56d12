"""A KV store as a process, with processes that use it: whatever is killed or stopped, the others go on, and what is
read is what was written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_client import NUMERICS, SIZE, STAGES, blocks_of, get, join, put

from tokenmill.core.errors import ConfigError
from tokenmill.kv.store.child import KVStoreProcess
from tokenmill.kv.store.options import TierOptions
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.net.system import run_event_loop

CLIENT = Path(__file__).with_name("kv_client.py")
HOST = 16 << 20
SLOT = -(-SIZE // 4096) * 4096
NUM = HOST // SLOT // 4

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(tmp_path: Path) -> None:
        run_event_loop(test(tmp_path))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def store(disk: str | None = None, path: str = "") -> AsyncIterator[KVStoreProcess]:
    with KVStoreProcess(TierOptions(kv_host=HOST, kv_disk=disk), path=path) as process:
        running = asyncio.create_task(process.run())
        try:
            yield process
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextmanager
def worker(path: str, stage: str, first: int, num: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has reached a stage; killed in the end."""
    command = [sys.executable, str(CLIENT), path, stage, str(first), str(num)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == f"{stage}\n"
            yield process
        finally:
            process.kill()


async def stat(client: StoreClient) -> dict[str, Any]:
    return json.loads(await client.inquire("stat"))


async def until(is_so: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0.02)


async def rejoined(client: StoreClient) -> None:
    async def is_there() -> bool:
        return client.is_there

    await until(is_there)


@on_a_loop
async def test_a_worker_may_be_killed_anywhere(tmp_path: Path) -> None:
    """What it had leased or been granted is free again, what it had not written whole is not there, and all of host
    memory can be used."""
    async with store() as process:
        client = await join(process.path)
        for nth, stage in enumerate(STAGES):
            blocks = blocks_of(1000 * nth, NUM)
            with worker(process.path, stage, 1000 * nth, NUM) as other:
                before = await stat(client)
                holds = stage in STAGES[STAGES.index("granted") : STAGES.index("written") + 1]
                assert bool(before["granted_bytes"]) == holds, stage
                assert bool(before["leased_bytes"]) == (stage in ("leased", "taking")), stage
                other.kill()

                async def is_free() -> bool:
                    now = await stat(client)
                    return not (now["leased_bytes"] or now["granted_bytes"] or now["fetches"] or now["stores"])

                await until(is_free)
            is_there = stage in ("stored", "leased", "taking")
            assert await get(client, blocks) == (set(range(NUM)) if is_there else set()), stage
            assert await put(client, blocks)
            assert await get(client, blocks) == set(range(NUM)), stage
        for first in range(100_000, 100_000 + 8 * NUM, NUM):
            assert await put(client, blocks_of(first, NUM))
            assert await get(client, blocks_of(first, NUM)) == set(range(NUM))
        client.leave()


@on_a_loop
async def test_a_worker_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    """Its leases stay its own; what others store and fetch goes through the rest."""
    async with store() as process:
        client = await join(process.path)
        with worker(process.path, "taking", 0, NUM) as other:
            other.send_signal(signal.SIGSTOP)
            for first in range(1000, 1000 + 8 * NUM, NUM):
                assert await put(client, blocks_of(first, NUM))
                assert await get(client, blocks_of(first, NUM)) == set(range(NUM))
            assert await get(client, blocks_of(0, NUM)) == set(range(NUM))
        client.leave()


@on_a_loop
async def test_workers_outlive_their_store(tmp_path: Path) -> None:
    """Killed, it is started again at the same path: its clients join it by themselves, memory is empty, and the disk
    has what was shared."""
    async with store(f"{tmp_path}/disk:100MB") as process:
        clients = [await join(process.path, name) for name in "ab"]
        blocks = blocks_of(0, NUM)
        assert await put(clients[0], blocks, is_shared=True)
        assert await put(clients[0], blocks_of(1000, NUM))
        assert await clients[1].find([*blocks, *blocks_of(1000, NUM)]) == "1" * 2 * NUM
        for life in range(3):
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(OSError):
                while True:
                    await clients[0].find(blocks)
            for client in clients:
                await rejoined(client)

            # Of the others those that had been written by then.
            digits = await clients[1].find([*blocks, *blocks_of(1000, NUM)])
            assert digits[:NUM] == "2" * NUM and set(digits[NUM:]) <= set("02")
            assert await get(clients[life % 2], blocks) == set(range(NUM))
        for client in clients:
            client.leave()


@on_a_loop
async def test_a_store_that_is_stopped_is_one_that_has_gone(tmp_path: Path) -> None:
    """Calls end with an error within seconds; the next ones at once, until it goes on."""
    async with store() as process:
        client = await join(process.path)
        blocks = blocks_of(0, NUM)
        await put(client, blocks)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                with pytest.raises(OSError):
                    await client.find(blocks)
            with pytest.raises(OSError):
                await get(client, blocks)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await rejoined(client)
        assert await get(client, blocks) == set(range(NUM))
        client.leave()


@on_a_loop
async def test_a_store_that_is_stopped_is_noticed_by_those_in_a_hurry(tmp_path: Path) -> None:
    """Who waits a moment only for each answer does not do so for long."""
    async with store() as process:
        client = await join(process.path)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(30):
                with pytest.raises(ConnectionError):
                    while True:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.1):
                                await client.find(blocks_of(0, NUM))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await rejoined(client)
        client.leave()


@on_a_loop
async def test_another_user_is_not_let_in(tmp_path: Path) -> None:
    """Not even where the socket's file is open to all; nor is a store of another user joined."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    code = (
        "import os, socket, sys; end = socket.socket(socket.AF_UNIX); path = sys.argv[1]\n"
        "end.connect(path); os.write(1, b'connected'); print(end.recv(10))"
    )
    listens = "import socket, time; socket.socket(fileno=0).listen(); print(flush=True); time.sleep(60)"
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "foreign"))
        listener = subprocess.Popen(  # a listener's user is that of the process that called listen
            ["/usr/bin/env", "python3", "-I", "-c", listens],
            stdin=end.fileno(), stdout=subprocess.PIPE, user=65534, group=65534, cwd="/",
        )  # fmt: skip
        try:
            assert listener.stdout is not None and listener.stdout.readline() == b"\n"
            with pytest.raises(ConfigError, match="another user"):
                await join(str(tmp_path / "foreign"))
        finally:
            listener.kill()
            listener.communicate()
    async with store() as process:
        folder = os.path.dirname(process.path)
        for mode, expected in ((0o600, ""), (0o666, "connectedb''\n")):
            os.chmod(process.path, mode)
            os.chmod(folder, 0o711)
            command = ["/usr/bin/env", "python3", "-I", "-c", code, process.path]
            run = partial(subprocess.run, command, capture_output=True, text=True, user=65534, group=65534, cwd="/")
            other = await asyncio.get_running_loop().run_in_executor(None, run)
            assert other.stdout == expected, (mode, other.stderr)


@on_a_loop
async def test_a_store_that_cannot_be_as_asked_says_why(tmp_path: Path) -> None:
    """To the worker that joins, and to the parent."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    with KVStoreProcess(TierOptions(kv_host=HOST, kv_remote="gopher://x", kv_key_file=str(key))) as process:
        running = asyncio.create_task(process.run())
        with pytest.raises(ConfigError, match="--kv-remote takes"):
            await join(process.path)
        with pytest.raises(ConfigError, match="--kv-remote takes"):
            async with asyncio.timeout(20):
                await running


@on_a_loop
async def test_a_folder_that_is_taken_is_waited_for(tmp_path: Path) -> None:
    """A store whose disk another one has serves without, and has it when that one has ended."""
    disk = f"{tmp_path}/disk:100MB"
    async with store(disk) as process:
        client = await join(process.path)
        assert await put(client, blocks_of(0, NUM), is_shared=True)
        client.leave()
        async with store(disk) as second:
            other = await join(second.path)
            assert await put(other, blocks_of(1000, NUM))
            assert await get(other, blocks_of(1000, NUM)) == set(range(NUM))
            assert not (await stat(other))["tiers"]["disk"]["is_open"]
            process.close()

            async def is_open() -> bool:
                return "0" not in await other.find(blocks_of(0, NUM))

            await until(is_open)
            assert await get(other, blocks_of(0, NUM)) == set(range(NUM))
            other.leave()


def test_a_store_ends_with_its_parent() -> None:
    """However that ends."""
    code = (
        "import os, sys\n"
        "from tokenmill.kv.store.child import KVStoreProcess\n"
        "from tokenmill.kv.store.options import TierOptions\n"
        "with KVStoreProcess(TierOptions(kv_host=1 << 25)) as process:\n"
        "    print(process.pid, process.path, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, path = parent.stdout.readline().split()
        ended = os.pidfd_open(int(pid))
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path.decode())
        parent.kill()
    with open(ended, "rb"):
        run_event_loop(_readable(ended))
    os.unlink(path)
    os.rmdir(os.path.dirname(path))


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    async with asyncio.timeout(30):
        await ended
    loop.remove_reader(fd)


@on_a_loop
async def test_servers_may_share_one_that_was_started_by_hand(tmp_path: Path) -> None:
    """`tokenmill kv serve`: what is shared is on disk after SIGTERM and a new start; the socket goes with it."""
    path = tmp_path / "kv"
    command = [
        sys.executable, "-m", "tokenmill.cli.main", "kv", "serve", "--socket", str(path),
        "--kv-host", "16MiB", "--kv-disk", f"{tmp_path}/disk:100MB",
    ]  # fmt: skip
    blocks = blocks_of(0, NUM)
    for life in range(2):
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        said = b"".join([await process.stdout.readline() for _ in range(3)]).decode()
        assert f"tokenmill serve MODEL --kv-store {path}" in said and "16.0 MiB" in said
        client = await join(str(path))

        assert (await stat(client))["tiers"]["disk"]["is_open"]
        assert await get(client, blocks) == (set(range(NUM)) if life else set())
        if not life:
            assert await put(client, blocks)
            assert await get(client, blocks) == set(range(NUM))  # used again: worth the disk
        client.leave()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert not path.exists()


@on_a_loop
async def test_two_stores_cannot_have_one_socket(tmp_path: Path) -> None:
    """The second is told, and the first goes on."""
    async with store(path=str(tmp_path / "kv")) as process:
        command = [sys.executable, "-m", "tokenmill.cli.main", "kv", "serve", "--socket", process.path]
        second = await asyncio.create_subprocess_exec(*command, "--kv-host", "1GB", stderr=subprocess.PIPE)
        _, said = await second.communicate()
        assert second.returncode == 2 and b"listens" in said
        client = await StoreClient.connect(process.path, NUMERICS, (SIZE,))
        assert await put(client, blocks_of(0, 3))
        client.leave()
