"""Gives the KV stores of other machines what this one has, in host memory or on disk; never what it would have to fetch
from others itself.

Each connection has a thread, and is a client of the store as any worker: what it was leased lapses with it. A block is
compared with its checksum before it goes out; a wrong one is told to the store, which drops it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...core.errors import ConfigError
from ...core.tiers import Fetch, Fetched, Find, Found, FromStore, Join, Joined, Lease, Leased, TierKey
from ..tiers.shell import TierLink, TierShell
from ..transfer.checksum import block_sum
from ..transfer.peer.client import PeerAuth
from ..transfer.peer.frames import BadPeer, Connection
from ..transfer.peer.server import Listener
from ..transfer.remote.calls import Chunk
from ..transfer.remote.peer import PURPOSE, VERSION, peer_auth, read_wanted
from ..transfer.seal import OVERHEAD, Seal

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""The store takes at most so long for an answer."""

FOREIGN = "It keeps KV of another model, or of the same computed otherwise."

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class _Visitor:
    """link  what it is to the store
    room     for a sealed block
    number   of its last question
    """

    connection: Connection
    link: TierLink
    chunk: Chunk
    room: memoryview
    number: int = 0


class PeerService:
    """shell  of the store, which runs on `loop`
    join      what its workers say when they join
    view      (offset, bytes) of host memory
    key       the cluster's
    """

    def __init__(
        self,
        shell: TierShell,
        join: Join,
        view: Callable[[int, int], memoryview],
        key: bytes,
        loop: asyncio.AbstractEventLoop,
        auth: PeerAuth | None = None,
    ) -> None:
        self._shell = shell
        self._join = replace(join, name="", incarnation="")
        self._view = view
        self._seal = Seal(key, PURPOSE, join.numerics_id)
        self._loop = loop
        self._listener = Listener((auth or peer_auth(key)).welcome, self._serve)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._using: set[Chunk] = set()
        self._is_closed = False

    @property
    def address(self) -> str:
        return self._listener.address

    def start(self, address: str) -> None:
        """Raises ConfigError where it cannot be had."""
        host, _, port = address.rpartition(":")
        try:
            self._listener.start(host.strip("[]") or "127.0.0.1", int(port))
        except ValueError:
            message = f"--kv-peer-address takes HOST:PORT, got {address!r}."
            raise ConfigError(message, param="kv_peer_address") from None
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--kv-peer-address {address} cannot be had: {error}", param="kv_peer_address") from error

    def close(self) -> None:
        """Host memory is not looked at any more once this has returned."""
        self._listener.close()
        with self._lock:
            self._is_closed = True
            using = list(self._using)
        for chunk in using:
            with chunk.lock:
                chunk.is_over = True

    def stat(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)

    # ---- a connection's thread ----

    def _serve(self, connection: Connection) -> None:
        refusal = self._refusal(connection.receive())
        connection.send({"error": refusal} if refusal else {})
        if refusal:
            self._count(peers_refused=1)
            return
        with self._link() as link, self._slots() as chunk:
            room = memoryview(bytearray(max(self._join.block_bytes) + OVERHEAD))
            visitor = _Visitor(connection, link, chunk, room)
            while True:
                message = connection.receive()
                if message is not None:
                    visitor.number += 1
                    self._answer(visitor, message)

    def _answer(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        wanted = read_wanted(message, len(self._join.block_bytes))
        if message.get("ask") == "look":
            self._count(looks=1)
            found = self._find(visitor, wanted)
            visitor.connection.send({"found": "".join("0" if digit == "0" else "1" for digit in found)})
        elif message.get("ask") == "load":
            self._send_blocks(visitor, wanted)
        else:
            raise BadPeer(f"It asks for {message.get('ask')!r}.")

    def _refusal(self, hello: dict[str, Any] | None) -> str:
        if hello is None or hello.get("ask") != "hello":
            raise BadPeer("It does not say who it is first.")
        if hello.get("version") != VERSION:
            return "It speaks another version."
        if hello.get("numerics_id") != self._join.numerics_id:
            return FOREIGN
        return "" if hello.get("block_bytes") == list(self._join.block_bytes) else FOREIGN

    def _find(self, visitor: _Visitor, wanted: tuple[TierKey, ...]) -> str:
        if not wanted:
            return ""
        answer = self._ask(visitor.link, Find(visitor.number, wanted, is_near=True))
        assert isinstance(answer, Found), answer
        return answer.digits

    def _send_blocks(self, visitor: _Visitor, wanted: tuple[TierKey, ...]) -> None:
        if wanted:
            self._fetch(visitor, wanted)
        visitor.connection.send({"is_last": True})

    def _fetch(self, visitor: _Visitor, wanted: tuple[TierKey, ...]) -> None:
        bad: list[int] = []
        answer = self._ask(visitor.link, Fetch(visitor.number, wanted, is_near=True))
        try:
            while True:
                assert isinstance(answer, Leased), answer
                for lease in answer.leases:
                    sealed = self._sealed(visitor, wanted[lease.nth], lease)
                    if sealed is None:
                        bad.append(lease.nth)
                        continue
                    visitor.connection.send({"nth": lease.nth, "num_bytes": len(sealed)})
                    visitor.connection.raw.sendall(sealed)
                    self._count(blocks_sent=1, bytes_sent=len(sealed))
                if answer.is_last:
                    break
                answer = self._on_loop(visitor.link.hear())
        finally:
            self._on_loop(visitor.link.say(Fetched(visitor.number, tuple(bad))))
        self._count(blocks_wrong=len(bad))

    def _sealed(self, visitor: _Visitor, block: TierKey, lease: Lease) -> memoryview | None:
        """None: what lies there is wrong."""
        num_bytes = self._join.block_bytes[block[0]]
        sealed = visitor.room[: num_bytes + OVERHEAD]
        with visitor.chunk.lock:
            visitor.chunk.check()
            data = self._view(lease.offset, num_bytes)
            if block_sum(block, data) != lease.sum:
                return None
            self._seal.seal(block, lease.sum, data, sealed)
        return sealed

    @contextmanager
    def _link(self) -> Iterator[TierLink]:
        """As a client of the store."""
        link = self._on_loop(self._joined())
        try:
            yield link
        finally:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(link.close)

    @contextmanager
    def _slots(self) -> Iterator[Chunk]:
        chunk = Chunk()
        with self._lock:
            if self._is_closed:
                raise EOFError("The KV store ends.")
            self._using.add(chunk)
        try:
            yield chunk
        finally:
            with self._lock:
                self._using.discard(chunk)

    def _ask(self, link: TierLink, message: Find | Fetch) -> FromStore:
        async def ask() -> FromStore:
            await link.say(message)
            return await self._heard(link, message.number)

        return self._on_loop(ask())

    async def _heard(self, link: TierLink, number: int) -> FromStore:
        """The first answer to this question: of an earlier one, which was given up, there may be some left."""
        while True:
            answer = await link.hear()
            if getattr(answer, "number", number) == number:
                return answer

    async def _joined(self) -> TierLink:
        link = self._shell.connect()
        await link.say(self._join)
        answer = await link.hear()
        if not isinstance(answer, Joined) or answer.error:
            link.close()
            raise EOFError("The KV store does not let others in.")
        return link

    def _on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Raises EOFError where the store has gone or does not answer."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise EOFError("The KV store has gone.") from error
        try:
            return future.result(PATIENCE_S)
        except TimeoutError as error:
            future.cancel()
            raise EOFError("The KV store does not answer.") from error

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
