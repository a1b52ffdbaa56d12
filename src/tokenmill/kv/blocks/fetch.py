"""A prefix of which a store holds some blocks: how far it reaches, and the blocks to fill in the pools.

    reach  the longest prefix whose blocks are each published or stored, in every KV group, as far as its end sees them
    claim  a table for each group: published blocks are shared, the others are reserved and must be filled

A store is described by the keys that it holds, for each group. Claimed blocks are published once they are filled, like
blocks that a step has computed: reserve, fill, publish, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ...core.block import NO_BLOCK, BlockKey, BlockMove, BlockTable, num_hidden_blocks
from ...core.tiers import TierKey
from .groups import KVBlocks, Tables
from .manager import BlockManager

Stored = Sequence[AbstractSet[BlockKey]]
"""Keys that a store holds, of each KV group."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`missing`: the blocks to fill. `shared`: the published ones, of each group (key, block)."""

    keys: tuple[BlockKey, ...]
    tables: tuple[BlockTable, ...]
    missing: tuple[BlockMove, ...]
    shared: tuple[tuple[tuple[BlockKey, int], ...], ...]


def reach(blocks: KVBlocks, stored: Stored, keys: Sequence[BlockKey], stop: int) -> int:
    """Blocks of the longest prefix that pools and store can serve together, up to block `stop`; changes nothing."""
    end, tried = stop, -1
    while end != tried:
        tried = end
        for pool, names in zip(blocks.pools, stored, strict=True):
            end = _reach_in(pool, names, keys, end, blocks.block_size)
    return end


def claim(
    blocks: KVBlocks,
    keys: Sequence[BlockKey],
    end: int,
    unsettled: AbstractSet[tuple[BlockManager, int]],
    num_prompt: int = 0,
) -> Claim | None:
    """Tables for the first `end` blocks, of a sequence whose prompt has `num_prompt` tokens. None, and nothing changes,
    where there are not enough blocks, or where one that would be shared is among `unsettled`: it may turn out never to
    have been written."""
    found: list[tuple[tuple[BlockKey, int], ...]] = []
    for pool in blocks.pools:
        seen = keys[num_hidden_blocks(end * blocks.block_size, pool.window, blocks.block_size) : end]
        shared = tuple((key, block) for key in seen if (block := pool.find(key)) is not None)
        ids = [block for _, block in shared]
        if any((pool, block) in unsettled for block in ids):
            return None
        if len(seen) - len(ids) > pool.num_available - pool.num_cached_among(ids):
            return None
        found.append(shared)
    tables, missing = blocks.new_tables(num_prompt), []
    for group, (pool, shared) in enumerate(zip(blocks.pools, found, strict=True)):
        hidden = num_hidden_blocks(end * blocks.block_size, pool.window, blocks.block_size)
        seen, ids_of = keys[hidden:end], dict(shared)
        pool.adopt(ids_of.values())
        new = [key for key in seen if key not in ids_of]
        num_shared = seen.index(new[0]) if new else len(seen)
        ids_of |= zip(new, pool.reserve(len(new)), strict=True)
        missing += [(group, key, ids_of[key]) for key in new]
        ids = [0] * hidden + [ids_of[key] for key in seen]
        table = tables[group]
        table.ids, table.num_released, table.num_published = ids, hidden, hidden + num_shared
    return Claim(tuple(keys[:end]), tables, tuple(missing), tuple(found))


def is_intact(blocks: KVBlocks, made: Claim) -> bool:
    """Whether what was shared when the claim was made, or was published from it since, still is: a block that was
    withdrawn or forgotten may hold anything."""
    for pool, table, shared in zip(blocks.pools, made.tables, made.shared, strict=True):
        if any(pool.find(key) != block for key, block in shared):
            return False
        if not pool.window:
            published = zip(made.keys[len(shared) : table.num_published], table.ids[len(shared) :], strict=False)
            if any(pool.find(key) != block for key, block in published):
                return False
    return True


def num_in(made: Claim, left: AbstractSet[TierKey]) -> int:
    """Leading blocks of a claim, in every group, of which none is among `left`."""
    if not left:
        return len(made.keys)
    groups = range(len(made.tables))
    return next(index for index, key in enumerate(made.keys) if any((group, key) in left for group in groups))


def gather(
    blocks: KVBlocks,
    keys: Sequence[BlockKey],
    tables: Tables,
    num_full: int,
    unsettled: AbstractSet[tuple[BlockManager, int]],
) -> list[BlockMove]:
    """The blocks among the first `num_full` of a sequence's tables that they hold. A table with a window first takes
    back what has slid out of it and is seen by who goes on from the block before the last, as far as that is still
    published, and not among `unsettled` (see `claim`). Of states it is the last that is there."""
    moves: list[BlockMove] = []
    for group, (pool, table) in enumerate(zip(blocks.pools, tables, strict=True)):
        if table.checkpoints is not None:
            moves += _last_state(group, pool, keys, table, num_full, unsettled)
            continue
        hidden = num_hidden_blocks(max(0, num_full - 1) * blocks.block_size, pool.window, blocks.block_size)
        # With rows in flight beyond the end, all of it may have slid out.
        for index in reversed(range(hidden, table.num_released)) if table.num_released <= num_full else ():
            block = pool.find(keys[index])
            if block is None or (pool, block) in unsettled:
                break
            pool.adopt((block,))
            table.ids[index] = block
            table.num_released = index
        moves += [(group, keys[index], table.ids[index]) for index in range(table.num_released, num_full)]
    return moves


def _last_state(
    group: int,
    pool: BlockManager,
    keys: Sequence[BlockKey],
    table: BlockTable,
    num_full: int,
    unsettled: AbstractSet[tuple[BlockManager, int]],
) -> list[BlockMove]:
    """The one that may be copied behind the last of the first `num_full` blocks, which the table holds from now on."""
    for index in reversed(range(num_full)):
        if index >= table.num_released:
            if table.ids[index] != NO_BLOCK:
                return [(group, keys[index], table.ids[index])]
        elif (block := pool.find(keys[index])) is not None and (pool, block) not in unsettled:
            pool.adopt((block,))
            table.ids[index : table.num_released] = [block, *[NO_BLOCK] * (table.num_released - index - 1)]
            table.num_released = index
            return [(group, keys[index], block)]
    return []


def pin_published(blocks: KVBlocks) -> tuple[Tables, list[BlockMove]]:
    """A reference to every published block, so that all stay as they are until the tables are released; and all of
    these blocks, those of a prefix in its order."""
    tables: list[BlockTable] = []
    moves: list[BlockMove] = []
    for group, pool in enumerate(blocks.pools):
        published = pool.published()
        pool.adopt(block for _, block in published)
        tables.append(BlockTable([block for _, block in published]))
        moves += [(group, key, block) for key, block in published]
    return tuple(tables), moves


def _reach_in(pool: BlockManager, stored: AbstractSet[BlockKey], keys: Sequence[BlockKey], stop: int, size: int) -> int:
    end = index = stop
    while end > 0:
        first = num_hidden_blocks(end * size, pool.window, size)
        while index > first and (pool.find(keys[index - 1]) is not None or keys[index - 1] in stored):
            index -= 1
        if index <= first:
            return end
        # Every end that has been tried sees the block before `index`.
        end = index = index - 1
    return 0
