"""How both ends of a connection for KV make sure of each other.

What only this machine can reach needs no more than a ticket, unless the door is strict. Between machines, TLS comes
first, if it was asked for; then each end proves that it knows the secret:

    the one that offers                          the one that pulls
    a nonce                                  ->
                                             <-  a nonce, HMAC(secret, "kv reader" + both nonces)
    HMAC(secret, "kv source" + both nonces)  ->
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
from dataclasses import dataclass, field

from .client import connect_plainly
from .frames import receive_exactly

NONCE_BYTES = 32
_PROOF_BYTES = 32


@dataclass(frozen=True, slots=True)
class Door:
    """secret     of all who may pass
    serving    TLS of the end that offers, `asking` of the one that pulls; None: in clear
    is_strict  who is on this machine proves itself, too
    """

    secret: bytes = field(repr=False)
    serving: ssl.SSLContext | None = None
    asking: ssl.SSLContext | None = None
    is_strict: bool = False

    def welcome(self, connection: socket.socket) -> socket.socket:
        """Raises OSError where the peer does not prove itself."""
        if not self.is_strict and _is_local(connection.getsockname()[0]):
            return connection
        if self.serving is not None:
            connection = self.serving.wrap_socket(connection, server_side=True)
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours)
        theirs = bytes(receive_exactly(connection, NONCE_BYTES))
        if not hmac.compare_digest(receive_exactly(connection, _PROOF_BYTES), self._proof(b"kv reader", ours, theirs)):
            raise ConnectionRefusedError("It does not have our secret.")
        connection.sendall(self._proof(b"kv source", ours, theirs))
        return connection

    def connect(self, address: str) -> socket.socket:
        """Raises OSError and EOFError, also where the peer does not prove itself."""
        connection = connect_plainly(address)
        host = address.rpartition(":")[0].strip("[]")
        try:
            if not self.is_strict and _is_local(connection.getpeername()[0]):
                return connection
            if self.asking is not None:
                connection = self.asking.wrap_socket(connection, server_hostname=host)
            theirs = bytes(receive_exactly(connection, NONCE_BYTES))
            ours = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(ours + self._proof(b"kv reader", theirs, ours))
            try:
                proof = receive_exactly(connection, _PROOF_BYTES)
            except EOFError as error:
                raise ConnectionRefusedError("It does not take our secret.") from error
            if not hmac.compare_digest(proof, self._proof(b"kv source", theirs, ours)):
                raise ConnectionRefusedError("It does not have our secret.")
        except BaseException:
            connection.close()
            raise
        return connection

    def _proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.new(self.secret, role + b"\0" + first + second, hashlib.sha256).digest()


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
