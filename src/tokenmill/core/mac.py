"""Message authentication codes for what two ends that share a secret send each other.

Each connection and direction has a key of its own, derived from the secret and both ends' nonces (HKDF, RFC 5869), and
each piece of data a sequence number, which is never sent: both ends count. So a tag is right for one piece at one place
of one connection in one direction, and what was changed, left out, repeated, moved, sent back or taken from another
connection has a wrong one. The tag is keyed BLAKE2b (RFC 7693): faster than HMAC where pieces are small.
"""

from __future__ import annotations

import hashlib
import hmac

KEY_BYTES = 32
TAG_BYTES = 16

TAMPERED = (
    "What came is not what the other end sent: it was changed on its way, or the other end is of another version."
)


class MAC:
    """Tags of one direction of a connection.

    number  of the next piece
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self.number = 0

    def tag(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """Of the next piece, which is these parts one after the other."""
        digest = self._keyed.copy()
        digest.update(self.number.to_bytes(8, "little"))
        for part in parts:
            digest.update(part)
        self.number += 1
        return digest.digest()

    def accepts(self, tag: bytes | bytearray | memoryview, piece: bytes | bytearray | memoryview) -> bool:
        """Whether it is the tag of the next piece."""
        return hmac.compare_digest(tag, self.tag(piece))


def connection_macs(secret: bytes, nonces: bytes, ours: bytes, theirs: bytes) -> tuple[MAC, MAC]:
    """For what this end sends and for what it receives. `ours`, `theirs`: the names of the two ends."""
    key = hmac.digest(nonces, secret, hashlib.sha256)
    return MAC(derive(key, b"sent by", ours)), MAC(derive(key, b"sent by", theirs))


def derive(key: bytes, *purpose: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """A key of its own for each purpose (HKDF-Expand, SHA-256)."""
    info = b"".join(len(part).to_bytes(4, "little") + part for part in purpose)
    out = last = b""
    while len(out) < num_bytes:
        last = hmac.digest(key, last + info + bytes([len(out) // 32 + 1]), hashlib.sha256)
        out += last
    return out[:num_bytes]
