"""A worker's part of a KV store's protocol, for tests: blocks with content of their own, and a process that stops at a
stage of its work.

    python tests/live/kv_client.py SOCKET STAGE FIRST NUM     prints STAGE when it is there, and stays
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from tokenmill.core.tiers import BlockFacts, Lease, TierKey
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.net.system import run_event_loop

SIZE = 40_000
NUMERICS = "numerics"
STAGES = ("joined", "granted", "half written", "written", "stored", "leased", "taking")


def blocks_of(first: int, num: int) -> list[TierKey]:
    return [(0, b"block" + nth.to_bytes(11, "big")) for nth in range(first, first + num)]


def content(block: TierKey) -> bytes:
    return (block[1] * (SIZE // len(block[1]) + 1))[:SIZE]


async def join(path: str, name: str = "worker") -> StoreClient:
    return await StoreClient.connect(path, NUMERICS, (SIZE,), name, "life")


async def put(client: StoreClient, blocks: Sequence[TierKey], is_shared: bool = False) -> bool:
    async def fill(granted: Sequence[tuple[int, int]]) -> list[int]:
        for nth, offset in granted:
            client.view(offset, SIZE)[:] = content(blocks[nth])
        return [block_sum(blocks[nth], content(blocks[nth])) for nth, _ in granted]

    facts = [BlockFacts(block, blocks[nth - 1][1] if nth else b"", nth) for nth, block in enumerate(blocks)]
    return await client.store(facts, fill, is_shared)


async def get(client: StoreClient, blocks: Sequence[TierKey]) -> set[int]:
    """Places of those that are there; each has its content."""

    async def take(leases: Sequence[Lease]) -> list[int]:
        bad = []
        for lease in leases:
            data = bytes(client.view(lease.offset, SIZE))
            if block_sum(blocks[lease.nth], data) != lease.sum:
                bad.append(lease.nth)
            else:
                assert data == content(blocks[lease.nth]), lease
        return bad

    return await client.fetch(blocks, take)


async def reach(path: str, stage: str, first: int, num: int) -> None:
    """Stop there for ever."""
    client, blocks = await join(path, "stopping"), blocks_of(first, num)

    async def stop(at: str) -> None:
        if stage == at:
            print(stage, flush=True)
            await asyncio.get_running_loop().create_future()

    async def fill(granted: Sequence[tuple[int, int]]) -> list[int]:
        await stop("granted")
        for nth, (place, offset) in enumerate(granted):
            if nth == len(granted) // 2:
                client.view(offset, SIZE // 2)[:] = content(blocks[place])[: SIZE // 2]
                await stop("half written")
            client.view(offset, SIZE)[:] = content(blocks[place])
        await stop("written")
        return [block_sum(blocks[place], content(blocks[place])) for place, _ in granted]

    async def take(leases: Sequence[Lease]) -> list[int]:
        await stop("leased")
        for lease in leases[: len(leases) // 2]:
            assert bytes(client.view(lease.offset, SIZE)) == content(blocks[lease.nth])
        await stop("taking")
        return []

    await stop("joined")
    await client.store([BlockFacts(block) for block in blocks], fill)
    await stop("stored")
    await client.fetch(blocks, take)


if __name__ == "__main__":
    run_event_loop(reach(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
