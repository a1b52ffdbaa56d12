"""Blocks that go from one machine's KV store to another's: what is right arrives, all else is a miss, soon."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager

import pytest

from ports import free_port
from remote_stores import BLOCK_BYTES, KEY, SLOT_BYTES, Host, block, content, look, until
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import (
    NO_PLACE,
    Fetch,
    Fetched,
    Find,
    Found,
    FromStore,
    Gone,
    Join,
    Joined,
    Lease,
    Leased,
    LoadFrom,
    LookIn,
    Said,
    TierEffects,
    TierInput,
    TierKey,
)
from tokenmill.kv.store.peers import PeerService
from tokenmill.kv.tiers.shell import TierShell
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.peer.frames import Connection, receive_exactly
from tokenmill.kv.transfer.peer.server import Listener
from tokenmill.kv.transfer.remote.peer import PURPOSE, PeerTier, peer_auth
from tokenmill.kv.transfer.remote.sealed import Limits
from tokenmill.kv.transfer.seal import OVERHEAD, Seal
from tokenmill.net.system import MonotonicClock

MODEL = "model A"
BLOCKS = [block(number) for number in range(20)]
QUICK = Limits(call_s=1.0, retry_s=0.05)
LOCAL = "127.0.0.1:0"


class Holder:
    """The manager of a store that has some blocks in host memory, and leases them three at a time."""

    def __init__(self, host: Host, blocks: Sequence[TierKey]) -> None:
        host.saves(blocks)
        self.held = {
            wanted: (nth * SLOT_BYTES, block_sum(wanted, content(wanted))) for nth, wanted in enumerate(blocks)
        }
        self.leases: dict[int, int] = {}
        self.bad: list[TierKey] = []
        self._fetches: dict[tuple[int, int], Fetch] = {}

    @property
    def next_s(self) -> float | None:
        return None

    def handle(self, event: TierInput, now: float) -> TierEffects:
        if isinstance(event, Gone):
            self.leases.pop(event.client, None)
            return TierEffects()
        assert isinstance(event, Said), event
        return TierEffects(
            answers=tuple((event.client, answer) for answer in self._answer(event.client, event.message))
        )

    def _answer(self, client: int, message: object) -> Iterator[FromStore]:
        if isinstance(message, Join):
            yield Joined(1 << 20, ())
        elif isinstance(message, Find):
            assert message.is_near
            yield Found(message.number, "".join("01"[wanted in self.held] for wanted in message.wanted))
        elif isinstance(message, Fetch):
            assert message.is_near
            self._fetches[client, message.number] = message
            there = [nth for nth, wanted in enumerate(message.wanted) if wanted in self.held]
            self.leases[client] = len(there)
            for at in range(0, len(there), 3):
                some = [Lease(nth, *self.held[message.wanted[nth]]) for nth in there[at : at + 3]]
                yield Leased(message.number, tuple(some))
            yield Leased(message.number, (), tuple(set(range(len(message.wanted))) - set(there)), True)
        elif isinstance(message, Fetched):
            fetch = self._fetches.pop((client, message.number))
            self.leases[client] = 0
            for nth in message.bad:
                self.bad.append(fetch.wanted[nth])
                self.held.pop(fetch.wanted[nth])
        else:
            raise AssertionError(message)


class Source:
    """A machine with a KV store that gives to peers."""

    def __init__(self, blocks: Sequence[TierKey], address: str = LOCAL, model: str = MODEL, key: bytes = KEY) -> None:
        self.host = Host()
        self.manager = Holder(self.host, blocks)
        self._shell = TierShell(self.manager, {}, MonotonicClock(), lambda offset, num_bytes: None)
        self._running = asyncio.create_task(self._shell.run())
        loop = asyncio.get_running_loop()
        self.service = PeerService(self._shell, Join(model, BLOCK_BYTES), self.host.view, key, loop)
        self.service.start(address)
        self.address = self.service.address

    async def close(self) -> None:
        self.service.close()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


@asynccontextmanager
async def machines(*held: Sequence[TierKey]) -> AsyncIterator[list[Source]]:
    sources = [Source(blocks) for blocks in held]
    try:
        yield sources
    finally:
        for source in sources:
            await source.close()


@asynccontextmanager
async def asking(
    addresses: Sequence[str], host: Host, model: str = MODEL, key: bytes = KEY, limits: Limits = QUICK
) -> AsyncIterator[PeerTier]:
    tier = PeerTier(addresses, model, BLOCK_BYTES, host.view, key, limits)
    assert list(await tier.open()) == []
    try:
        yield tier
    finally:
        await tier.close()


async def fetch(tier: PeerTier, host: Host, blocks: Sequence[TierKey]) -> list[bool]:
    """Which came of those that were found, each with its bytes and checksum."""
    places = list(await tier.look(LookIn(1, "peer", tuple(blocks))))
    wanted = [(at, place) for at, place in zip(blocks, places, strict=True) if place != NO_PLACE]
    job = host.loads([at for at, _ in wanted], [place for _, place in wanted], "peer")
    came = set()
    for nth, ((at, _), value) in enumerate(zip(wanted, await tier.load(job), strict=True)):
        if value != NO_PLACE:
            assert value == block_sum(at, content(at)) and host.has(nth, at), at
            came.add(at)
    return [at in came for at in blocks]


def test_blocks_come_from_whichever_peer_has_them() -> None:
    """Two machines have some each, a third none: all that there is arrives, byte for byte, with its checksum."""

    async def run() -> None:
        async with machines(BLOCKS[:8], BLOCKS[5:15], []) as sources:
            host = Host()
            async with asking([source.address for source in sources], host) as tier:
                assert await look(tier, BLOCKS, "peer") == [True] * 15 + [False] * 5
                assert await fetch(tier, host, BLOCKS) == [True] * 15 + [False] * 5
                assert tier.stat()["blocks_loaded"] == 15 and tier.stat()["is_down"] == 0
                assert tier.facts.name == "peer" and tier.facts.latency_s > 0
                assert sum(source.service.stat().get("blocks_sent", 0) for source in sources) == 15
                assert all(not any(source.manager.leases.values()) for source in sources)

    asyncio.run(run())


def test_what_is_wrong_at_its_source_is_not_sent_and_dropped_there() -> None:
    """A byte of host memory has changed: the asker misses the block, its holder hears of it."""

    async def run() -> None:
        async with machines(BLOCKS) as (source,):
            host = Host()
            for nth in (3, 11):
                source.host.slot(nth, BLOCKS[nth])[100] ^= 4
            async with asking([source.address], host) as tier:
                assert await fetch(tier, host, BLOCKS) == [nth not in (3, 11) for nth in range(20)]
                await until(lambda: len(source.manager.bad) == 2)
                assert set(source.manager.bad) == {BLOCKS[3], BLOCKS[11]}
                assert source.service.stat()["blocks_wrong"] == 2
                assert await look(tier, BLOCKS, "peer") == [nth not in (3, 11) for nth in range(20)]

    asyncio.run(run())


def test_others_are_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """Another key does not get in, another model is sent away; neither costs the asker more than a miss."""

    async def run() -> None:
        async with machines(BLOCKS) as (source,):
            host = Host()
            for model, key in ((MODEL, b"?" * 32), ("model B", KEY)):
                async with asking([source.address], host, model, key) as tier:
                    assert tier.stat()["is_down"] == 1
                    assert await fetch(tier, host, BLOCKS) == [False] * 20
            # The asker knows that it is turned away before the store has counted it.
            await until(lambda: bool(source.service.stat()))
            assert source.service.stat().keys() == {"peers_refused"}

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "does not take our secret" in caplog.text
    assert "another model" in caplog.text


def test_noise_at_the_door_harms_nobody() -> None:
    """Who says what is no proof is cut off without an answer, and others are served."""

    async def run() -> None:
        async with machines(BLOCKS) as (source,):
            draw, host = random.Random(3), Host()
            host_name, _, port = source.address.rpartition(":")
            for _ in range(20):
                end = await asyncio.to_thread(socket.create_connection, (host_name, int(port)), 5)
                with end:
                    await asyncio.to_thread(receive_exactly, end, 32)
                    await asyncio.to_thread(end.sendall, draw.randbytes(64))
                    assert await asyncio.to_thread(end.recv, 100) == b""
            async with asking([source.address], host) as tier:
                assert await fetch(tier, host, BLOCKS) == [True] * 20

    asyncio.run(run())


def test_who_asks_for_nonsense_is_cut_off() -> None:
    """Past the handshake, too: groups that do not exist, keys of another length, too many."""

    async def run() -> None:
        async with machines(BLOCKS) as (source,):
            for wanted in (["9:" + "00" * 16], ["0:00"], ["x"], [7], {}, ["0:" + "00" * 16] * 5000):
                assert await asyncio.to_thread(ask_plainly, source.address, wanted) is None
            assert not any(source.manager.leases.values())

    asyncio.run(run())


def ask_plainly(address: str, wanted: object) -> object:
    with closing(peer_auth(KEY).connect(address)) as connection:
        said = {"ask": "hello", "version": 1, "numerics_id": MODEL, "block_bytes": list(BLOCK_BYTES)}
        connection.send(said)
        assert connection.receive() == {}
        connection.send({"ask": "load", "wanted": wanted})
        try:
            return connection.receive()
        except (EOFError, ConnectionError):
            return None


def test_a_peer_that_goes_is_given_up_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of loads; the other one goes on giving, and a peer that is back is asked again."""

    async def run() -> None:
        address = f"127.0.0.1:{free_port()}"
        host, rounds = Host(), 0
        first = Source(BLOCKS[:10], address)
        async with machines(BLOCKS[8:]) as (second,), asking([address, second.address], host) as tier:

            async def keep_fetching() -> None:
                nonlocal rounds
                while tier.stat()["is_down"] == 0:
                    came = await fetch(tier, host, BLOCKS)
                    assert all(came[10:])
                    rounds += 1

            work = asyncio.create_task(keep_fetching())
            await until(lambda: rounds >= 3)
            await first.close()
            await asyncio.wait_for(work, 20)
            asked = tier.stat()["errors"]
            assert await fetch(tier, host, BLOCKS) == [False] * 8 + [True] * 12
            assert tier.stat()["errors"] == asked, "a peer that was given up was asked"
            again = Source(BLOCKS[:10], address)
            try:
                await until(lambda: tier.stat()["is_down"] == 0)
                assert await fetch(tier, host, BLOCKS) == [True] * 20
            finally:
                await again.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "is not looked for" in caplog.text and "is looked for" in caplog.text


@contextmanager
def faulty_peer(how: str) -> Iterator[str]:
    """A peer that knows the key, and says to have all; what it sends is wrong, cut short or never there."""
    over = threading.Event()
    draw = random.Random(how)
    seal = Seal(KEY, PURPOSE, MODEL)

    def serve(connection: Connection) -> None:
        connection.receive()
        connection.send({})
        while True:
            message = connection.receive()
            assert message is not None
            wanted = message["wanted"]
            if message["ask"] == "look":
                connection.send({"found": "1" * len(wanted)})
                continue
            if how == "silent":
                over.wait(20)
                raise EOFError
            for nth, name in enumerate(wanted):
                sealed = sealed_by(seal, name, how, draw)
                connection.send({"nth": 10**6 if how == "lost" else nth, "num_bytes": len(sealed)})
                connection.raw.sendall(sealed[:50] if how == "gone" else sealed)
                if how == "gone":
                    raise EOFError
            connection.send({"is_last": True})

    listener = Listener(peer_auth(KEY).welcome, serve)
    listener.start()
    try:
        yield listener.address
    finally:
        over.set()
        listener.close()


def sealed_by(seal: Seal, name: str, how: str, draw: random.Random) -> bytes:
    group, _, key = name.partition(":")
    at = (int(group), bytes.fromhex(key))
    sealed = bytearray(BLOCK_BYTES[at[0]] + OVERHEAD)
    if how == "noise":
        return draw.randbytes(len(sealed))
    if how == "zeros":
        return bytes(len(sealed))
    told = (at[0], b"\xff" * 16) if how == "swapped" else at
    seal.seal(told, block_sum(at, content(at)), content(at), sealed)
    if how == "flipped":
        sealed[draw.randrange(12, len(sealed))] ^= 1 << draw.randrange(8)
    if how == "huge":
        return bytes(sealed) + bytes(sum(BLOCK_BYTES))
    return bytes(sealed[:-3]) if how == "short" else bytes(sealed)


@pytest.mark.parametrize("how", ["noise", "zeros", "swapped", "flipped", "short", "huge", "lost", "gone", "silent"])
def test_what_a_faulty_peer_sends_is_not_served(how: str) -> None:
    """Nothing of it gets into use, and the call ends in time."""

    async def run(address: str) -> None:
        host = Host()
        limits = Limits(call_s=0.3 if how in ("lost", "silent") else 10.0, least_bytes_s=1e9, retry_s=60.0)
        async with asking([address], host, limits=limits) as tier:
            job = host.loads(BLOCKS, [0] * 20, "peer")
            assert await look(tier, BLOCKS, "peer") == [True] * 20
            async with asyncio.timeout(30):
                assert list(await tier.load(job)) == [NO_PLACE] * 20
            stat = tier.stat()
            counted = {"noise": "blocks_foreign", "zeros": "blocks_foreign", "short": "blocks_short"}.get(how, "")
            if how in ("swapped", "flipped"):
                counted = "blocks_corrupt"
            if counted:
                assert stat[counted] == 20
            else:
                assert stat["loads_failed"] == 20

    with faulty_peer(how) as address:
        asyncio.run(run(address))


def test_leases_lapse_when_the_asker_goes() -> None:
    """It dies while blocks are on their way to it."""

    async def run() -> None:
        async with machines(BLOCKS) as (source,):

            def leave_in_the_middle() -> None:
                with closing(peer_auth(KEY).connect(source.address)) as connection:
                    said = {"ask": "hello", "version": 1, "numerics_id": MODEL, "block_bytes": list(BLOCK_BYTES)}
                    connection.send(said)
                    assert connection.receive() == {}
                    names = [f"{group}:{key.hex()}" for group, key in BLOCKS]
                    connection.send({"ask": "load", "wanted": names})
                    assert connection.receive() is not None

            await asyncio.to_thread(leave_in_the_middle)
            await until(lambda: source.manager.leases == {})

    asyncio.run(run())


def test_nothing_is_written_to_a_peer() -> None:
    """A save keeps nothing, a drop takes nothing away."""

    async def run() -> None:
        async with machines(BLOCKS[:5]) as (source,):
            host = Host()
            async with asking([source.address], host) as tier:
                assert list(await tier.save(host.saves(BLOCKS, "peer"))) == [NO_PLACE] * 20
                assert await look(tier, BLOCKS, "peer") == [True] * 5 + [False] * 15
                assert list(await tier.load(LoadFrom(1, "peer", ()))) == []

    asyncio.run(run())


@pytest.mark.parametrize("address", ["nowhere", "host:", ":9000", "host:port", "host:70000", "host:0"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    """In words that say how they look."""
    with pytest.raises(ConfigError, match="HOST:PORT") as caught:
        PeerTier([address], MODEL, BLOCK_BYTES, Host().view, KEY)
    assert caught.value.param == "kv_peers"
