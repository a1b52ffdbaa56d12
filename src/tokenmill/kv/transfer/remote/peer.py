"""The peer tier: blocks that KV stores of other machines have in their host memory or on their disks.

All peers are asked beside each other; a block is fetched from the one that answers soonest of those that have it.
Nothing is written to a peer: it keeps what its own workers computed. What it holds is verified there, sealed on its way
(`seal`), and compared with its checksum by the worker that takes it. What two stores say to each other, in frames of
`kv.transfer.peer.frames`, after the handshake:

    the one that asks                                        the one that has
    hello  version, numerics_id, block_bytes             ->
                                                         <-  nothing more, or an error: it is another model's
    look   wanted [[group, key in hex]]                  ->
                                                         <-  found "0110..": a digit for each
    load   wanted                                        ->
                                                         <-  nth, num_bytes; then the block, sealed; and so on
                                                         <-  is_last
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ....core.block import KEY_BYTES
from ....core.errors import ConfigError
from ....core.mac import derive
from ....core.tiers import NO_PLACE, PEER, DropFrom, LoadFrom, LookIn, SaveTo, TierEntry, TierFacts, TierKey
from ....core.units import MiB
from ..peer.client import PeerAuth
from ..peer.frames import IDLE_S, BadPeer, Connection, receive_into
from ..seal import Seal
from .backend import Buffer
from .calls import ASK, Connections
from .sealed import Limits, SealedStore, View

VERSION = 1
MOST_WANTED = 4096
PURPOSE = "kv peer"
"""Of the seals."""
PARAM = "kv_peers"


class PeerTier:
    """Implements core.tiers.Tier. All calls on one event loop.

    addresses    HOST:PORT of each peer
    block_bytes  of each KV group
    view         (offset, bytes) of host memory
    key          the cluster's (`seal.load_key`)

    Raises ConfigError.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        numerics_id: str,
        block_bytes: Sequence[int],
        view: View,
        key: bytes,
        limits: Limits | None = None,
        auth: PeerAuth | None = None,
    ) -> None:
        for address in addresses:
            check_address(address)
        limits, auth = limits or Limits(), auth or peer_auth(key)
        seal = Seal(key, PURPOSE, numerics_id)
        said = hello(numerics_id, block_bytes)
        self._peers: list[SealedStore] = []
        for address in addresses:
            backend = PeerBackend(address, said, auth)
            enter = partial(self._enter, len(self._peers), backend)
            peer = SealedStore(backend, name_of, seal, block_bytes, view, limits, enter, lambda: False)
            self._peers.append(peer)

    @property
    def facts(self) -> TierFacts:
        """Of the one that answers soonest."""
        near = [self._peers[place] for place in self._nearest() if self._peers[place].rate.latency_s]
        return TierFacts(PEER, 0, near[0].rate.latency_s, near[0].rate.bytes_s) if near else TierFacts(PEER)

    def stat(self) -> dict[str, float]:
        """Sums over all peers; is_down: how many are not asked now."""
        sums: Counter[str] = Counter()
        for peer in self._peers:
            sums.update({name: value for name, value in peer.stat().items() if not name.endswith("_s")})
        return {**sums, "num_peers": len(self._peers)}

    async def open(self) -> Sequence[TierEntry]:
        """Peers that do not answer are tried again later."""
        await asyncio.gather(*(peer.open() for peer in self._peers))
        return ()

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers))

    async def look(self, job: LookIn) -> Sequence[int]:
        """The place of a block is that of its peer."""
        found = await asyncio.gather(*(peer.look(job.wanted) for peer in self._peers))
        places = [NO_PLACE] * len(job.wanted)
        for peer in reversed(self._nearest()):
            for nth, is_there in enumerate(found[peer]):
                if is_there:
                    places[nth] = peer
        return places

    async def load(self, job: LoadFrom) -> Sequence[int]:
        sums = [NO_PLACE] * len(job.blocks)
        places = [place for _, place, _ in job.blocks]
        of_peer = [[nth for nth, at in enumerate(places) if at == place] for place in range(len(self._peers))]
        loaded = await asyncio.gather(
            *(
                peer.load([(job.blocks[nth][0], job.blocks[nth][2]) for nth in wanted])
                for peer, wanted in zip(self._peers, of_peer, strict=True)
            )
        )
        for wanted, values in zip(of_peer, loaded, strict=True):
            for nth, value in zip(wanted, values, strict=True):
                sums[nth] = value
        return sums

    async def save(self, job: SaveTo) -> Sequence[int]:
        return [NO_PLACE] * len(job.blocks)

    async def drop(self, job: DropFrom) -> None:
        """What a peer has is its own: it verifies it whenever somebody asks for it."""

    def _nearest(self) -> list[int]:
        return sorted(range(len(self._peers)), key=lambda place: self._peers[place].rate.latency_s)

    async def _enter(self, place: int, backend: PeerBackend, limit_s: float) -> None:
        await self._peers[place].calls.one(ASK, partial(backend.check, limit_s))


class PeerBackend:
    """One peer, as a store that is only read. hello: what is said first."""

    num_threads = 4
    batch_bytes = 4 * MiB
    look_names = MOST_WANTED
    look_s = 0.2

    def __init__(self, address: str, hello: dict[str, object], auth: PeerAuth) -> None:
        self.name = f"the KV store at {address}"
        self._address = address
        self._hello = hello
        self._auth = auth
        self._connections = Connections(self._connect, IDLE_S / 2)

    def check(self, limit_s: float) -> None:
        self.has([], limit_s)

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        def ask(connection: Connection, until_s: float) -> list[bool]:
            found = _ask(connection, asked("look", names), until_s).get("found")
            if not isinstance(found, str) or len(found) != len(names):
                raise ConnectionError("It answers what was not asked.")
            return [digit != "0" for digit in found]

        return self._connections.use(limit_s, ask)

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        def load(connection: Connection, until_s: float) -> None:
            reply = _ask(connection, asked("load", names), until_s)
            room = memoryview(bytearray(most_bytes))
            while not reply.get("is_last"):
                nth, num_bytes = reply.get("nth"), reply.get("num_bytes")
                if not isinstance(nth, int) or not 0 <= nth < len(names):
                    raise ConnectionError("It answers what was not asked.")
                if not isinstance(num_bytes, int) or not 0 <= num_bytes <= most_bytes:
                    raise ConnectionError("It announces a block that is too long.")
                receive_into(connection.raw, room[:num_bytes])
                take(nth, room[:num_bytes])
                reply = _hear(connection, until_s)

        self._connections.use(limit_s, load)

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        return [False] * len(values)

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        pass

    def close(self) -> None:
        self._connections.close()

    def _connect(self, until_s: float) -> Connection:
        connection = self._auth.connect(self._address)
        try:
            _ask(connection, self._hello, until_s)
        except BaseException:
            connection.close()
            raise
        return connection


def peer_auth(key: bytes) -> PeerAuth:
    """Who has the cluster's key may pass, from this machine or another."""
    return PeerAuth(derive(key, b"kv peers"), is_strict=True)


def check_address(address: str) -> None:
    """Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--kv-peers takes HOST:PORT,..., got {address!r}.", param=PARAM)


def _ask(connection: Connection, message: dict[str, object], until_s: float) -> dict[str, object]:
    connection.send(message)
    return _hear(connection, until_s)


def _hear(connection: Connection, until_s: float) -> dict[str, object]:
    """Raises OSError, EOFError."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("It takes too long.")
    connection.raw.settimeout(left_s)
    try:
        reply = connection.receive()
    except BadPeer as error:
        raise ConnectionError(str(error)) from error
    if reply is None:
        raise ConnectionError("It answers what was not asked.")
    if "error" in reply:
        raise PermissionError(str(reply["error"])[:200])
    return reply


def hello(numerics_id: str, block_bytes: Sequence[int]) -> dict[str, Any]:
    return {"ask": "hello", "version": VERSION, "numerics_id": numerics_id, "block_bytes": list(block_bytes)}


def name_of(block: TierKey, epoch: int = 0) -> str:
    group, key = block
    return f"{group}:{key.hex()}"


def asked(ask: str, names: Sequence[str]) -> dict[str, Any]:
    return {"ask": ask, "wanted": names}


def read_wanted(message: dict[str, Any], num_groups: int) -> tuple[TierKey, ...]:
    """The blocks that a message asks for. Raises BadPeer."""
    wanted = message.get("wanted")
    if not isinstance(wanted, list) or len(wanted) > MOST_WANTED:
        raise BadPeer("It asks for no blocks, or for too many.")
    try:
        blocks = tuple((int(group), bytes.fromhex(key)) for group, _, key in (name.partition(":") for name in wanted))
    except (AttributeError, ValueError) as error:
        raise BadPeer("It asks for what is no block.") from error
    if not all(0 <= group < num_groups and len(key) == KEY_BYTES for group, key in blocks):
        raise BadPeer("It asks for what is no block.")
    return blocks
