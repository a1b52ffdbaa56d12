"""A KV store and its clients over a real socket and real shared memory, with a manager that only knows host memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import (
    HOST,
    NO_PLACE,
    BlockFacts,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Gone,
    Granted,
    Inquire,
    Join,
    Joined,
    Lease,
    Leased,
    Said,
    Store,
    Stored,
    TierEffects,
    TierEvents,
    TierFacts,
    TierInput,
    TierKey,
    TierManaging,
    Told,
    WatchTiers,
    Written,
)
from tokenmill.kv.store.server import KVStore, Parts, listen
from tokenmill.kv.transfer.arena import PAGE, SharedArena
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.client import PART_BYTES, StoreClient
from tokenmill.net.system import MonotonicClock, run_event_loop

SIZE = 3 * PAGE + 5
SLOT = 4 * PAGE
SLAB = 64 * SLOT
BIG = PART_BYTES // 4 + 1


def on_a_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        run_event_loop(test(tmp_path))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class HostOnly:
    """A TierManaging that never evicts; each Leased has two blocks at most, and some blocks it never finds."""

    next_s = None

    def __init__(self, slot_bytes: int = SLOT) -> None:
        self.slot_bytes = slot_bytes
        self.blocks: dict[TierKey, tuple[int, int]] = {}
        self.writing: dict[tuple[int, int], tuple[Store, tuple[int, ...]]] = {}
        self.leased: dict[tuple[int, int], Fetch] = {}
        self.bad: list[tuple[int, ...]] = []
        self.gone: list[int] = []
        self.num_slots = 0

    def handle(self, event: TierInput, now: float) -> TierEffects:
        if isinstance(event, Gone):
            self.gone.append(event.client)
            self.leased = {place: fetch for place, fetch in self.leased.items() if place[0] != event.client}
            self.writing = {place: each for place, each in self.writing.items() if place[0] != event.client}
            return TierEffects()
        assert isinstance(event, Said)
        return TierEffects(tuple((event.client, answer) for answer in self.answers(event)))

    def answers(self, said: Said) -> list[FromStore]:
        message = said.message
        match message:
            case Join():
                return [Joined(SLAB, (TierFacts(HOST, SLAB),))]
            case Find(number, wanted):
                return [Found(number, "".join("01"[block in self.blocks] for block in wanted))]
            case Fetch(number, wanted):
                self.leased[said.client, number] = message
                here = [Lease(nth, *self.blocks[block]) for nth, block in enumerate(wanted) if block in self.blocks]
                missing = tuple(nth for nth, block in enumerate(wanted) if block not in self.blocks)
                parts = [Leased(number, tuple(here[nth : nth + 2])) for nth in range(0, len(here), 2)]
                return [*parts, Leased(number, (), missing, True)]
            case Fetched(number, bad):
                self.leased.pop((said.client, number))
                self.bad.append(bad)
            case Store(number, blocks):
                offsets = []
                for facts in blocks:
                    offsets.append(NO_PLACE if facts.block in self.blocks else self.num_slots * self.slot_bytes)
                    self.num_slots += facts.block not in self.blocks
                self.writing[said.client, number] = message, tuple(offsets)
                return [Granted(number, tuple(offsets))]
            case Written(number, sums):
                store, places = self.writing.pop((said.client, number))
                for facts, offset, each in zip(store.blocks, places, sums, strict=True):
                    if each != NO_PLACE:
                        self.blocks[facts.block] = offset, each
                return [Stored(number, all(facts.block in self.blocks for facts in store.blocks))]
            case WatchTiers():
                return [TierEvents(0, ())]
            case Inquire(number, "fail"):
                raise RuntimeError("as asked")
            case Inquire(number, what):
                return [
                    Told(number, json.dumps({"what": what}))
                    if what == "stat"
                    else Told(number, "", f"There is no {what}.")
                ]
        return []


@asynccontextmanager
async def serving(path: Path, manager: TierManaging, slab_bytes: int = SLAB) -> AsyncIterator[asyncio.Task[None]]:
    arena = SharedArena(slab_bytes)
    store = KVStore(arena, lambda join, arena: Parts(manager, {}), MonotonicClock(), lambda: {"x": 1.0})
    with listen(str(path)) as listener:
        running = asyncio.create_task(store.run(listener))
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            arena.close()
    path.unlink()


async def joined(path: Path, size: int = SIZE) -> StoreClient:
    return await StoreClient.connect(str(path), "numerics", (size,), "worker", "life")


def keys(num: int) -> list[TierKey]:
    return [(0, nth.to_bytes(16, "big")) for nth in range(num)]


def content(block: TierKey, size: int = SIZE) -> bytes:
    return (block[1] * (size // 16 + 1))[:size]


async def put(client: StoreClient, blocks: Sequence[TierKey], size: int = SIZE) -> bool:
    async def fill(granted: Sequence[tuple[int, int]]) -> list[int]:
        for nth, offset in granted:
            client.view(offset, size)[:] = content(blocks[nth], size)
        return [block_sum(blocks[nth], content(blocks[nth], size)) for nth, _ in granted]

    return await client.store([BlockFacts(block) for block in blocks], fill)


async def get(client: StoreClient, blocks: Sequence[TierKey], size: int = SIZE) -> set[int]:
    async def take(leases: Sequence[Lease]) -> list[int]:
        wrong = [lease.nth for lease in leases if block_sum(blocks[lease.nth], look(lease)) != lease.sum]
        assert all(lease.nth in wrong or look(lease) == content(blocks[lease.nth], size) for lease in leases)
        return wrong

    def look(lease: Lease) -> memoryview:
        return client.view(lease.offset, size)

    return await client.fetch(blocks, take)


async def settled(is_so: object) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # type: ignore[operator]
            await asyncio.sleep(0.005)


@on_a_loop
async def test_what_one_worker_stores_another_fetches(tmp_path: Path) -> None:
    """Through one memory; a block that nobody has stored is no place in the result."""
    manager = HostOnly()
    async with serving(tmp_path / "kv", manager):
        one, other = await joined(tmp_path / "kv"), await joined(tmp_path / "kv")
        blocks = keys(7)
        assert await put(one, blocks[:5])
        assert await other.find(blocks) == "1111100"
        assert await get(other, blocks) == {0, 1, 2, 3, 4}
        assert await put(other, blocks)
        assert await get(one, blocks) == set(range(7))
        await settled(lambda: not manager.leased and not manager.writing)
        assert one.tiers == (TierFacts(HOST, SLAB),)
        await one.close()
        await other.close()


@on_a_loop
async def test_large_calls_go_in_parts(tmp_path: Path) -> None:
    """The places are those of the whole call, and no part of it is larger than it may be."""
    manager = HostOnly(BIG // PAGE * PAGE + PAGE)
    async with serving(tmp_path / "kv", manager, 16 * manager.slot_bytes):
        client = await joined(tmp_path / "kv", BIG)
        blocks = keys(11)
        assert await put(client, blocks, BIG)
        assert await get(client, list(reversed(blocks)), BIG) == set(range(11))
        await settled(lambda: len(manager.bad) == 4)  # three blocks a part
        await client.close()


@on_a_loop
async def test_a_damaged_block_is_told(tmp_path: Path) -> None:
    """Its place in the part that it was fetched in goes back to the store."""
    manager = HostOnly()
    async with serving(tmp_path / "kv", manager):
        client = await joined(tmp_path / "kv")
        blocks = keys(4)
        await put(client, blocks)
        client.view(manager.blocks[blocks[2]][0], SIZE)[-1] ^= 1
        assert await get(client, blocks) == {0, 1, 3}
        await settled(lambda: manager.bad == [(2,)])
        await client.close()


@on_a_loop
async def test_others_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Another numerics id, other sizes; who only asks has to wait for a worker."""
    async with serving(tmp_path / "kv", HostOnly()):
        path = str(tmp_path / "kv")
        with pytest.raises(ConfigError, match="No worker has joined"):
            await StoreClient.connect(path)
        client = await joined(tmp_path / "kv")
        with pytest.raises(ConfigError, match="another model"):
            await StoreClient.connect(path, "other", (SIZE,))
        with pytest.raises(ConfigError, match=f"blocks of {SIZE} bytes, this worker of 7"):
            await StoreClient.connect(path, "numerics", (7,))
        asking = await StoreClient.connect(path)
        assert json.loads(await asking.inquire("stat")) == {"what": "stat", "host_memory": {"x": 1.0}}
        with pytest.raises(ConfigError, match="There is no such"):
            await asking.inquire("such")
        await asking.close()
        await client.close()


@on_a_loop
async def test_a_client_outlives_its_store(tmp_path: Path) -> None:
    """It fails at once while there is none, joins the next, and watches again what that one has."""
    manager, path = HostOnly(), tmp_path / "kv"
    heard: list[TierEvents] = []
    async with serving(path, manager) as running:
        client = await joined(path)
        client.watch(heard.append)
        assert await put(client, keys(3))
        with pytest.raises(OSError):
            await client.inquire("fail")
        with pytest.raises(RuntimeError, match="as asked"):
            await running
    await settled(lambda: not client.is_there)
    for call in (client.find(keys(3)), get(client, keys(3)), put(client, keys(3))):
        with pytest.raises(OSError):
            await call
    with pytest.raises(OSError):
        client.drop(keys(3))
    assert [event.kind for event in heard[-1].events] == ["cleared"]
    num_heard = len(heard)
    rejoined: list[bool] = []
    client.when_rejoined = lambda: rejoined.append(client.is_there)
    async with serving(path, HostOnly()):
        await settled(lambda: client.is_there)
        assert await client.find(keys(3)) == "000"
        assert await put(client, keys(3))
        assert await get(client, keys(3)) == {0, 1, 2}
        assert len(heard) == num_heard + 1
        await settled(lambda: client.num_rejoined == 1 and rejoined == [True])
        await client.close()


@on_a_loop
async def test_leases_end_with_their_client(tmp_path: Path) -> None:
    """Whatever it was about to do; a call that is given up says so by itself."""
    manager = HostOnly()
    async with serving(tmp_path / "kv", manager):
        client, other = await joined(tmp_path / "kv"), await joined(tmp_path / "kv")
        blocks = keys(2)
        await put(client, blocks)

        async def take(leases: Sequence[Lease]) -> list[int]:
            await asyncio.get_running_loop().create_future()
            return []

        fetching = asyncio.create_task(client.fetch(blocks, take))
        await settled(lambda: len(manager.leased) == 1)
        fetching.cancel()
        await settled(lambda: not manager.leased)
        fetching = asyncio.create_task(client.fetch(blocks, take))
        await settled(lambda: len(manager.leased) == 1)
        storing = asyncio.create_task(client.store([BlockFacts((0, b"new"))], take))  # type: ignore[arg-type]
        await settled(lambda: len(manager.writing) == 1)
        await client.close()
        fetching.cancel()
        storing.cancel()
        await settled(lambda: len(manager.gone) == 1)
        assert not manager.leased and not manager.writing
        assert await other.find([*blocks, (0, b"new")]) == "110"
        await other.close()


@on_a_loop
async def test_garbage_on_the_socket_ends_only_its_own_connection(tmp_path: Path) -> None:
    """Before and after the first message, and a length that nobody means."""
    async with serving(tmp_path / "kv", HostOnly()):
        client = await joined(tmp_path / "kv")
        for nth in range(40):
            data = (b"\xff\xff\xff\xff", b"\x03\0\0\0Jxx", os.urandom(50), b"\0\0\0\0\x01\0\0\0?")[nth % 4]
            with socket.socket(socket.AF_UNIX) as end:
                end.setblocking(False)
                await asyncio.get_running_loop().sock_connect(end, str(tmp_path / "kv"))
                await asyncio.get_running_loop().sock_sendall(end, data)
                end.shutdown(socket.SHUT_WR)
                assert await asyncio.get_running_loop().sock_recv(end, 100) == b""
        assert await put(client, keys(1)) and await get(client, keys(1)) == {0}
        await client.close()


def test_the_socket_is_its_users_alone(tmp_path: Path) -> None:
    """Mode 0600; one that a dead store has left is taken over, one where a store listens is not."""
    path = tmp_path / "kv"
    with listen(str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError, match="listens"):
            listen(str(path))
    listen(str(path)).close()


def test_memory_of_the_slab_goes_back() -> None:
    """Only what is written takes memory, and what is freed takes none and reads as zeros, in all mappings."""
    arena = SharedArena(1 << 24)
    other = SharedArena.attach(os.dup(arena.fd), arena.num_bytes)
    assert arena.taken_bytes == 0
    arena.view(1 << 20, 1 << 20)[:] = b"x" * (1 << 20)
    assert other.view((1 << 20) + 5, 3) == b"xxx" and arena.taken_bytes == 1 << 20
    arena.free(1 << 20, 1 << 19)
    assert arena.taken_bytes == 1 << 19
    assert other.view(1 << 20, 3) == b"\0\0\0" and other.view((1 << 20) + (1 << 19), 3) == b"xxx"
    assert not arena.commit(0, 1 << 20) or 0 <= arena.taken_bytes - (1 << 19) - (1 << 20) <= 1 << 16
    with pytest.raises(OSError):
        os.ftruncate(other.fd, 0)
    other.close()
    arena.close()


def test_a_sum_knows_the_block_that_it_is_of() -> None:
    """The same bytes under another key or in another group, and bytes changed anywhere, have another one."""
    data = bytearray(os.urandom(5000))
    sums = {block_sum(block, data) for block in ((0, b"a"), (1, b"a"), (0, b"b"), (0, b""))}
    for place in (0, 2500, 4999):
        data[place] ^= 1
        sums.add(block_sum((0, b"a"), data))
        data[place] ^= 1
    assert len(sums) == 7 and all(0 <= each < 1 << 63 for each in sums)
    assert block_sum((0, b"a"), data) == block_sum((0, b"a"), bytes(data)) in sums
