"""Seals KV blocks for places that others can write to: AES-256-GCM with the cluster's key.

A checksum tells of accidents, a seal of intent, too: only who has the key makes one, and it holds for one block of one
model alone. A sealed block:

    mark      4 bytes: "TMK" and the version of the format
    epoch     uint64: which fencing epoch of the store it was written in
    writer    16 random bytes of the process that wrote it: its key is derived from the cluster's with these, so that
              nonces need to differ within a process alone
    nonce     12 random bytes
    sum       uint64: the block's checksum, hidden by a mask that is derived from the writer's key and the nonce
    data      encrypted
    tag       16 bytes, over all of the above and, unsaid, the purpose, numerics id, KV group, key and checksum

What is cut short, changed, moved to another name, of another epoch, model, purpose or key does not open.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.mac import KEY_BYTES, derive
from ...core.tiers import TierKey

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARK = b"TMK\x01"
_HEAD = struct.Struct("<4sQ16s12sQ")
_BLOCK = struct.Struct("<HQQ")
_TAG_BYTES = 16
OVERHEAD = _HEAD.size + _TAG_BYTES
"""Bytes that a sealed block has more than the block."""

Buffer = bytes | bytearray | memoryview

_MOST_KEY_BYTES = 4096
_MOST_WRITERS = 256

SHORT, FOREIGN, STALE, CORRUPT = "short", "foreign", "stale", "corrupt"
_NEEDS = "Sealed KV needs the package cryptography (47 or newer): pip install 'tokenmill[kv-remote]'."


class BadSeal(Exception):
    """Not the block that it should be. The message is SHORT (its length is wrong), FOREIGN (nothing of this format),
    STALE (of another epoch) or CORRUPT (anything else: a wrong key looks like a flipped bit)."""


def load_key(path: str, flag: str = "--kv-key-file") -> bytes:
    """The cluster's key from a file. Raises ConfigError for one that is too short, or that others may read."""
    param = flag.lstrip("-").replace("-", "_")
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MOST_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.", param=param) from error
    if mode & 0o077:
        raise ConfigError(f"{flag} {path} may be used by others than its owner: chmod 600 {path}", param=param)
    if len(data) < KEY_BYTES:
        raise ConfigError(
            f"{flag} {path} has {len(data)} bytes; it needs {KEY_BYTES}. One is made by:"
            f" (umask 077; head -c 32 /dev/urandom | base64 > {path})",
            param=param,
        )
    return hmac.digest(b"tokenmill kv", data, hashlib.sha256)


class Seal:
    """Seals for one purpose and numerics id. Threads may share it. Raises ConfigError where the package is missing.

    epoch  of what is sealed and opened from now on
    """

    def __init__(self, key: bytes, purpose: str, numerics_id: str, epoch: int = 0) -> None:
        assert len(key) == KEY_BYTES, len(key)
        self._key = derive(key, b"seal", purpose.encode(), numerics_id.encode())
        self._writer = os.urandom(16)
        self._writers: dict[bytes, tuple[AESGCM, bytes]] = {}
        self._ours = self._of(self._writer)
        self.epoch = epoch

    def seal(self, block: TierKey, sum: int, data: Buffer, out: Buffer) -> None:
        """`out`: OVERHEAD bytes more than the data."""
        cipher, mask = self._ours
        num_bytes = memoryview(data).nbytes
        nonce = os.urandom(12)
        head = _HEAD.pack(MARK, self.epoch, self._writer, nonce, sum ^ _mask(mask, nonce))
        target = memoryview(out).cast("B")
        assert len(target) == num_bytes + OVERHEAD, (len(target), num_bytes)
        target[: _HEAD.size] = head
        cipher.encrypt_into(nonce, data, _associated(head, block, sum, num_bytes), target[_HEAD.size :])

    def open(self, block: TierKey, sealed: Buffer, out: Buffer) -> int:
        """Fill `out` with the data: the checksum that it was sealed with. Raises BadSeal; `out` may then hold
        anything."""
        from cryptography.exceptions import InvalidTag

        source, target = memoryview(sealed).cast("B"), memoryview(out).cast("B")
        if len(source) != len(target) + OVERHEAD:
            raise BadSeal(SHORT)
        head = bytes(source[: _HEAD.size])
        mark, epoch, writer, nonce, hidden = _HEAD.unpack(head)
        if mark != MARK:
            raise BadSeal(FOREIGN)
        if epoch != self.epoch:
            raise BadSeal(STALE)
        cipher, mask = self._writers.get(writer) or self._of(writer)
        sum = hidden ^ _mask(mask, nonce)
        try:
            cipher.decrypt_into(nonce, source[_HEAD.size :], _associated(head, block, sum, len(target)), target)
        except InvalidTag:
            raise BadSeal(CORRUPT) from None
        if sum >> 63:
            raise BadSeal(CORRUPT)
        return sum

    def _of(self, writer: bytes) -> tuple[AESGCM, bytes]:
        """What a writer encrypts with, and its key of masks."""
        both = derive(self._key, writer, num_bytes=2 * KEY_BYTES)
        found = _cipher(both[:KEY_BYTES]), both[KEY_BYTES:]
        if len(self._writers) >= _MOST_WRITERS:
            self._writers.clear()
        self._writers[writer] = found
        return found


def _mask(key: bytes, nonce: bytes) -> int:
    return int.from_bytes(hmac.digest(key, nonce, hashlib.sha256)[:8], "little")


def _associated(head: bytes, block: TierKey, sum: int, num_bytes: int) -> bytes:
    group, key = block
    return head + _BLOCK.pack(group, num_bytes, sum) + key


def _cipher(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(_NEEDS) from error
    if not hasattr(AESGCM, "decrypt_into"):
        raise ConfigError(_NEEDS)
    return AESGCM(key)
