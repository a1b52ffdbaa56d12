"""A KV store that has to do with less memory, and with more again: what it takes, and what it still has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from tokenmill.core.tiers import BlockFacts, Lease
from tokenmill.core.units import MiB
from tokenmill.kv.store.server import KVStore, Parts, listen
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.manager import TierManager
from tokenmill.kv.transfer.arena import SharedArena
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.net.system import MonotonicClock, run_event_loop

SIZE = 300_000
HOST = 64 * MiB


def content(nth: int) -> bytes:
    return nth.to_bytes(4, "little") * (SIZE // 4)


def test_memory_goes_back_to_the_system_and_comes_again(tmp_path: Path) -> None:
    """Half of it, then nearly all, then it may grow: never more is taken than may be, what is still there is sound, and
    slots that a worker looks at stay as they are meanwhile."""
    arena = SharedArena(HOST)
    store = KVStore(
        arena,
        lambda join, arena: Parts(TierManager(TierConfig(join.numerics_id, join.block_bytes, arena.num_bytes)), {}),
        MonotonicClock(),
    )
    blocks = [(0, b"key %12d" % nth) for nth in range(HOST // SIZE)]

    async def main() -> None:
        client = await StoreClient.connect(str(tmp_path / "kv"), "numerics", (SIZE,), "worker", "life")

        async def put() -> None:
            for first in range(0, len(blocks), 16):

                async def fill(granted: Sequence[tuple[int, int]], first: int = first) -> list[int]:
                    for nth, offset in granted:
                        client.view(offset, SIZE)[:] = content(first + nth)
                    return [block_sum(blocks[first + nth], content(first + nth)) for nth, _ in granted]

                await client.store([BlockFacts(block) for block in blocks[first : first + 16]], fill)

        async def take(leases: Sequence[Lease]) -> list[int]:
            if shrinks:
                assert store.shell is not None
                store.shell.resize(shrinks.pop())
                await asyncio.sleep(0.05)
            assert all(bytes(client.view(lease.offset, SIZE)) == content(lease.nth) for lease in leases)
            return []

        async def num_kept() -> int:
            """Asked in parts, for one fetch has its share of what memory there is."""
            num = 0
            for first in range(0, len(blocks), 8):

                async def look(leases: Sequence[Lease], first: int = first) -> list[int]:
                    for nth, offset, _ in leases:
                        assert bytes(client.view(offset, SIZE)) == content(first + nth)
                    return []

                num += len(await client.fetch(blocks[first : first + 8], look))
            return num

        async def settled(most: int) -> None:
            async with asyncio.timeout(30):
                while arena.taken_bytes > most:
                    await asyncio.sleep(0.01)

        shrinks: list[int] = []
        await put()
        full = arena.taken_bytes
        assert full > 0.8 * HOST
        found = await client.fetch(blocks, take)
        assert len(found) > 0.8 * len(blocks)
        for num_bytes in (HOST // 2, HOST // 8):
            shrinks.append(num_bytes)
            assert await client.fetch(blocks, take)
            await settled(num_bytes)
            assert 0 < await num_kept() <= num_bytes // SIZE
        await put()
        assert arena.taken_bytes <= HOST // 8
        assert store.shell is not None
        store.shell.resize(HOST)
        await put()
        assert arena.taken_bytes > 0.8 * HOST
        assert len(await client.fetch(blocks, take)) > 0.8 * len(blocks)
        client.leave()

    async def run() -> None:
        with listen(str(tmp_path / "kv")) as listener:
            serving = asyncio.create_task(store.run(listener))
            try:
                await main()
            finally:
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
                arena.close()

    run_event_loop(run())
