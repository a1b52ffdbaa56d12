"""Opens a worker to others: where they get KV from it, how it gets theirs, and how both ends make sure of each other.

What only this machine can reach needs no more than the ticket. Between machines, TLS comes first, if it was asked for;
then each end proves that it knows the workers' secret:

    the one that offers                          the one that pulls
    a nonce                                  ->
                                             <-  a nonce, HMAC(secret, "kv reader" + both nonces)
    HMAC(secret, "kv source" + both nonces)  ->
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..store.peer.client import connect_plainly
from ..store.peer.frames import receive_exactly
from ..worker.moves import PeerMoves

if TYPE_CHECKING:
    from ..core.events import WorkerFacts
    from ..node.load import Engine

log = logging.getLogger(__name__)

TRANSFERS = MEMORY, TCP = ("memory", "tcp")
LOOPBACK = ("127.0.0.1", 0)
_NONCE_BYTES = 32
_PROOF_BYTES = 32


@dataclass(frozen=True, slots=True)
class Door:
    """secret   of the workers
    serving  TLS of the end that offers, `asking` of the one that pulls; None: in clear
    """

    secret: bytes = field(repr=False)
    serving: ssl.SSLContext | None = None
    asking: ssl.SSLContext | None = None

    def welcome(self, connection: socket.socket) -> socket.socket:
        """Raises OSError where the peer does not prove itself."""
        if _is_local(connection.getsockname()[0]):
            return connection
        if self.serving is not None:
            connection = self.serving.wrap_socket(connection, server_side=True)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours)
        theirs = bytes(receive_exactly(connection, _NONCE_BYTES))
        if not hmac.compare_digest(receive_exactly(connection, _PROOF_BYTES), self._proof(b"kv reader", ours, theirs)):
            raise ConnectionRefusedError("It does not have the workers' secret.")
        connection.sendall(self._proof(b"kv source", ours, theirs))
        return connection

    def connect(self, address: str) -> socket.socket:
        """Raises OSError and EOFError, also where the peer does not prove itself."""
        connection = connect_plainly(address)
        host = address.rpartition(":")[0].strip("[]")
        try:
            if _is_local(connection.getpeername()[0]):
                return connection
            if self.asking is not None:
                connection = self.asking.wrap_socket(connection, server_hostname=host)
            theirs = bytes(receive_exactly(connection, _NONCE_BYTES))
            ours = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(ours + self._proof(b"kv reader", theirs, ours))
            proof = receive_exactly(connection, _PROOF_BYTES)
            if not hmac.compare_digest(proof, self._proof(b"kv source", theirs, ours)):
                raise ConnectionRefusedError("It does not have the workers' secret.")
        except BaseException:
            connection.close()
            raise
        return connection

    def _proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.new(self.secret, role + b"\0" + first + second, hashlib.sha256).digest()


def open_to_peers(
    engine: Engine, facts: WorkerFacts, where: tuple[str, int], transfer: str, door: Door | None = None
) -> WorkerFacts:
    """The same worker, with the address where KV of it can be had: at `where`, if it keeps KV. `door` None: it meets
    workers of this machine alone."""
    if engine.pooling is not None or not engine.config.keeps_kv:
        return facts
    door = door or Door(secrets.token_bytes(_NONCE_BYTES))
    moves = PeerMoves(
        engine.worker.pools,
        engine.config.block_size,
        facts.incarnation,
        facts.host,
        may_read=transfer == MEMORY,
        welcome=door.welcome,
        connect=door.connect,
    )
    try:
        address = moves.start(*where)
    except OSError as error:
        log.warning("Other workers get no KV from this one: %s:%d cannot be had (%s).", *where, error.strerror)
        moves.close()
        return facts
    engine.worker.executor.reach_peers(moves)
    return facts._replace(kv_address=address)


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
