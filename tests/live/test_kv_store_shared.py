"""KV stores of several machines, as processes: what one's workers computed, another's fetch, through a remote store or
from peer to peer; each may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ports import free_port
from remote_stores import BLOCK_BYTES, RedisServer, block, content, until
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import BlockFacts, Lease, TierKey
from tokenmill.core.units import MiB
from tokenmill.kv.store.child import KVStoreProcess
from tokenmill.kv.store.options import TierOptions
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.kv.transfer.remote.tier import Names, open_backend
from tokenmill.kv.transfer.seal import load_key

MODEL = "model A"
BLOCKS = [block(number) for number in range(40)]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "kv.key"
    path.touch(0o600)
    path.write_text("the key of these machines, which is long enough")
    return str(path)


class Machine:
    """A KV store's process, and a worker of it."""

    def __init__(self, process: KVStoreProcess, worker: StoreClient) -> None:
        self.process = process
        self.worker = worker

    async def keep(self, blocks: Sequence[TierKey], is_shared: bool = False) -> bool:
        async def fill(granted: Sequence[tuple[int, int]]) -> list[int]:
            for nth, offset in granted:
                wanted = blocks[nth]
                self.worker.view(offset, BLOCK_BYTES[wanted[0]])[:] = content(wanted)
            return [block_sum(blocks[nth], content(blocks[nth])) for nth, _ in granted]

        return await self.worker.store([BlockFacts(wanted) for wanted in blocks], fill, is_shared)

    async def fetch(self, blocks: Sequence[TierKey]) -> list[bool]:
        """Which are taken, byte for byte what was kept."""

        async def take(leases: Sequence[Lease]) -> list[int]:
            for lease in leases:
                wanted = blocks[lease.nth]
                data = bytes(self.worker.view(lease.offset, BLOCK_BYTES[wanted[0]]))
                assert data == content(wanted) and block_sum(wanted, data) == lease.sum
            return []

        taken = await self.worker.fetch(blocks, take)
        return [nth in taken for nth in range(len(blocks))]

    async def find(self, blocks: Sequence[TierKey] = BLOCKS) -> str:
        return await self.worker.find(blocks)

    async def stat(self) -> dict[str, dict[str, dict[str, float]]]:
        told: dict[str, dict[str, dict[str, float]]] = json.loads(await self.worker.inquire("stat", "{}"))
        return told


@asynccontextmanager
async def machine(**options: object) -> AsyncIterator[Machine]:
    given = TierOptions(**{"kv_host": 32 * MiB, **options})  # type: ignore[arg-type]
    with KVStoreProcess(given) as process:
        keeping = asyncio.create_task(process.run())
        worker = await StoreClient.connect(process.path, MODEL, BLOCK_BYTES, "worker", "life")
        try:
            yield Machine(process, worker)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await worker.close()


async def finds(one: Machine, digits: str, blocks: Sequence[TierKey] = BLOCKS) -> None:
    """Wait until it does: what a shared tier had not, is believed not to be there for a while."""
    async with asyncio.timeout(30):
        while (found := await one.find(blocks)) != digits:
            await asyncio.sleep(0.1)
    assert found == digits


def run(work: Callable[[], object]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_machines_share_a_remote_store(tmp_path: Path, key_file: str) -> None:
    """What one has shared, another that starts later finds, fetches and has in its own memory from then on."""

    async def work() -> None:
        with RedisServer(tmp_path) as redis:
            shared = {"kv_remote": redis.url, "kv_key_file": key_file}
            async with machine(**shared) as first:
                assert await first.find() == "0" * 40
                assert await first.keep(BLOCKS[:30], is_shared=True)
            async with machine(**shared) as second:
                assert await second.find() == "3" * 30 + "0" * 10
                assert await second.fetch(BLOCKS) == [True] * 30 + [False] * 10
                assert await second.find() == "1" * 30 + "0" * 10
                counts = (await second.stat())["tiers"]["remote"]["counts"]
                later = await StoreClient.connect(second.process.path, MODEL, BLOCK_BYTES, "another", "life")
                assert [facts.name for facts in later.tiers] == ["host", "remote"]
                assert 0 < later.tiers[1].latency_s != second.worker.tiers[1].latency_s
                assert later.tiers[1].bytes_s == counts["bytes_s"] > 0
                await later.close()
                redis.kill()
                assert await second.fetch(BLOCKS[:30]) == [True] * 30
                assert not await second.keep(BLOCKS[30:], is_shared=True)
                assert await second.fetch(BLOCKS) == [True] * 40

    run(work)


def test_operators_see_what_was_wrong_or_away(tmp_path: Path, key_file: str) -> None:
    """A tier turned values down, or was not asked: the manager saw misses, and its numbers say why."""

    async def work() -> None:
        with RedisServer(tmp_path) as redis:
            shared = {"kv_remote": redis.url, "kv_key_file": key_file}
            async with machine(**shared) as first:
                assert await first.keep(BLOCKS, is_shared=True)
            backend, _ = open_backend(redis.url)
            names = Names(load_key(key_file), MODEL)
            spoilt = [(names.of(wanted, 1), b"nothing of ours") for wanted in BLOCKS[:3]]
            assert await asyncio.to_thread(backend.put, spoilt, 5.0) == [True] * 3
            async with machine(**shared) as second:
                assert await second.find() == "3" * 40
                assert await second.fetch(BLOCKS) == [nth >= 3 for nth in range(40)]
                remote = (await second.stat())["tiers"]["remote"]
                assert (remote["corrupt"], remote["errors"], remote["is_down"]) == (3, 0, 0)
                redis.kill()
                async with asyncio.timeout(30):
                    while not remote["is_down"]:
                        await second.find([block(1000 + nth) for nth in range(5)])
                        await second.fetch([block(int.from_bytes(os.urandom(2), "big") + 2000)])
                        remote = (await second.stat())["tiers"]["remote"]
                assert remote["corrupt"] == 3 and remote["errors"] >= 3
            backend.close()

    run(work)


def test_an_operator_fences_machines_off(tmp_path: Path, key_file: str) -> None:
    """Through one store: what was shared before is not found any more, and the others share nothing."""

    async def work() -> None:
        with RedisServer(tmp_path) as redis:
            shared = {"kv_remote": redis.url, "kv_key_file": key_file}
            async with machine(**shared) as first, machine(**shared) as second:
                assert await first.keep(BLOCKS[:10], is_shared=True)
                assert json.loads(await second.worker.inquire("fence")) == {"epoch": 2}
                assert await second.find() == "0" * 40
                async with asyncio.timeout(30):
                    while not (await first.stat())["tiers"]["remote"]["counts"]["is_fenced"]:
                        await asyncio.sleep(0.1)
                assert not await first.keep(BLOCKS[10:20], is_shared=True)
                assert await second.keep(BLOCKS[20:30], is_shared=True)
        async with machine() as third:
            with pytest.raises(ConfigError, match="no remote tier"):
                await third.worker.inquire("fence")

    run(work)


def test_machines_fetch_from_each_other(key_file: str) -> None:
    """Each is the other's peer. What neither has is asked for once and not passed round; what one has, the other gets;
    one is killed, and the other goes on."""

    async def work() -> None:
        ports = [free_port(), free_port()]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        options = [
            {"kv_peers": addresses[1 - nth], "kv_peer_address": addresses[nth], "kv_key_file": key_file}
            for nth in range(2)
        ]
        async with machine(**options[0]) as first, machine(**options[1]) as second:
            await first.keep(BLOCKS[:20])
            await second.keep(BLOCKS[15:30])
            await finds(second, "4" * 15 + "1" * 15 + "0" * 10)
            assert await second.fetch(BLOCKS) == [True] * 30 + [False] * 10
            assert await second.find() == "1" * 30 + "0" * 10
            await finds(first, "1" * 20 + "4" * 10 + "0" * 10)
            assert (await first.stat())["peers_served"]["blocks_sent"] == 15
            os.kill(second.process.pid, signal.SIGKILL)
            assert await first.fetch(BLOCKS[:20]) == [True] * 20
            async with asyncio.timeout(20):
                assert await first.fetch(BLOCKS[20:30]) == [False] * 10
            await until(lambda: second.worker.num_rejoined == 1)
            await second.keep(BLOCKS[30:])
            await finds(first, "4" * 10, BLOCKS[30:])
            assert await first.fetch(BLOCKS[30:]) == [True] * 10

    run(work)


def test_a_damaged_block_is_not_given_to_a_peer(key_file: str) -> None:
    """A worker changes what it has just handed in: the other machine computes, and the source forgets the block."""

    async def work() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with (
            machine(kv_peer_address=address, kv_key_file=key_file) as source,
            machine(kv_peers=address, kv_key_file=key_file) as other,
        ):
            await source.keep(BLOCKS)
            damaged: list[int] = []

            async def damage(leases: Sequence[Lease]) -> list[int]:
                for lease in leases:
                    if lease.nth in (4, 7):
                        source.worker.view(lease.offset, 1)[0] ^= 1
                        damaged.append(lease.nth)
                return []

            await source.worker.fetch(BLOCKS, damage)
            assert sorted(damaged) == [4, 7]
            await finds(other, "4" * 40)
            assert await other.fetch(BLOCKS) == [nth not in (4, 7) for nth in range(40)]
            assert await source.find() == "".join("01"[nth not in (4, 7)] for nth in range(40))

    run(work)


def test_a_store_that_cannot_be_as_asked_says_why(tmp_path: Path, key_file: str) -> None:
    """An address that is taken, a key that others may read: the first worker that joins is told."""

    async def refusal(**options: object) -> str:
        given = TierOptions(**{"kv_host": 32 * MiB, **options})  # type: ignore[arg-type]
        with KVStoreProcess(given) as process:
            keeping = asyncio.create_task(process.run())
            with pytest.raises(ConfigError) as caught:
                await StoreClient.connect(process.path, MODEL, BLOCK_BYTES, "worker", "life")
            with pytest.raises(ConfigError):
                await asyncio.wait_for(keeping, 30)
            return caught.value.message

    async def work() -> None:
        address = f"127.0.0.1:{free_port()}"
        async with machine(kv_peer_address=address, kv_key_file=key_file):
            assert "cannot be had" in await refusal(kv_peer_address=address, kv_key_file=key_file)
        open_key = tmp_path / "open.key"
        open_key.write_text("x" * 40)
        open_key.chmod(0o644)
        assert "chmod 600" in await refusal(kv_remote=f"file://{tmp_path}", kv_key_file=str(open_key))

    run(work)
