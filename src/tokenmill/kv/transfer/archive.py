"""A file of KV blocks that other machines take in: what `kv export` writes and `kv import` reads.

    MAGIC, then a line of JSON    format version, numerics id, bytes of a block of each KV group, tokens of a block
    for each block                its head as JSON in a line (group, key, parent, depth, owner, sum), its bytes
    a line of JSON                {"end": number of blocks}

Each line of JSON follows its CRC-32. It can be written to a pipe. A block that is cut short or damaged, or follows
one that is, is told as such: what is read before it is sound. Checksums find accidents and no forgery: take archives
from whom you trust.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any
from zlib import crc32

from ...core.block import KEY_BYTES
from ...core.tiers import BlockFacts
from .checksum import block_sum

MAGIC = b"tokenmill KV archive\n"
VERSION = 1
_MOST_HEAD = 1 << 16


class BadArchive(ValueError):
    """What is wrong with it."""


@dataclass(frozen=True, slots=True)
class ArchiveHead:
    numerics_id: str
    block_bytes: tuple[int, ...]
    block_size: int


class ArchiveWriter:
    """Writes the head when it is made; `close` ends it. num_bytes: so far."""

    def __init__(self, file: IO[bytes], head: ArchiveHead) -> None:
        self._file = file
        self._block_bytes = head.block_bytes
        self.num_blocks = 0
        self.num_bytes = file.write(MAGIC) + self._line(
            version=VERSION, numerics_id=head.numerics_id, block_bytes=head.block_bytes, block_size=head.block_size
        )

    def add(self, facts: BlockFacts, data: bytes | memoryview, sum: int) -> None:
        group, key = facts.block
        assert len(data) == self._block_bytes[group], (len(data), facts)
        self.num_bytes += self._line(
            group=group, key=key.hex(), parent=facts.parent.hex(), depth=facts.depth, owner=facts.owner, sum=sum
        )
        self.num_bytes += self._file.write(data)
        self.num_blocks += 1

    def close(self) -> None:
        self.num_bytes += self._line(end=self.num_blocks)

    def _line(self, **fields: Any) -> int:
        text = json.dumps(fields).encode()
        return self._file.write(b"%08x %s\n" % (crc32(text), text))


def read_head(file: IO[bytes]) -> ArchiveHead:
    """Raises BadArchive."""
    if file.read(len(MAGIC)) != MAGIC:
        raise BadArchive("it is no archive of KV.")
    try:
        fields = _line(file)
        if fields["version"] != VERSION:
            raise BadArchive(f"it has format {fields['version']}, and this version reads {VERSION}.")
        sizes = tuple(int(size) for size in fields["block_bytes"])
        return ArchiveHead(str(fields["numerics_id"]), sizes, int(fields["block_size"]))
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, BadArchive) else BadArchive("its head is damaged.") from error


def read_blocks(file: IO[bytes], block_bytes: Sequence[int]) -> Iterator[tuple[BlockFacts, bytes, int]]:
    """Each sound block with its bytes and its checksum, up to the end. Raises BadArchive at the first that is not."""
    number = 0
    while True:
        try:
            fields = _line(file)
            if "end" in fields:
                if fields["end"] != number:
                    raise BadArchive(f"it ends after {number} blocks and not {fields['end']}.")
                return
            group, key, parent = int(fields["group"]), bytes.fromhex(fields["key"]), bytes.fromhex(fields["parent"])
            facts = BlockFacts((group, key), parent, int(fields["depth"]), str(fields["owner"]))
            if not 0 <= group < len(block_bytes) or len(key) != KEY_BYTES or len(parent) not in (0, KEY_BYTES):
                raise ValueError
            data = file.read(block_bytes[group])
            if len(data) != block_bytes[group] or block_sum(facts.block, data) != fields["sum"]:
                raise BadArchive(f"block {number} of it is damaged.")
        except (KeyError, TypeError, ValueError) as error:
            raise error if isinstance(error, BadArchive) else BadArchive(f"block {number} of it is damaged.") from error
        yield facts, data, int(fields["sum"])
        number += 1


def _line(file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(_MOST_HEAD)
    if not line.endswith(b"\n"):
        raise BadArchive("it is cut short.")
    check, _, text = line[:-1].partition(b" ")
    if check != b"%08x" % crc32(text):
        raise ValueError("a line is damaged")
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError
    return fields
