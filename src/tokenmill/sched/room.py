"""Whether a waiting sequence fits the KV pools: its whole known length, beside what the running ones still need."""

from __future__ import annotations

from collections.abc import Sequence as List

from ..core.block import KVGroupSpec
from ..core.config import EngineConfig
from ..core.sequence import Sequence
from ..kv.blocks.groups import Match
from .admission import blocks_for, most_blocks


def has_room(
    config: EngineConfig,
    seq: Sequence,
    matched: Match,
    available: List[int],
    num_others: int,
    prefilling: List[Sequence],
) -> bool:
    """Beside `num_others` that run, which may grow by a block each, and of whom some are still `prefilling`."""
    to_come = blocks_to_come(config, seq, matched)
    for index, group in enumerate(config.groups):
        needed = to_come[index] + num_others
        for other in prefilling:
            table = other.tables[index]
            needed += _num_to_come(config, group, other, table.num_released, len(table) - table.num_released)
        if needed > available[index]:
            return False
    return True


def blocks_to_come(config: EngineConfig, seq: Sequence, matched: Match) -> list[int]:
    """Blocks of each group that a waiting sequence takes beyond those in `matched`."""
    return [
        _num_to_come(config, group, seq, matched.num_blocks - len(blocks), len(blocks))
        for group, blocks in zip(config.groups, matched.blocks, strict=True)
    ]


def blocks_given(available: List[int], given: List[Sequence]) -> list[int]:
    """Blocks of each group that are available if those in `given` are preempted."""
    return [
        num + sum(len(seq.tables[index]) - seq.tables[index].num_released for seq in given)
        for index, num in enumerate(available)
    ]


def _num_to_come(config: EngineConfig, group: KVGroupSpec, seq: Sequence, num_released: int, num_held: int) -> int:
    """Blocks of one group that the known tokens of a sequence take beyond those it holds."""
    num_blocks = blocks_for(len(seq.tokens), config.block_size)
    return max(0, min(num_blocks - num_released, most_blocks(config, group)) - num_held)
