"""How both ends of a connection for KV make sure of each other.

What only this machine can reach needs no more than a ticket, unless the door is strict. Between machines, TLS comes
first, if it was asked for; then each end proves that it knows the secret:

    the one that offers                          the one that pulls
    a nonce                                  ->
                                             <-  a nonce, HMAC(secret, "kv reader" + both nonces)
    HMAC(secret, "kv source" + both nonces)  ->

From then on what they say has tags, with keys that are derived from the secret and the nonces.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
from dataclasses import dataclass, field

from ....core.mac import connection_macs
from .client import dial
from .frames import Connection, receive_exactly

NONCE_BYTES = 32
SOURCE, READER = b"kv source", b"kv reader"
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
