"""API keys: 256 random bits behind `tm-`, of which only the SHA-256 digest is kept.

A key has so many bits that its digest needs neither salt nor a slow hash, and may be looked up in a table: what the
time of a look-up tells of digests says nothing of keys.
"""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tm-"
_NUM_BYTES = 32
_SHOWN = 4


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_NUM_BYTES)


def digest_of(key: str) -> bytes:
    """Of what a header says: bytes beyond ASCII are as the header has them."""
    return hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()


def hint_of(key: str) -> str:
    """Enough to tell one's keys apart: 24 bits."""
    return f"{PREFIX}...{key[-_SHOWN:]}"
