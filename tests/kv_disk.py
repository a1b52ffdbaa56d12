"""For tests of the disk tier: host memory, blocks whose bytes follow from their keys, and a tier that keeps them."""

from __future__ import annotations

import mmap
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenmill.core.tiers import DISK, NO_PLACE, BlockFacts, DropFrom, LoadFrom, SaveTo, TierEntry, TierKey
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.disk.tier import DiskTier

MODEL = "0123456789abcdef0123456789abcdef"
SIZES = (5000, 12288, 8192)
SLOT_BYTES = 12288
NUM_SLOTS = 96


class Host:
    """Host memory of some slots, and what is done with them."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, NUM_SLOTS * SLOT_BYTES)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + num_bytes]

    def fill(self, nth: int, data: bytes) -> int:
        offset = nth * SLOT_BYTES
        self.memory[offset : offset + len(data)] = data
        return offset

    def read(self, nth: int, num_bytes: int) -> bytes:
        return self.memory[nth * SLOT_BYTES : nth * SLOT_BYTES + num_bytes]


class Blocks:
    """A tier, blocks that were given to it, and what they hold. num_caught: loaded, and not as their checksums say."""

    def __init__(
        self,
        path: Path,
        num_bytes: int = 8 << 20,
        model: str = MODEL,
        key: bytes | None = None,
        spare_bytes: int = 0,
        scrub_bytes_s: float = 0.0,
    ) -> None:
        self.host = Host()
        self.num_caught = 0
        self.tier = DiskTier(
            path, model, SIZES, num_bytes, self.host.view, key, spare_bytes=spare_bytes, scrub_bytes_s=scrub_bytes_s
        )
        self.data: dict[TierKey, bytes] = {}
        self.places: dict[TierKey, int] = {}

    async def save(self, blocks: Sequence[BlockFacts], seed: int = 0) -> list[int]:
        moves = []
        for nth, facts in enumerate(blocks):
            data = data_of(facts.block, seed)
            self.data[facts.block] = data
            moves.append((facts, self.host.fill(nth, data), block_sum(facts.block, data)))
        places = list(await self.tier.save(SaveTo(1, DISK, tuple(moves))))
        self.places |= {facts.block: place for facts, place in zip(blocks, places, strict=True) if place != NO_PLACE}
        return places

    async def load(self, wanted: Sequence[TierKey]) -> list[bytes | None]:
        """The bytes of blocks, as a worker would take them; None for a miss."""
        moves = tuple((block, self.places[block], nth * SLOT_BYTES) for nth, block in enumerate(wanted))
        sums = await self.tier.load(LoadFrom(1, DISK, moves))
        found: list[bytes | None] = []
        for nth, (block, sum_) in enumerate(zip(wanted, sums, strict=True)):
            data = self.host.read(nth, SIZES[block[0]])
            is_right = sum_ == block_sum(block, data)
            self.num_caught += not is_right and sum_ != NO_PLACE
            found.append(data if is_right else None)
        return found

    async def drop(self, wanted: Sequence[TierKey]) -> None:
        await self.tier.drop(DropFrom(1, DISK, tuple((block, self.places.pop(block)) for block in wanted)))

    def expected(self, wanted: Sequence[TierKey]) -> list[bytes]:
        return [self.data[block] for block in wanted]


@asynccontextmanager
async def opened(path: Path, *args: Any, **kwargs: Any) -> AsyncIterator[tuple[Blocks, list[TierEntry]]]:
    """As Blocks takes it, with what had been kept."""
    blocks = Blocks(path, *args, **kwargs)
    entries = list(await blocks.tier.open())
    blocks.places = {entry.facts.block: entry.place for entry in entries}
    try:
        yield blocks, entries
    finally:
        await blocks.tier.close()


def prefix(seed: int, count: int, group: int = 0, owner: str = "") -> list[BlockFacts]:
    """The blocks of one prompt, each the child of the one before."""
    rng = random.Random(seed)
    keys = [rng.randbytes(16) for _ in range(count)]
    return [BlockFacts((group, key), keys[depth - 1] if depth else b"", depth, owner) for depth, key in enumerate(keys)]


def data_of(block: TierKey, seed: int = 0) -> bytes:
    """What a block holds."""
    group, key = block
    return random.Random(key + bytes([seed])).randbytes(SIZES[group])


def blocks_bytes(folder: Path) -> int:
    """What extents take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.glob("*.blocks"))
