"""Extents that are written whole and never changed: for a folder that several processes share (`folder.SharedFolder`).

An extent has its name once all its blocks, and its entries, are on the disk. One with anything wrong in its head or
table is refused when it is opened, a block whose bytes have changed when it is read: what is damaged is never taken for
KV. No file stays open between reads, so that one which another process deletes gives its room back.

Before there were slots such a folder had files of another format (`.kv`), whose blocks `convert` makes extents of:

    magic   8 bytes: b"TMKV", then the version
    head    uint32 length, then JSON: numerics_id, block_bytes
    index   uint32 number of blocks, then for each: uint16 group, 16 bytes key, 16 bytes BLAKE2b of key and bytes
    seal    16 bytes: BLAKE2b of all of the above
    blocks  their bytes, one after the other, in the order of the index
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import BinaryIO

from ....core.block import KEY_BYTES, BlockKey
from ....core.tiers import BlockFacts
from ..checksum import block_sum
from .extent import (
    PAGE_BYTES,
    PARTIAL,
    SUFFIX,
    BadExtent,
    Entry,
    EntryCodec,
    Extent,
    Head,
    extent_name,
    make_extent,
    padded,
    read_own,
)
from .io import read_slots
from .space import SLOT_BITS

log = logging.getLogger(__name__)

OLD_SUFFIX = ".kv"
_OLD_MAGIC = b"TMKV\x00\x00\x00\x01"
_OLD_COUNT = struct.Struct("<I")
_OLD_ENTRY = struct.Struct(f"<H{KEY_BYTES}s16s")
_CODEC = EntryCodec()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block to write: the index of its KV group, its key and its bytes."""

    group: int
    key: BlockKey
    data: bytes | memoryview


def write_extents(
    folder: Path, numerics_id: str, block_bytes: Sequence[int], blocks: Sequence[StoredBlock]
) -> list[Extent]:
    """New extents of these blocks, one for each size of slots, in a folder where nobody else writes meanwhile. Raises
    OSError; then there is none of them."""
    by_size: dict[int, list[StoredBlock]] = {}
    for block in blocks:
        by_size.setdefault(padded(block_bytes[block.group]), []).append(block)
    numbers = count(_next_number(folder, numerics_id))
    made: list[Extent] = []
    try:
        for size, found in by_size.items():
            for at in range(0, len(found), 1 << SLOT_BITS):
                some = found[at : at + (1 << SLOT_BITS)]
                uid = secrets.token_hex(16)
                head = Head(numerics_id, tuple(block_bytes), size, len(some), next(numbers), uid)
                made.append(_write(folder, head, some))
        _sync_folder(folder)
    except BaseException:
        for extent in made:
            extent.path.unlink(missing_ok=True)
        raise
    return made


def open_extent(path: Path, numerics_id: str, block_bytes: Sequence[int]) -> Extent:
    """Read what an extent holds. Raises BadExtent for a file that is not an extent of this model, ValueError and
    OSError."""
    head, packed = read_own(path, _CODEC, numerics_id, block_bytes)
    extent = Extent(path, head, -1, False)
    for slot, entry in _CODEC.table(head, packed):
        if entry is None:
            raise BadExtent("is damaged")
        extent.put(slot, entry)
        extent.used[slot] = 1
    extent.count()
    return extent


def read_blocks(extent: Extent, slots: Sequence[int]) -> list[bytes]:
    """Raises BadExtent where a block has changed, and OSError."""
    opened = copy.copy(extent)
    opened.fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return [_read_block(opened, slot) for slot in slots]
    finally:
        os.close(opened.fd)


def convert(folder: Path, numerics_id: str, block_bytes: Sequence[int]) -> None:
    """Make extents of what files of the old format hold for this model. A file that cannot be used, or has no room as
    an extent, gets a line in the log and stays as it is."""
    remove_partial(folder, f"{numerics_id[:16]}-*{OLD_SUFFIX}")
    for path in sorted(folder.glob(f"*{OLD_SUFFIX}")):
        try:
            with path.open("rb") as file:
                blocks = list(_old_blocks(file, numerics_id, block_bytes))
            write_extents(folder, numerics_id, block_bytes, blocks)
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is not used: it cannot be rewritten (%s).", path, error.strerror or error)
        except (BadExtent, ValueError) as error:
            log.warning("%s is not used: it %s.", path, error if isinstance(error, BadExtent) else "is damaged")


def remove_partial(folder: Path, pattern: str) -> None:
    """Files that processes were writing as they were killed, where they can be removed."""
    for path in folder.glob(pattern + PARTIAL):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _next_number(folder: Path, numerics_id: str) -> int:
    """One more than that of the newest extent, whoever wrote it."""
    numbers = (path.stem.rpartition("-")[2] for path in folder.glob(f"{numerics_id[:16]}-*{SUFFIX}"))
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def _write(folder: Path, head: Head, blocks: Sequence[StoredBlock]) -> Extent:
    seq = time.time_ns()
    named = [((block.group, block.key), block.data) for block in blocks]
    entries = [Entry(BlockFacts(key, b"", 0), seq + nth, block_sum(key, data)) for nth, (key, data) in enumerate(named)]

    def fill(file: BinaryIO) -> None:
        file.seek(PAGE_BYTES)
        file.writelines(_CODEC.pack(head.uid, slot, entry) for slot, entry in enumerate(entries))
        for slot, block in enumerate(blocks):
            file.seek(head.data_offset + slot * head.slot_bytes)
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())

    path = folder / extent_name(head.numerics_id, head.number)
    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)  # of a process that was killed
    extent = make_extent(path, head, _CODEC, lambda path: (-1, False), fill)
    for slot, entry in enumerate(entries):
        extent.put(slot, entry)
    extent.set_used(0, len(entries), True)
    return extent


def _read_block(extent: Extent, slot: int) -> bytes:
    data = memoryview(bytearray(extent.head.slot_bytes))
    read_slots(extent, slot, [data])
    group = extent.groups[slot]
    block = data[: extent.head.block_bytes[group]]
    if block_sum((group, extent.key(slot)), block) != extent.sums[slot]:
        raise BadExtent("has a damaged block")
    return bytes(block)


def _old_blocks(file: BinaryIO, numerics_id: str, block_bytes: Sequence[int]) -> Iterator[StoredBlock]:
    """Those that are as they were written. Raises BadExtent."""
    front = _take(file, len(_OLD_MAGIC))
    if front != _OLD_MAGIC:
        raise BadExtent("is of another version" if front[:4] == _OLD_MAGIC[:4] else "is no extent")
    size = _take(file, _OLD_COUNT.size)
    head = _take(file, _OLD_COUNT.unpack(size)[0])
    number = _take(file, _OLD_COUNT.size)
    index = _take(file, _OLD_COUNT.unpack(number)[0] * _OLD_ENTRY.size)
    front += size + head + number + index
    if _take(file, 16) != blake2b(front, digest_size=16).digest():
        raise BadExtent("is damaged")
    if json.loads(head) != {"numerics_id": numerics_id, "block_bytes": list(block_bytes)}:
        raise BadExtent("is of another model")
    for group, key, checksum in _OLD_ENTRY.iter_unpack(index):
        if group >= len(block_bytes):
            raise BadExtent("is damaged")
        data = _take(file, block_bytes[group])
        if blake2b(key + data, digest_size=16).digest() == checksum:
            yield StoredBlock(group, key, data)


def _take(file: BinaryIO, num_bytes: int) -> bytes:
    if num_bytes > os.fstat(file.fileno()).st_size:
        raise BadExtent("is damaged")
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise BadExtent("is cut short")
    return data


def _sync_folder(folder: Path) -> None:
    """Where the system can: a name is on the disk once its folder is."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
