"""An extent of the disk tier: a file of slots for KV blocks of one size, with the table that says what is in them.

    head    4096 bytes: magic with the version, uint32 length, JSON (see `Head`), 16 bytes check of all that
    table   an entry of 136 bytes for each slot, all zero for a free one; filled up to a multiple of 4096
    data    the slots, each a multiple of 4096 bytes, so that they can be read and written past the page cache

A block's bytes are written before its entry, and its entry is cleared before its slot is used anew. Nothing is synced
in between: an entry that was cut short does not have the check that it should (which covers its slot and the file's
random name for itself, so that an entry elsewhere is noticed too), and bytes that were cut short do not have the
checksum that is in their entry. All integers are little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ....core.block import KEY_BYTES, BlockKey
from ....core.tiers import BlockFacts

MAGIC = b"TMKVD\x00\x00\x01"
PAGE_BYTES = 4096

SUFFIX = ".blocks"
PARTIAL = ".partial"
"""Ends the name of a file that is being made."""

_LENGTH = struct.Struct("<I")
_CHECK_BYTES = 16
_OWNER_BYTES = 64
_SEQ_BYTES = 8
_BODY = struct.Struct(f"<Q{KEY_BYTES}s{KEY_BYTES}sIHH{_OWNER_BYTES}s")
_SLOT = struct.Struct("<16sI")
ENTRY_BYTES = _CHECK_BYTES + _SEQ_BYTES + _BODY.size
_FREE = bytes(ENTRY_BYTES)
_USUAL_FRONT_BYTES = 128 << 10
_NO_KEY = bytes(KEY_BYTES)


class BadExtent(Exception):
    """The file is not an extent that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """numerics_id, block_bytes: whose blocks they are, and the size of one in each KV group. number: of the extent, as
    in its name. uid: random, of this file alone. overhead: bytes that
    a block has more there than elsewhere, since it is sealed."""

    numerics_id: str
    block_bytes: tuple[int, ...]
    slot_bytes: int
    num_slots: int
    number: int
    uid: str
    overhead: int = 0

    @property
    def data_offset(self) -> int:
        return PAGE_BYTES + padded(self.num_slots * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.num_slots * self.slot_bytes


class Entry(NamedTuple):
    """What a slot holds. seq: larger for what was saved later; no two have the same."""

    facts: BlockFacts
    seq: int
    sum: int


class Extent:
    """A file that is open, and what of its slots is held in memory.

    fd              for data; past the page cache while `is_direct`
    used, backed    a byte for each slot: 1 where it holds a block, or is to; 1 where the file system has given it room
    keys, groups,   of what lies in the slot; no key where nothing does
    sums, seqs
    """

    def __init__(self, path: Path, head: Head, fd: int, is_direct: bool) -> None:
        self.path = path
        self.head = head
        self.fd = fd
        self.is_direct = is_direct
        self.used = bytearray(head.num_slots)
        self.backed = bytearray(head.num_slots)
        self.num_used = self.num_backed = 0
        self.keys = bytearray(head.num_slots * KEY_BYTES)
        self.groups = array("H", bytes(2 * head.num_slots))
        self.sums = array("Q", bytes(8 * head.num_slots))
        self.seqs = array("Q", bytes(8 * head.num_slots))

    @property
    def num_bytes(self) -> int:
        """What it takes on the disk."""
        return self.head.data_offset + self.num_backed * self.head.slot_bytes

    def offset(self, slot: int) -> int:
        return self.head.data_offset + slot * self.head.slot_bytes

    def key(self, slot: int) -> BlockKey:
        return bytes(self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def is_empty(self, slot: int) -> bool:
        return self.key(slot) == _NO_KEY

    def holds(self, slot: int, group: int, key: BlockKey) -> bool:
        return 0 <= slot < self.head.num_slots and self.groups[slot] == group and self.key(slot) == key != _NO_KEY

    def put(self, slot: int, entry: Entry) -> None:
        """Note what is in a slot."""
        group, key = entry.facts.block
        self.groups[slot], self.sums[slot], self.seqs[slot] = group, entry.sum, entry.seq
        self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key

    def forget(self, slot: int) -> None:
        self.keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = _NO_KEY

    def set_used(self, first: int, count: int, is_used: bool) -> None:
        """Of slots that are all otherwise now. A slot that is used has room in the file system."""
        self.used[first : first + count] = bytes([is_used]) * count
        self.num_used += count if is_used else -count
        if is_used:
            self.set_backed(first, count, True)

    def count(self) -> None:
        """Note how many slots are used, and backed, where `used` was written to directly."""
        self.backed = bytearray(map(max, self.used, self.backed))
        self.num_used, self.num_backed = self.used.count(1), self.backed.count(1)

    def set_backed(self, first: int, count: int, is_backed: bool) -> None:
        before = self.backed.count(1, first, first + count)
        self.backed[first : first + count] = bytes([is_backed]) * count
        self.num_backed += (count if is_backed else 0) - before


class EntryCodec:
    """Entries to bytes and back. key: with one, checks are message authentication codes, and all of an entry but its
    number is masked."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key

    def check(self, *parts: bytes) -> bytes:
        return blake2b(b"".join(parts), digest_size=_CHECK_BYTES, key=self._key).digest()

    def pack(self, uid: str, slot: int, entry: Entry) -> bytes:
        facts = entry.facts
        group, key = facts.block
        owner = _short(facts.owner)
        seq, where = entry.seq.to_bytes(_SEQ_BYTES, "little"), _SLOT.pack(bytes.fromhex(uid), slot)
        body = _BODY.pack(entry.sum, key, facts.parent, facts.depth, group, len(owner), owner)
        body = self._masked(seq, where, body)
        return self.check(where, seq, body) + seq + body

    def unpack(self, uid: str, slot: int, data: bytes) -> Entry | None:
        """None where it is not what was packed for this slot."""
        where = _SLOT.pack(bytes.fromhex(uid), slot)
        check, seq, body = data[:_CHECK_BYTES], data[_CHECK_BYTES : -_BODY.size], data[-_BODY.size :]
        if check != self.check(where, seq, body):
            return None
        sum_, key, parent, depth, group, size, owner = _BODY.unpack(self._masked(seq, where, body))
        facts = BlockFacts((group, key), b"" if parent == _NO_KEY else parent, depth, owner[:size].decode())
        return Entry(facts, int.from_bytes(seq, "little"), sum_)

    def _masked(self, seq: bytes, where: bytes, body: bytes) -> bytes:
        if not self._key:
            return body
        mask = shake_128(b"mask" + self._key + where + seq).digest(len(body))
        return (int.from_bytes(body, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(body), "little")

    def table(self, head: Head, data: bytes) -> Iterator[tuple[int, Entry | None]]:
        """The slots that are not free, and what is in them; None where the entry is damaged."""
        for slot in range(head.num_slots):
            packed = data[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
            if packed != _FREE:
                entry = self.unpack(head.uid, slot, packed)
                fits = entry is not None and _fits(head, entry.facts.block[0])
                yield slot, entry if fits else None


def padded(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pack_head(head: Head, codec: EntryCodec) -> bytes:
    text = json.dumps(asdict(head)).encode()
    front = MAGIC + _LENGTH.pack(len(text)) + text
    if len(front) + _CHECK_BYTES > PAGE_BYTES:
        raise BadExtent("would have too long a head")
    return (front + codec.check(front)).ljust(PAGE_BYTES, b"\0")


def extent_name(numerics_id: str, number: int) -> str:
    return f"{numerics_id[:16]}-{number:08d}{SUFFIX}"


def read_own(path: Path, codec: EntryCodec, numerics_id: str, block_bytes: Sequence[int]) -> tuple[Head, bytes]:
    """The head of an extent of this model, and its table. Raises BadExtent, ValueError and OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        head, packed = read_front(file, codec)
    finally:
        os.close(file)
    if (head.numerics_id, head.block_bytes) != (numerics_id, tuple(block_bytes)):
        raise BadExtent("is of another model")
    if path.name != extent_name(numerics_id, head.number):
        raise BadExtent("has the name of another")
    return head, packed


def read_front(file: int, codec: EntryCodec) -> tuple[Head, bytes]:
    """The head of an extent, and its table. Raises BadExtent, and OSError."""
    front = os.pread(file, _USUAL_FRONT_BYTES, 0)
    head = _unpack_head(front[:PAGE_BYTES], codec)
    num_bytes = os.fstat(file).st_size
    if num_bytes != head.file_bytes:
        raise BadExtent("is cut short" if num_bytes < head.file_bytes else "is too long")
    if len(front) < head.data_offset:
        front += os.pread(file, head.data_offset - len(front), len(front))
    table = front[PAGE_BYTES : PAGE_BYTES + head.num_slots * ENTRY_BYTES]
    if len(table) != head.num_slots * ENTRY_BYTES:
        raise BadExtent("is cut short")
    return head, table


def _unpack_head(page: bytes, codec: EntryCodec) -> Head:
    if page[: len(MAGIC)] != MAGIC:
        raise BadExtent("is of another version" if page[:5] == MAGIC[:5] else "is no extent")
    start = len(MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack(page[len(MAGIC) : start].ljust(_LENGTH.size, b"\0"))
    front, check = page[: start + length], page[start + length : start + length + _CHECK_BYTES]
    if len(page) != PAGE_BYTES or check != codec.check(front):
        raise BadExtent("is damaged, or was made with another key")
    fields = json.loads(front[start:])
    return Head(**{**fields, "block_bytes": tuple(fields["block_bytes"])})


def make_extent(
    path: Path,
    head: Head,
    codec: EntryCodec,
    open_data: Callable[[Path], tuple[int, bool]],
    fill: Callable[[BinaryIO], None] | None = None,
) -> Extent:
    """A file that only its owner may read. It has its name once its head is whole, and what `fill` writes into it;
    without that there are no blocks in it. open_data: to a descriptor for data and whether it goes past the page cache.
    Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    page = pack_head(head, codec)
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(page)
            file.truncate(head.file_bytes)
            if fill is not None:
                fill(file)
        os.replace(partial, path)
        return Extent(path, head, *open_data(path))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _fits(head: Head, group: int) -> bool:
    return group < len(head.block_bytes) and padded(head.block_bytes[group] + head.overhead) == head.slot_bytes


def _short(owner: str) -> bytes:
    """A longer name than an entry has room for becomes its digest."""
    name = owner.encode("utf8", "replace")
    return name if len(name) <= _OWNER_BYTES else blake2b(name, digest_size=_OWNER_BYTES // 2).hexdigest().encode()
