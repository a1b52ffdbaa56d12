"""How fast KV blocks come from remote stores and peers, beside a plain client of each.

    python tests/bench/bench_kv_remote.py [--tokens 1008] [--prefixes 8] [--rounds 5] [--delay-ms 0] [--only redis,...]

Prefixes of so many tokens in blocks as the default model has them (16 tokens, 368,640 bytes) are saved through the
tier, then loaded in a random order, one at a time, in jobs of 8 MiB that overlap, as a KV store gives them; what comes
is sealed, opened and lies in host memory. In turns with that, the plain client fetches the same values as sealed and
copies each to its place, on as many threads as the tier has: redis-py (with hiredis where it is installed) and obstore.
Of a peer: the same bytes over a bare TCP connection. Stores are processes on loopback; moto's S3 is written in Python
and slow, so that its figures tell of the tier's cost, not of a store's; --delay-ms holds each answer of S3 back, as a
network would. A look asks for 250 blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ports import free_port
from remote_stores import KEY, RedisServer, S3Server
from tokenmill.core.tiers import NO_PLACE, BlockFacts, LoadFrom, LookIn, SaveTo, Tier, TierKey
from tokenmill.core.units import MiB
from tokenmill.kv.store.child import KVStoreProcess
from tokenmill.kv.store.options import TierOptions
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.kv.transfer.remote import RemoteTier
from tokenmill.kv.transfer.remote.peer import PeerTier
from tokenmill.kv.transfer.remote.tier import Names
from tokenmill.kv.transfer.seal import OVERHEAD, load_key

MODEL = "0123456789abcdef"
BLOCK_BYTES, BLOCK_TOKENS = 368_640, 16
JOB_BLOCKS = 8 * MiB // BLOCK_BYTES
LOOK = 250
THREADS = 4


class Bench:
    """prefixes  of blocks; host memory has room for one"""

    def __init__(self, num_prefixes: int, num_blocks: int) -> None:
        draw = random.Random(7)
        self.prefixes = [[(0, draw.randbytes(16)) for _ in range(num_blocks)] for _ in range(num_prefixes)]
        self._host = memoryview(bytearray(num_blocks * BLOCK_BYTES))
        self._content = draw.randbytes(BLOCK_BYTES)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return self._host[offset : offset + num_bytes]

    def fill(self, prefix: Sequence[TierKey]) -> list[int]:
        """The checksums."""
        for nth, block in enumerate(prefix):
            slot = self.view(nth * BLOCK_BYTES, BLOCK_BYTES)
            slot[:] = self._content
            slot[:16] = block[1]
        return [block_sum(block, self.view(nth * BLOCK_BYTES, BLOCK_BYTES)) for nth, block in enumerate(prefix)]

    async def save(self, tier: Tier) -> list[float]:
        """Seconds for each prefix."""
        took: list[float] = []
        for prefix in self.prefixes:
            sums = self.fill(prefix)
            items = [(BlockFacts(block), nth * BLOCK_BYTES, sums[nth]) for nth, block in enumerate(prefix)]
            jobs = [SaveTo(0, "x", tuple(items[at : at + JOB_BLOCKS])) for at in range(0, len(items), JOB_BLOCKS)]
            began_s = time.perf_counter()
            for places in await asyncio.gather(*(tier.save(job) for job in jobs)):
                assert NO_PLACE not in places, "not all was kept"
            took.append(time.perf_counter() - began_s)
        return took

    async def load(self, tier: Tier, prefix: Sequence[TierKey]) -> float:
        items = [(block, 0, nth * BLOCK_BYTES) for nth, block in enumerate(prefix)]
        jobs = [LoadFrom(0, "x", tuple(items[at : at + JOB_BLOCKS])) for at in range(0, len(items), JOB_BLOCKS)]
        began_s = time.perf_counter()
        sums = [value for part in await asyncio.gather(*(tier.load(job) for job in jobs)) for value in part]
        took_s = time.perf_counter() - began_s
        for nth, block in enumerate(prefix):
            assert sums[nth] == block_sum(block, self.view(nth * BLOCK_BYTES, BLOCK_BYTES)), "a block is wrong"
        return took_s

    async def look(self, tier: Tier) -> float:
        blocks = [block for prefix in self.prefixes for block in prefix][:LOOK]
        began_s = time.perf_counter()
        places = await tier.look(LookIn(0, "x", tuple(blocks)))
        took_s = time.perf_counter() - began_s
        assert NO_PLACE not in places
        return 1e3 * took_s * LOOK / len(blocks)


async def measure(
    name: str, bench: Bench, tier: Tier, plain: Callable[[Sequence[TierKey]], None], rounds: int, saves: Sequence[float]
) -> dict[str, Any]:
    """GB/s of tier and plain client in turns, over all prefixes, and what a look takes."""
    num_bytes = len(bench.prefixes[0]) * BLOCK_BYTES
    ours: list[float] = []
    theirs: list[float] = []
    looks: list[float] = []
    draw = random.Random(9)
    for _ in range(rounds):
        for prefix in draw.sample(bench.prefixes, len(bench.prefixes)):
            ours.append(await bench.load(tier, prefix))
            began_s = time.perf_counter()
            await asyncio.to_thread(plain, prefix)
            theirs.append(time.perf_counter() - began_s)
        looks.append(await bench.look(tier))
    result: dict[str, Any] = {
        "load_GB_s": num_bytes / statistics.median(ours) / 1e9,
        "load_ms_p50": 1e3 * statistics.median(ours),
        "load_ms_max": 1e3 * max(ours),
        "plain_GB_s": num_bytes / statistics.median(theirs) / 1e9,
        "share_of_plain": statistics.median(theirs) / statistics.median(ours),
        f"look_{LOOK}_ms": statistics.median(looks),
    }
    if saves:
        result["save_GB_s"] = num_bytes / statistics.median(saves) / 1e9
    print(f"{name:7}", json.dumps({key: round(value, 3) for key, value in result.items()}), flush=True)
    return result


def on_threads(calls: Sequence[Callable[[], None]], num_threads: int) -> None:
    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def cut(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    return [items[at : at + most] for at in range(0, len(items), most)]


async def bench_redis(bench: Bench, args: argparse.Namespace) -> None:
    import redis

    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        tier = RemoteTier(server.url, MODEL, [BLOCK_BYTES], bench.view, KEY)
        await tier.open()
        saves = await bench.save(tier)
        client = redis.Redis(unix_socket_path=str(server.path), socket_read_size=1 << 20, max_connections=THREADS)
        names = Names(KEY, MODEL)

        def part(some: Sequence[tuple[int, TierKey]]) -> None:
            for (nth, _), value in zip(some, client.mget([names.of(block, 1) for _, block in some]), strict=True):
                bench.view(nth * BLOCK_BYTES, BLOCK_BYTES)[:] = value[OVERHEAD:]

        def plain(prefix: Sequence[TierKey]) -> None:
            on_threads([lambda some=some: part(some) for some in cut(list(enumerate(prefix)), 5)], THREADS)

        try:
            await measure("redis", bench, tier, plain, args.rounds, saves)
        finally:
            client.close()
            await tier.close()


async def bench_objects(name: str, url: str, bench: Bench, args: argparse.Namespace) -> None:
    tier = RemoteTier(url, MODEL, [BLOCK_BYTES], bench.view, KEY)
    await tier.open()
    saves = await bench.save(tier)
    from tokenmill.kv.transfer.remote.tier import open_backend

    backend: Any = open_backend(url)[0]
    names = Names(KEY, MODEL)

    def one(nth: int, block: TierKey) -> None:
        value = memoryview(backend._store.get(names.of(block, 1)).bytes())
        bench.view(nth * BLOCK_BYTES, BLOCK_BYTES)[:] = value[OVERHEAD:]

    def plain(prefix: Sequence[TierKey]) -> None:
        on_threads([lambda at=at: one(*at) for at in enumerate(prefix)], backend.num_threads)

    try:
        await measure(name, bench, tier, plain, args.rounds, saves)
    finally:
        await tier.close()


async def bench_file(bench: Bench, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await bench_objects("file", f"file://{folder}", bench, args)


async def bench_s3(bench: Bench, args: argparse.Namespace) -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    with S3Server() as server, delayed(server.endpoint, args.delay_ms / 1e3) as endpoint:
        await bench_objects("s3", server.url.replace(server.endpoint, endpoint), bench, args)


@contextlib.contextmanager
def delayed(endpoint: str, delay_s: float) -> Iterator[str]:
    """The same server, each of whose answers begins so much later."""
    if not delay_s:
        yield endpoint
        return
    host, _, port = endpoint.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket, wait_s: float) -> None:
        asked_s = 0.0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if wait_s and time.monotonic() - asked_s > wait_s / 2:
                    time.sleep(wait_s)
                target.sendall(data)
                asked_s = time.monotonic()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                threading.Thread(target=pass_on, args=(near, far, 0.0), daemon=True).start()
                threading.Thread(target=pass_on, args=(far, near, delay_s), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


async def bench_peer(bench: Bench, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "key"
        key_file.touch(0o600)
        key_file.write_bytes(b"k" * 32)
        address = f"127.0.0.1:{free_port()}"
        room = (len(bench.prefixes) + 2) * len(bench.prefixes[0]) * 2 * BLOCK_BYTES
        options = TierOptions(kv_host=room, kv_peer_address=address, kv_key_file=str(key_file))
        with KVStoreProcess(options) as process:
            keeping = asyncio.create_task(process.run())
            worker = await StoreClient.connect(process.path, MODEL, [BLOCK_BYTES], "worker", "life")
            for prefix in bench.prefixes:
                await store(bench, worker, prefix)
            tier = PeerTier([address], MODEL, [BLOCK_BYTES], bench.view, load_key(str(key_file)))
            await tier.open()
            try:
                with sender(len(bench.prefixes[0]) * BLOCK_BYTES) as plain:
                    await measure("peer", bench, tier, lambda prefix: plain(bench.view), args.rounds, ())
            finally:
                await tier.close()
                await worker.close()
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)


async def store(bench: Bench, worker: StoreClient, prefix: Sequence[TierKey]) -> None:
    sums = bench.fill(prefix)

    async def fill(granted: Sequence[tuple[int, int]]) -> list[int]:
        for nth, offset in granted:
            worker.view(offset, BLOCK_BYTES)[:] = bench.view(nth * BLOCK_BYTES, BLOCK_BYTES)
        return [sums[nth] for nth, _ in granted]

    assert await worker.store([BlockFacts(block) for block in prefix], fill)


@contextlib.contextmanager
def sender(num_bytes: int) -> Iterator[Callable[[Callable[[int, int], memoryview]], None]]:
    """Gets so many bytes over TCP from another process, as fast as that goes."""
    code = (
        "import socket, sys\n"
        "end = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "data = bytes(int(sys.argv[2]))\n"
        "while end.recv(1):\n    end.sendall(data)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        import subprocess

        command = [sys.executable, "-c", code, str(listener.getsockname()[1]), str(num_bytes)]
        process = subprocess.Popen(command)
        end, _ = listener.accept()

        def receive(view: Callable[[int, int], memoryview]) -> None:
            end.sendall(b"x")
            target = view(0, num_bytes)
            while target:
                target = target[end.recv_into(target) :]

        try:
            with end:
                yield receive
        finally:
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1008)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--only", default="redis,file,s3,peer")
    args = parser.parse_args()
    num_blocks = args.tokens // BLOCK_TOKENS
    print(f"{num_blocks} blocks, {num_blocks * BLOCK_BYTES / 1e6:.1f} MB a prefix; {os.cpu_count()} cores", flush=True)
    kinds = {"redis": bench_redis, "file": bench_file, "s3": bench_s3, "peer": bench_peer}
    for name in args.only.split(","):
        asyncio.run(kinds[name](Bench(args.prefixes, num_blocks), args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
