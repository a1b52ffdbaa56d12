"""A worker's copies between its pools and the memory of a KV store: what is told to the engine of each job."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tokenmill.core.block import BlockMove, KVGroup
from tokenmill.core.effects import DropBlocks, FetchBlocks, FindBlocks, SaveBlocks
from tokenmill.core.errors import EngineFailed
from tokenmill.core.tiers import BlockFacts, Lease, TierKey
from tokenmill.kv.connector.worker.tiers import SAVING_NICE, TierCopies
from tokenmill.kv.transfer.arena import PAGE, SharedArena
from tokenmill.ops.kv_pool import HostPool

GROUPS = [
    KVGroup("full", num_layers=2, num_kv_heads=2, head_dim=16, block_size=8),
    KVGroup("window", num_layers=1, num_kv_heads=2, head_dim=16, block_size=8, window=16, table=1),
]


class Client:
    """A StoreClient without a store: it keeps what it is given, in one slot for each block."""

    tiers = ()

    def __init__(self) -> None:
        self.arena = SharedArena(64 * PAGE)
        self.view = self.arena.view
        self.kept: dict[TierKey, tuple[int, int]] = {}
        self.dropped: list[TierKey] = []
        self.is_there = self.keeps = True

    async def find(self, wanted: Sequence[TierKey]) -> str:
        self._check()
        return "".join("01"[block in self.kept] for block in wanted)

    async def fetch(
        self, wanted: Sequence[TierKey], take: Callable[[Sequence[Lease]], Awaitable[Sequence[int]]]
    ) -> set[int]:
        self._check()
        leases = [Lease(nth, *self.kept[block]) for nth, block in enumerate(wanted) if block in self.kept]
        taken: set[int] = set()
        for lease in leases:
            bad = await take([lease])
            taken |= {lease.nth} - set(bad)
        return taken

    async def store(self, facts: Sequence[BlockFacts], fill: Any, is_shared: bool = False) -> bool:
        self._check()
        slots = [(nth, (len(self.kept) + nth) * PAGE) for nth in range(len(facts))]
        for (nth, offset), each in zip(slots, await fill(slots), strict=True):
            self.kept[facts[nth].block] = (offset, each)
        return self.keeps

    def drop(self, wanted: Sequence[TierKey]) -> None:
        self._check()
        self.dropped += wanted

    def leave(self) -> None:
        self.is_there = False

    def _check(self) -> None:
        if not self.is_there:
            raise ConnectionError("gone")


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


MOVES: list[BlockMove] = [(0, key(1), 3), (1, key(1), 5), (0, key(2), 1)]
FACTS = tuple(BlockFacts((group, name)) for group, name, _ in MOVES)


@pytest.fixture
def pools() -> list[HostPool]:
    made = [HostPool(group, 8, lambda data, group: data) for group in GROUPS]
    for nth, pool in enumerate(made):
        pool.data[:] = np.random.default_rng(nth).integers(0, 256, pool.data.shape)
    return made


def test_what_was_saved_comes_back_and_nothing_else_is_touched(pools: list[HostPool]) -> None:
    client = Client()
    copies = TierCopies(pools, client)  # type: ignore[arg-type]

    async def run() -> None:
        before = [pool.data.copy() for pool in pools]
        assert await copies.run(SaveBlocks(1, tuple(MOVES), facts=FACTS)) == ""
        for group, _, block in MOVES:
            pools[group].data[block] = 0
        wanted = tuple((group, name) for group, name, _ in MOVES)
        assert await copies.run(FindBlocks(2, (*wanted, (0, key(9))))) == "1110"
        assert await copies.run(FetchBlocks(3, tuple(MOVES))) == ""
        for pool, expected in zip(pools, before, strict=True):
            assert (pool.data == expected).all()
        pools[0].data[3] = 0
        assert await copies.run(FetchBlocks(4, ((0, key(1), 7), (0, key(9), 6)))) == "10"
        assert (pools[0].data[7] == before[0][3]).all()

    asyncio.run(run())
    copies.close()


@pytest.mark.parametrize("damage", ["a bit", "zeros", "another block"])
def test_a_slot_that_holds_something_else_is_told_as_not_had(pools: list[HostPool], damage: str) -> None:
    client = Client()
    copies = TierCopies(pools, client)  # type: ignore[arg-type]

    async def run() -> None:
        await copies.run(SaveBlocks(1, tuple(MOVES), facts=FACTS))
        first, other = client.kept[0, key(1)][0], client.kept[0, key(2)][0]
        size = GROUPS[0].bytes_per_block
        view = client.view(first, size)
        if damage == "a bit":
            view[size - 1] ^= 1
        else:
            view[:] = bytes(size) if damage == "zeros" else bytes(client.view(other, size))
        assert await copies.run(FetchBlocks(2, tuple(MOVES))) == "011"

    asyncio.run(run())
    copies.close()


def test_a_store_that_has_gone_has_nothing_and_takes_nothing(pools: list[HostPool]) -> None:
    client = Client()
    copies = TierCopies(pools, client)  # type: ignore[arg-type]

    async def run() -> None:
        await copies.run(SaveBlocks(1, tuple(MOVES), facts=FACTS))
        client.keeps = False
        assert await copies.run(SaveBlocks(2, tuple(MOVES), facts=FACTS)) == ""
        with pytest.raises(EngineFailed, match="tier that others share"):
            await copies.run(SaveBlocks(2, tuple(MOVES), facts=FACTS, is_shared=True))
        assert copies.tell(DropBlocks(((0, key(1)),))) == "" and client.dropped == [(0, key(1))]
        client.leave()
        assert await copies.run(FindBlocks(3, ((0, key(1)), (0, key(2))))) == "00"
        assert await copies.run(FetchBlocks(4, tuple(MOVES))) == "000"
        assert copies.tell(DropBlocks(((0, key(1)),))) == ""
        with pytest.raises(EngineFailed, match="did not take"):
            await copies.run(SaveBlocks(5, tuple(MOVES), facts=FACTS))

    asyncio.run(run())
    copies.close()


def test_a_fetch_that_is_cancelled_ends_when_its_copy_has(
    pools: list[HostPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine could give the block to another while it is still written."""
    client = Client()
    copies = TierCopies(pools, client)  # type: ignore[arg-type]
    begun, may_end = threading.Event(), threading.Event()
    commit = pools[0].commit

    def slowly(blocks: Sequence[int]) -> None:
        begun.set()
        may_end.wait(10)
        commit(blocks)

    async def run() -> None:
        await copies.run(SaveBlocks(1, tuple(MOVES), facts=FACTS))
        expected = pools[0].data[3].copy()
        pools[0].data[3] = 0
        monkeypatch.setattr(pools[0], "commit", slowly)
        fetching = asyncio.create_task(copies.run(FetchBlocks(2, MOVES[:1])))
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(3):
            fetching.cancel()
            await asyncio.sleep(0)
        assert not fetching.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert (pools[0].data[3] == expected).all()

    asyncio.run(run())
    copies.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_what_is_saved_is_copied_after_what_others_do(pools: list[HostPool]) -> None:
    """And what is fetched is not: a request waits for that."""
    client = Client()
    copies = TierCopies(pools, client)  # type: ignore[arg-type]
    nice: dict[str, int] = {}

    def look(offset: int, num_bytes: int) -> memoryview:
        thread = threading.current_thread().name.rpartition("_")[0]
        nice[thread] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return client.arena.view(offset, num_bytes)

    async def run() -> None:
        client.view = look
        await copies.run(SaveBlocks(1, tuple(MOVES), facts=FACTS))
        await copies.run(FetchBlocks(2, tuple(MOVES)))

    asyncio.run(run())
    copies.close()
    assert nice == {"kv-save": SAVING_NICE, "kv-fetch": os.getpriority(os.PRIO_PROCESS, os.getpid())}
