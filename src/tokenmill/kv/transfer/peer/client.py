"""Takes blocks that other workers offer: by reading their memory on one host, else over several connections.

Blocks are written where nobody looks before the pull has ended. Each is summed as it came, and the sums are compared by
the one that offered them, who then also says whether the blocks were its to offer all the while.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from ....core.mac import connection_macs
from ....core.moves import PullBlocks, Pulled
from ....core.units import MiB
from .board import BlockMemory, CannotRead, MayNotRead, Refused, can_read_memory, read_memory
from .frames import IDLE_S, SILENT_S, BadPeer, Connection, receive_exactly, receive_into

log = logging.getLogger(__name__)
NUM_STREAMS = 2
STREAM_BYTES = 4 * MiB
"""Less than this goes over one connection."""
READ_BYTES = 2 * MiB
"""Read and then summed at once: it is in the processor's cache meanwhile."""
KEEP_S = IDLE_S / 2
"""So long a connection is kept that nobody uses."""
LOCAL = ("127.", "[::1]", "localhost:")
Connect = Callable[[str], Connection]
_Place = tuple[int, int]
NONCE_BYTES = 32
SOURCE, READER = b"kv source", b"kv reader"
_PROOF_BYTES = 32


def dial(address: str) -> socket.socket:
    """To HOST:PORT. Raises OSError."""
    host, _, port = address.rpartition(":")
    raw = socket.create_connection((host.strip("[]"), int(port)), timeout=SILENT_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


def connect_plainly(address: str) -> Connection:
    """Without a proof of who is there. Raises OSError."""
    return Connection(dial(address))


class PeerClient:
    """`reader`: who it is, for the tickets. `host`: whose processes' memory may be read. `block_size`: tokens."""

    def __init__(
        self,
        reader: str,
        host: str,
        memories: Sequence[BlockMemory],
        block_size: int,
        connect: Connect = connect_plainly,
        *,
        may_read: bool = True,
    ) -> None:
        self._reader = reader
        self._host = host
        self._memories = memories
        self._size = block_size
        self._connect = connect
        self._idle: dict[str, list[tuple[float, Connection]]] = {}  # of each address, by when they were last used
        self._is_closed = False
        self._lock = threading.Lock()
        self._streams = ThreadPoolExecutor(2 * NUM_STREAMS, "kv-stream")
        self.may_read = may_read and can_read_memory()

    def close(self) -> None:
        self._streams.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            self._drop_unused(0.0)

    def pull(self, job: PullBlocks, is_over: threading.Event) -> Pulled:
        """Raises OSError, EOFError, BadPeer and Refused; the blocks may then hold anything."""
        if job.source.host != self._host and job.source.address.startswith(LOCAL):
            raise Refused("It gives KV to workers of its own machine alone.")
        return self._with_connection(job.source.address, partial(self._pull, job, is_over))

    def _with_connection(self, address: str, use: Callable[[Connection], Any]) -> Any:
        """One that was used before may have been closed by its other end: then a fresh one."""
        connection = self._take(address)
        try:
            try:
                result = use(connection)
            except (ConnectionError, EOFError):
                connection.close()
                connection = self._connect(address)
                result = use(connection)
        except Refused:
            self._give_back(address, connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(address, connection)
        return result

    def _pull(self, job: PullBlocks, is_over: threading.Event, connection: Connection) -> Pulled:
        count = len(job.blocks[0])
        ask = {"ask": "pull", "start": job.start, "count": count, "is_final": job.is_final}
        reply = self._ask(connection, job, ask, is_over)
        there = {(int(group), int(index)): int(block) for group, index, block in reply["blocks"]}
        num_tokens, generation = int(reply["num_tokens"]), int(reply["generation"])
        wanted: dict[_Place, int] = {}
        holes: list[_Place] = []
        if num_tokens > (job.start + count) * self._size:
            raise BadPeer("It says to have sent more than was asked for.")
        num_blocks = max(0, -(-num_tokens // self._size) - job.start)
        for group, ids in enumerate(job.blocks):
            for index, block in enumerate(islice(ids, num_blocks), job.start):
                if block >= 0 and (group, index) in there:
                    wanted[group, index] = block
                elif block >= 0:
                    holes.append((group, index))
        began_s = time.perf_counter()
        sums = self._copy(job, reply, there, wanted, connection)
        copied_s = time.perf_counter()
        done = {"ask": "done", "generation": generation, "num_tokens": num_tokens, "is_last": reply["is_last"]}
        self._ask(connection, job, {**done, "sums": [(*place, value) for place, value in sums.items()]}, is_over)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%d blocks of worker %s from block %d on: copied in %.1f ms, acknowledged in %.1f.",
                len(wanted), job.source.worker, job.start, 1e3 * (copied_s - began_s),
                1e3 * (time.perf_counter() - copied_s),
            )  # fmt: skip
        return Pulled(num_tokens, int(reply["num_there"]), bool(reply["is_last"]), tuple(holes))

    def _copy(
        self,
        job: PullBlocks,
        reply: dict[str, Any],
        there: dict[_Place, int],
        wanted: dict[_Place, int],
        connection: Connection,
    ) -> dict[_Place, int]:
        pools = [(int(address), int(size)) for address, size in reply["pools"]]
        if [size for _, size in pools] != [memory.block_bytes for memory in self._memories]:
            raise BadPeer("Its blocks are of another size.")
        if self.may_read and job.source.host and job.source.host == self._host:
            try:
                return self._read(int(reply["pid"]), pools, there, wanted)
            except MayNotRead as error:
                self.may_read = False
                log.warning("KV of workers on this host comes over TCP from now on: %s.", error)
            except CannotRead as error:
                log.info("KV of worker %s comes over TCP: %s.", job.source.worker, error)
        return self._fetch(job, list(wanted.items()), connection)

    def _read(
        self, pid: int, pools: Sequence[tuple[int, int]], there: dict[_Place, int], wanted: dict[_Place, int]
    ) -> dict[_Place, int]:
        """Where there is much, half of it on another thread."""
        places = list(wanted.items())
        half = len(places) // 2 if len(places) * max(size for _, size in pools) >= STREAM_BYTES else 0
        beside = self._streams.submit(self._read_part, pid, pools, there, places[:half]) if half else None
        try:
            sums = self._read_part(pid, pools, there, places[half:])
        finally:
            others = {} if beside is None else beside.exception() or beside.result()
        if isinstance(others, BaseException):
            raise others
        return sums | others

    def _read_part(
        self,
        pid: int,
        pools: Sequence[tuple[int, int]],
        there: dict[_Place, int],
        places: Sequence[tuple[_Place, int]],
    ) -> dict[_Place, int]:
        sums: dict[_Place, int] = {}
        most = max(1, READ_BYTES // max(memory.block_bytes for memory in self._memories))
        for start in range(0, len(places), most):
            part = places[start : start + most]
            ranges = [
                (pools[group][0] + there[group, index] * pools[group][1], self._address(group, block), pools[group][1])
                for (group, index), block in part
            ]
            read_memory(pid, ranges)
            sums |= {place: zlib.crc32(self._memories[place[0]].block(block)) for place, block in part}
        return sums

    def _address(self, group: int, block: int) -> int:
        memory = self._memories[group]
        return memory.address + block * memory.block_bytes

    def _fetch(self, job: PullBlocks, wanted: list[tuple[_Place, int]], connection: Connection) -> dict[_Place, int]:
        """Over `connection`, and beside it over others where there is much."""
        num_bytes = sum(self._memories[group].block_bytes for (group, _), _ in wanted)
        num_streams = NUM_STREAMS if num_bytes >= STREAM_BYTES else 1
        size = -(-len(wanted) // num_streams) or 1
        parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        beside = [
            self._streams.submit(self._with_connection, job.source.address, partial(self._fetch_part, job, part))
            for part in parts[1:]
        ]
        try:
            sums: dict[_Place, int] = self._fetch_part(job, parts[0], connection) if parts else {}
        finally:
            others = [each.exception() or each.result() for each in beside]  # none of them writes from here on
        for other in others:
            if isinstance(other, BaseException):
                raise other
            sums |= other
        return sums

    def _fetch_part(self, job: PullBlocks, part: list[tuple[_Place, int]], connection: Connection) -> dict[_Place, int]:
        self._ask(connection, job, {"ask": "fetch", "blocks": [place for place, _ in part]})
        sums: dict[_Place, int] = {}
        for place, block in part:
            target = self._memories[place[0]].block(block)
            receive_into(connection.raw, target)
            sums[place] = zlib.crc32(target)
        return sums

    def _ask(
        self,
        connection: Connection,
        job: PullBlocks,
        message: dict[str, Any],
        is_over: threading.Event | None = None,
    ) -> dict[str, Any]:
        source = job.source
        connection.raw.settimeout(SILENT_S)
        connection.send({**message, "ticket": source.ticket, "incarnation": source.incarnation, "reader": self._reader})
        while (reply := connection.receive()) is None:
            if is_over is not None and is_over.is_set():
                raise BadPeer("The move is over.")  # the connection has an answer to come, and is closed
        if error := reply.get("error"):
            raise Refused(str(error))
        return reply

    def _take(self, address: str) -> Connection:
        with self._lock:
            self._drop_unused(KEEP_S)
            idle = self._idle.get(address)
            if idle:
                return idle.pop()[1]
        return self._connect(address)

    def _give_back(self, address: str, connection: Connection) -> None:
        with self._lock:
            self._drop_unused(KEEP_S)
            idle = self._idle.setdefault(address, [])
            if not self._is_closed and len(idle) < 2 * NUM_STREAMS:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def _drop_unused(self, most_s: float) -> None:
        """Those that nobody has used for longer; of workers that are gone, too."""
        until_s = time.monotonic() - most_s
        for address, idle in list(self._idle.items()):
            while idle and idle[0][0] <= until_s:
                idle.pop(0)[1].close()
            if not idle:
                del self._idle[address]


@dataclass(frozen=True, slots=True)
class PeerAuth:
    """How both ends of a connection for KV make sure of each other.

    What only this machine can reach needs no more than a ticket, unless it `is_strict`. Between machines, TLS
    comes first, if it was asked for; then each end proves that it knows the secret:

        the one that offers                          the one that pulls
        a nonce                                  ->
                                                 <-  a nonce, HMAC(secret, "kv reader" + both nonces)
        HMAC(secret, "kv source" + both nonces)  ->

    From then on what they say has tags, with keys that are derived from the secret and the nonces.

    secret     of all who may pass
    serving    TLS of the end that offers, `asking` of the one that pulls; None: in clear
    is_strict  who is on this machine proves itself, too
    """

    secret: bytes = field(repr=False)
    serving: ssl.SSLContext | None = None
    asking: ssl.SSLContext | None = None
    is_strict: bool = False

    def welcome(self, raw: socket.socket) -> Connection:
        """Raises OSError where the peer does not prove itself."""
        if not self.is_strict and _is_local(raw.getsockname()[0]):
            return Connection(raw)
        if self.serving is not None:
            raw = self.serving.wrap_socket(raw, server_side=True)
        ours = secrets.token_bytes(NONCE_BYTES)
        raw.sendall(ours)
        theirs = bytes(receive_exactly(raw, NONCE_BYTES))
        if not hmac.compare_digest(receive_exactly(raw, _PROOF_BYTES), self._proof(READER, ours, theirs)):
            raise ConnectionRefusedError("It does not have our secret.")
        raw.sendall(self._proof(SOURCE, ours, theirs))
        return Connection(raw, *connection_macs(self.secret, ours + theirs, SOURCE, READER))

    def connect(self, address: str) -> Connection:
        """Raises OSError and EOFError, also where the peer does not prove itself."""
        raw = dial(address)
        host = address.rpartition(":")[0].strip("[]")
        try:
            if not self.is_strict and _is_local(raw.getpeername()[0]):
                return Connection(raw)
            if self.asking is not None:
                raw = self.asking.wrap_socket(raw, server_hostname=host)
            theirs = bytes(receive_exactly(raw, NONCE_BYTES))
            ours = secrets.token_bytes(NONCE_BYTES)
            raw.sendall(ours + self._proof(READER, theirs, ours))
            try:
                proof = receive_exactly(raw, _PROOF_BYTES)
            except EOFError as error:
                raise ConnectionRefusedError("It does not take our secret.") from error
            if not hmac.compare_digest(proof, self._proof(SOURCE, theirs, ours)):
                raise ConnectionRefusedError("It does not have our secret.")
        except BaseException:
            raw.close()
            raise
        return Connection(raw, *connection_macs(self.secret, theirs + ours, READER, SOURCE))

    def _proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.new(self.secret, role + b"\0" + first + second, hashlib.sha256).digest()


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
