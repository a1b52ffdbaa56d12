"""An extent: KV blocks of one model in one file, each with its key and a checksum. Written whole or not at all.

    magic            8 bytes: the format and its version
    head             uint32 length, then JSON: numerics_id, block_bytes (of each KV group)
    index            uint32 number of blocks, then for each: uint16 group, 16 bytes key, 16 bytes checksum
    seal             16 bytes: checksum of all of the above
    blocks           their bytes, one after the other, in the order of the index

All integers are little-endian; checksums are BLAKE2b. A block's checksum covers its key too, so that bytes in the
wrong place are noticed. A file of another version, of another model, of the wrong length or with a broken seal is
refused when it is opened, a block whose bytes have changed when it is read: what is damaged is never taken for KV.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from ....core.block import BlockKey

MAGIC = b"TMKV\x00\x00\x00\x01"
CHECKSUM_BYTES = 16
PARTIAL = ".partial"
"""Ends the name of a file that is being written."""

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct(f"<H16s{CHECKSUM_BYTES}s")
_MOST_HEAD_BYTES = 1 << 16


class BadExtent(Exception):
    """The file or a block of it is not what it should be; the message says why."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block to write: the index of its KV group, its key and its bytes."""

    group: int
    key: BlockKey
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block lies in its file."""

    offset: int
    num_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Extent:
    """A file that was opened: `locations` by (group, key)."""

    path: Path
    num_bytes: int
    locations: dict[tuple[int, BlockKey], Location]

    def read(self, wanted: Sequence[tuple[int, BlockKey]]) -> list[bytes]:
        """The bytes of these blocks. Raises BadExtent where one has changed, and OSError."""
        with self.path.open("rb") as file:
            return [_read_block(file, key, self.locations[group, key]) for group, key in wanted]


def write_extent(path: Path, numerics_id: str, block_bytes: Sequence[int], blocks: Sequence[StoredBlock]) -> Extent:
    """Write a file that only its owner may read. It has its name once it is whole and on the disk. Raises OSError."""
    head = _head(numerics_id, block_bytes)
    entries = [(block.group, block.key, _checksum(block.key, block.data)) for block in blocks]
    index = b"".join(_ENTRY.pack(*entry) for entry in entries)
    front = MAGIC + _COUNT.pack(len(head)) + head + _COUNT.pack(len(entries)) + index
    partial = path.with_name(path.name + PARTIAL)
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(front + _seal(front))
            for block in blocks:
                file.write(block.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    _sync_folder(path.parent)
    return _extent(path, len(front) + CHECKSUM_BYTES, entries, block_bytes)


def open_extent(path: Path, numerics_id: str, block_bytes: Sequence[int]) -> Extent:
    """Read a file's index. Raises BadExtent for a file that is not an extent of this model, and OSError."""
    with path.open("rb") as file:
        front = _take(file, len(MAGIC))
        if front != MAGIC:
            raise BadExtent("is of another version" if front[:4] == MAGIC[:4] else "is no extent")
        size = _take(file, _COUNT.size)
        front += size
        (head_bytes,) = _COUNT.unpack(size)
        if head_bytes > _MOST_HEAD_BYTES:
            raise BadExtent("is damaged")
        head = _take(file, head_bytes)
        count = _take(file, _COUNT.size)
        (num_entries,) = _COUNT.unpack(count)
        length = os.fstat(file.fileno()).st_size
        if num_entries * _ENTRY.size > length:
            raise BadExtent("is damaged")
        index = _take(file, num_entries * _ENTRY.size)
        front += head + count + index
        if _take(file, CHECKSUM_BYTES) != _seal(front):
            raise BadExtent("is damaged")
    if head != _head(numerics_id, block_bytes):
        raise BadExtent("is of another model")
    entries = list(_ENTRY.iter_unpack(index))
    if any(group >= len(block_bytes) for group, _, _ in entries):
        raise BadExtent("is damaged")
    extent = _extent(path, len(front) + CHECKSUM_BYTES, entries, block_bytes)
    if extent.num_bytes != length:
        raise BadExtent("is damaged")
    return extent


def _head(numerics_id: str, block_bytes: Sequence[int]) -> bytes:
    return json.dumps({"numerics_id": numerics_id, "block_bytes": list(block_bytes)}).encode()


def _extent(
    path: Path, offset: int, entries: Iterable[tuple[int, BlockKey, bytes]], block_bytes: Sequence[int]
) -> Extent:
    locations: dict[tuple[int, BlockKey], Location] = {}
    for group, key, checksum in entries:
        locations[group, key] = Location(offset, block_bytes[group], checksum)
        offset += block_bytes[group]
    return Extent(path, offset, locations)


def _read_block(file: BinaryIO, key: BlockKey, location: Location) -> bytes:
    file.seek(location.offset)
    data = _take(file, location.num_bytes)
    if _checksum(key, data) != location.checksum:
        raise BadExtent("has a damaged block")
    return data


def _take(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise BadExtent("is cut short")
    return data


def _checksum(key: BlockKey, data: bytes | memoryview) -> bytes:
    digest = blake2b(key, digest_size=CHECKSUM_BYTES)
    digest.update(data)
    return digest.digest()


def _seal(front: bytes) -> bytes:
    return blake2b(front, digest_size=CHECKSUM_BYTES).digest()


def _sync_folder(folder: Path) -> None:
    """Where the system can: a name is on the disk once its folder is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
