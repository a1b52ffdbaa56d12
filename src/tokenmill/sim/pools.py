"""What a toy executor keeps: its sequences, and the slots of each KV group."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ..core.block import KVGroupSpec
from ..core.step import Introduction


@dataclass(slots=True, eq=False)
class ToySequence:
    """What the toy worker keeps of a sequence. `drawn_in`: step -> the position of the output drawn in it."""

    intro: Introduction
    tables: tuple[list[int], ...]
    outputs: list[int] = field(default_factory=list)
    drawn_in: dict[int, int] = field(default_factory=dict)


class ToyPool:
    """The slots of one KV group. `reach`: step in flight -> block -> a sequence of it that sees the block."""

    def __init__(self, group: KVGroupSpec, block_size: int) -> None:
        self.kind = group.kind
        self.window = group.window
        self.reach: dict[int, dict[int, ToySequence]] = {}
        self.positions = array("q", [-1]) * (group.num_blocks * block_size)
        self.tokens = array("q", [-1]) * (group.num_blocks * block_size)
        self.block_size = block_size
        self.moving: dict[int, bool] = {}
        self.sending: dict[int, int] = {}


@dataclass(slots=True, eq=False)
class ToyEncoder:
    """What the encoder has made: of a block of its group, the digest of the content. `reach`: as in ToyPool."""

    contents: dict[int, bytes] = field(default_factory=dict)
    reach: dict[int, dict[int, ToySequence]] = field(default_factory=dict)

    def fill(self, intro: Introduction) -> None:
        found = {block: one.digest for one, block in zip(intro.embeds, intro.encoded, strict=False)}
        self.contents.update((block, found[block]) for block in intro.unencoded)

    def has(self, intro: Introduction) -> bool:
        """Whether the blocks of a sequence are those of its contents."""
        return all(
            self.contents.get(block) == one.digest for one, block in zip(intro.embeds, intro.encoded, strict=False)
        )


def give_back(pools: Sequence[ToyPool], blocks: Sequence[Sequence[int]]) -> bool:
    """What these blocks of each pool held is gone. False where a step in flight sees one of them."""
    for pool, ids in zip(pools, blocks, strict=True):
        for block in ids:
            if any(block in reach for reach in pool.reach.values()):
                return False
            size = pool.block_size
            begin, end = block * size, (block + 1) * size
            pool.positions[begin:end] = pool.tokens[begin:end] = array("q", [-1]) * size
    return True


def mark_of(adapter: str) -> int:
    """What an adapter adds to the tokens it stores."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=4).digest(), "little") << 24 if adapter else 0
