"""One pull of KV from another engine: how far it is, which blocks it wants, and what of it can be used. Pure."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ....core.block import BlockKey, BlockTable, num_hidden_blocks
from ....core.moves import KVSource
from ....core.sequence import Sequence
from ...blocks.fetch import Claim, is_intact
from ...blocks.groups import KVBlocks
from ...blocks.manager import BlockManager


@dataclass(slots=True, eq=False)
class Pull:
    """answer      number of the answer to a Prefetch
    made        what is reserved and shared; None: nothing yet
    number      of the job under way; -1: none
    num_shared  leading tokens whose KV was here before
    num_tokens  leading tokens whose KV is in
    is_last     the source has said that this is all
    holes       (group, block) that it did not have
    is_going    Continue has come
    is_failed   nothing more is asked for
    """

    source: KVSource
    keys: List[BlockKey]
    seq: Sequence | None
    answer: int = -1
    made: Claim | None = None
    number: int = -1
    num_shared: int = 0
    num_tokens: int = 0
    is_last: bool = False
    holes: set[tuple[int, int]] = field(default_factory=set)
    is_staged: bool = False
    is_going: bool = False
    is_failed: bool = False


def ids_wanted(made: Claim, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
    """Of each group, the reserved blocks [start, stop) of the tables; -1 for those that are shared or hidden."""
    missing = {(group, block) for group, _, block in made.missing}

    def is_wanted(group: int, index: int, table: BlockTable) -> bool:
        return index >= table.num_released and (index >= len(made.keys) or (group, table.ids[index]) in missing)

    return tuple(
        tuple(table.ids[index] if is_wanted(group, index, table) else -1 for index in range(start, stop))
        for group, table in enumerate(made.tables)
    )


def num_usable(blocks: KVBlocks, pull: Pull, seq: Sequence) -> int:
    """Leading tokens that the sequence can go on from, one being left to compute; 0 where nothing has come: what
    else is here is found by its keys."""
    num_tokens = min(pull.num_tokens, len(seq.tokens) - 1)
    if pull.made is None or num_tokens <= pull.num_shared or not is_intact(blocks, pull.made):
        return 0
    for group, (pool, table) in enumerate(zip(blocks.pools, pull.made.tables, strict=True)):
        hidden = num_hidden_blocks(num_tokens, pool.window, blocks.block_size)
        if table.num_released > hidden or any(place == group and index >= hidden for place, index in pull.holes):
            return 0
    return num_tokens


def meets(pools: List[BlockManager], keys: List[BlockKey], unwritten: set[tuple[BlockManager, int]]) -> bool:
    """Whether one of these keys is that of a block which is published and not yet written for certain."""
    found = ((pool, pool.find(key)) for pool in pools for key in keys)
    return any(block is not None and (pool, block) in unwritten for pool, block in found)
