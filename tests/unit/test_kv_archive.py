"""Archives of KV: what is written is read; whatever is changed is found, and nothing behind it is taken."""

from __future__ import annotations

import io
import json
import random
from zlib import crc32

import pytest

from tokenmill.core.tiers import BlockFacts
from tokenmill.kv.transfer.archive import ArchiveHead, ArchiveWriter, BadArchive, read_blocks, read_head
from tokenmill.kv.transfer.checksum import block_sum

HEAD = ArchiveHead("numerics", (48, 20), 16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def made(num_blocks: int = 6) -> tuple[bytes, list[tuple[BlockFacts, bytes, int]]]:
    rng, blocks = random.Random(7), []
    for number in range(num_blocks):
        group = number % 2
        facts = BlockFacts((group, key(number)), key(number - 1) if number else b"", number, "me" if group else "")
        data = rng.randbytes(HEAD.block_bytes[group])
        blocks.append((facts, data, block_sum(facts.block, data)))
    file = io.BytesIO()
    writer = ArchiveWriter(file, HEAD)
    for each in blocks:
        writer.add(*each)
    writer.close()
    assert writer.num_bytes == len(file.getvalue()) and writer.num_blocks == num_blocks
    return file.getvalue(), blocks


def read(data: bytes) -> tuple[list[tuple[BlockFacts, bytes, int]], str]:
    """The blocks, and what is wrong."""
    file, found = io.BytesIO(data), []
    try:
        head = read_head(file)
        for each in read_blocks(file, head.block_bytes):
            found.append(each)
    except BadArchive as error:
        return found, str(error)
    return found, ""


def test_what_was_written_is_read() -> None:
    data, blocks = made()
    assert read_head(io.BytesIO(data)) == HEAD
    assert read(data) == (blocks, "")
    assert read(made(0)[0]) == ([], "")


@pytest.mark.parametrize("seed", range(300))
def test_no_damage_gives_a_block_that_was_not_written(seed: int) -> None:
    """Bytes changed, cut off, doubled, exchanged; also the head of one block before the bytes of another."""
    rng = random.Random(seed)
    data, blocks = made()
    way, at = rng.randrange(5), rng.randrange(len(data))
    if way == 0:
        damaged = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    elif way == 1:
        damaged = data[:at]
    elif way == 2:
        damaged = data[:at] + bytes(rng.randrange(1, 30)) + data[at:]
    elif way == 3:
        other = rng.randrange(len(data) - 30)
        damaged = data[:at] + data[other : other + 30] + data[at + 30 :]
    else:
        damaged = data.replace(blocks[0][1], blocks[2][1])
    found, why = read(damaged)
    known = {facts.block: (data, sum) for facts, data, sum in blocks}
    assert all(known[facts.block] == (data, sum) for facts, data, sum in found)
    assert why or found == blocks


def test_others_are_told_apart() -> None:
    data, _ = made(1)
    line = data.splitlines()[1]
    for fields, says in (({"version": 9}, "format 9"), ({"block_bytes": 5}, "damaged")):
        other = json.dumps(json.loads(line.partition(b" ")[2]) | fields).encode()
        assert says in read(data.replace(line, b"%08x %s" % (crc32(other), other)))[1]
    assert "no archive" in read(b"something else" * 9)[1]
