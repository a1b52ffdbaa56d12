"""KVBlocks: the block ids of all KV groups of one engine, handed out together.

A sequence has one block table for each group, and all are equally long: block i of each stands for the same positions.
Every operation happens in all groups or in none:

    match    the longest prefix that every group can serve
    extend   as many new blocks in each group
    slide    in groups with a window, release leading blocks that no later query sees
    release  everything

    window of 5, blocks of 2, the next query at position 9    0 1 | 2 3 | 4 5 | 6 7 | 8 9
        group that sees everything                            held  held  held  held  held
        group with a window                                   back  back  held  held  held   (5..9 are seen)

Rows in flight may still read a released block, so it is quarantined until their step has ended. Groups share keys, not
prefix trees: whether a key is cached in one group says nothing about another.

A group of states keeps few of a sequence's blocks (core.block.Checkpoints): new entries of its table are NO_BLOCK but
for the last, and those that are to stay if there are blocks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...core.block import NO_BLOCK, BlockKey, BlockTable, Checkpoints, KVGroupSpec, num_hidden_blocks
from ...core.kv_events import PrefixSummary
from .allocator import LeastRecentFirst, Unreferenced
from .manager import BlockManager

Tables = Sequence[BlockTable]

UNBOUNDED = 1 << 40
"""Blocks."""


@dataclass(frozen=True, slots=True)
class Match:
    """Published blocks that carry tables on by `num_blocks` entries. `blocks`: of each group, those for the last of
    these entries; the entries before them are of positions that no query after the hit sees. num_shared: leading
    entries, those of the tables included, that groups which see everything could serve, be there a state or not."""

    num_blocks: int
    blocks: tuple[list[int], ...]
    num_shared: int = 0


class KVBlocks:
    """One BlockManager for each group, in the order of a sequence's tables; `encoder`: of the group that is in none."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        block_size: int,
        new_unreferenced: Callable[[], Unreferenced] = LeastRecentFirst,
        encoder: KVGroupSpec | None = None,
        *,
        caches_prefixes: bool = True,
    ) -> None:
        self.pools = tuple(BlockManager(group.num_blocks, group.window, new_unreferenced()) for group in groups)
        # Its blocks stand alone, as those of a window do.
        self.encoder = None if encoder is None else BlockManager(encoder.num_blocks, 1, new_unreferenced())
        self.no_match = Match(0, tuple([] for _ in groups))
        self._full = tuple(index for index, group in enumerate(groups) if not group.window)
        self._sliding = tuple(index for index, group in enumerate(groups) if group.window)
        self._intervals = tuple(group.interval for group in groups)
        self._caches_prefixes = caches_prefixes
        self.block_size = block_size

    @property
    def has_windows(self) -> bool:
        return bool(self._sliding)

    @property
    def has_states(self) -> bool:
        return any(self._intervals)

    @property
    def full_pool(self) -> BlockManager | None:
        """The first whose layers see everything."""
        return self.pools[self._full[0]] if self._full else None

    def new_tables(self, num_prompt: int = 0) -> tuple[BlockTable, ...]:
        """Of a sequence whose prompt has so many tokens."""
        num_blocks = max(0, num_prompt - 1) // self.block_size
        return tuple(
            BlockTable(checkpoints=Checkpoints(interval, num_blocks) if interval else None)
            for interval in self._intervals
        )

    def match(self, keys: Sequence[BlockKey], tables: Tables, stop: int) -> Match:
        """The longest hit that carries `tables` on, up to block `stop` at most; changes nothing."""
        start, end, num_shared = len(tables[0]), stop, 0
        found = list(self.no_match.blocks)
        for index in self._full:
            if tables[index].num_published < start:
                # With a private copy of a shared block, a table may not hold what hangs below the shared one.
                return self.no_match
            found[index] = self.pools[index].match(keys, start, end)
            num_shared = end = start + len(found[index])
        # A group that sees everything can end a hit anywhere before its own end; one with a window where what the end
        # sees is there, so that all of them have to be asked again until they agree.
        tried = -1
        while end != tried:
            tried = end
            for index in self._sliding:
                end, found[index] = self.pools[index].match_window(keys, start, end, self.block_size)
            if len(self._sliding) < 2:
                break
        if end == start:
            return self.no_match if num_shared == start else Match(0, self.no_match.blocks, num_shared)
        for index in self._full:
            del found[index][end - start :]
        return Match(end - start, tuple(found), num_shared)

    def num_extendable(self, match: Match, num_others: int = 0) -> int:
        """By how many blocks tables can grow after `match`, so that `num_others` can still grow by one."""
        most = [
            num - num_others if not interval else UNBOUNDED * (num > num_others)
            for num, interval in zip(self.num_available(match), self._intervals, strict=True)
        ]
        return min(most, default=UNBOUNDED)

    def num_spare(self, num_others: int) -> int:
        """Blocks that every group can hand out when `num_others` tables have grown by one each."""
        return min((num - num_others for num in self.num_available(self.no_match)), default=UNBOUNDED)

    def num_available(self, match: Match) -> list[int]:
        """Of each group, blocks that can be handed out beside `match`."""
        return [
            pool.num_available - (pool.num_cached_among(blocks) if blocks else 0)
            for pool, blocks in zip(self.pools, match.blocks, strict=True)
        ]

    def adopt(self, tables: Tables, match: Match, last_step: int) -> None:
        """Carry tables on over matched blocks, and give back what is hidden behind the hit; `last_step` is the last
        step that reads or writes what the tables hold."""
        self.note_shared(tables, match)
        for pool, table, blocks in zip(self.pools, tables, match.blocks, strict=True):
            num_skipped = match.num_blocks - len(blocks)
            if num_skipped:
                self._give_back(pool, table, len(table), last_step)
                table.ids += [0] * num_skipped
                table.num_released = len(table)
            pool.adopt(blocks)
            table.ids += blocks
            table.num_published = len(table)
        if self._sliding:
            self.slide(tables, len(tables[0]) * self.block_size, last_step)

    def note_shared(self, tables: Tables, match: Match) -> None:
        """What others had computed goes on elsewhere behind these blocks: a state there will be of use to whoever comes
        next."""
        for table in tables:
            if table.checkpoints is not None:
                table.checkpoints.num_shared = max(table.checkpoints.num_shared, match.num_shared)

    def extend(self, tables: Tables, num_blocks: int, *, all_states: bool = False) -> None:
        """Append `num_blocks` entries to each table: writable ids, of which those of states are few. all_states: none
        of these is missing, since a row with drafts may end in any."""
        for pool, table in zip(self.pools, tables, strict=True):
            if table.checkpoints is None or all_states:
                table.ids += pool.reserve(num_blocks)
                continue
            end = len(table) + num_blocks
            while len(table) < end:
                is_kept = table.checkpoints.keeps(len(table) + 1) and self._caches_prefixes and pool.num_available > 1
                table.ids += pool.reserve(1) if is_kept or len(table) + 1 == end else (NO_BLOCK,)

    def publish(
        self, keys: Sequence[BlockKey], tables: Tables, num_full: int, num_written: int | None = None
    ) -> list[tuple[BlockManager, int]]:
        """Make the first `num_full` blocks of the tables matchable, and return those that were not yet; of states only
        those that earlier steps write, the first `num_written` (None: all), as rows of a step go on side by side."""
        published: list[tuple[BlockManager, int]] = []
        for pool, table in zip(self.pools, tables, strict=True):
            first = max(table.num_published, table.num_released)
            if table.checkpoints is not None:
                end = num_full if num_written is None else min(num_full, num_written)
                published += self._publish_states(pool, keys, table, first, end)
                continue
            table.num_published = pool.publish(keys, table.ids, first, num_full)
            new = table.ids[first : table.num_published]
            published += [(pool, block) for block in new if not pool.window or pool.is_published(block)]
        return published

    def _publish_states(
        self, pool: BlockManager, keys: Sequence[BlockKey], table: BlockTable, first: int, num_full: int
    ) -> list[tuple[BlockManager, int]]:
        checkpoints, published = table.checkpoints, list[tuple[BlockManager, int]]()
        assert checkpoints is not None
        for index in range(first, num_full):
            block, is_kept = table.ids[index], checkpoints.keeps(index + 1)
            if block == NO_BLOCK or not (is_kept or checkpoints.is_latest(index + 1, self.block_size)):
                continue
            pool.publish(keys, table.ids, index, index + 1)
            if pool.is_published(block):
                published.append((pool, block))
            if checkpoints.latest is not None:
                last, last_block = checkpoints.latest
                if pool.find(keys[last]) == last_block:
                    pool.withdraw((last_block,))
            checkpoints.latest = None if is_kept else (index, block)
        table.num_published = max(first, num_full)
        return published

    def withdraw(self, published: Sequence[tuple[BlockManager, int]]) -> None:
        """Take back what `publish` returned, last first: it was never written. Some may have been forgotten."""
        for pool, block in reversed(published):
            if pool.is_published(block):
                pool.withdraw((block,))

    def forget(self, keys: Sequence[BlockKey], tables: Tables, others: Iterable[Tables]) -> None:
        """What these tables hold, or held under these keys, may be wrong: unpublish it and all that hangs below it.
        `others`: tables that may hold some of it; they may publish it again when they are found to do well with it."""
        others = list(others)
        for index, pool in enumerate(self.pools):
            table = tables[index]
            if table.checkpoints is not None:
                pool.forget(block for key in keys if (block := pool.find(key)) is not None)
                continue
            gone = pool.forget(table.ids[table.num_released : table.num_published])
            for other in others if gone and not pool.window else ():
                held = other[index].ids[: other[index].num_published]
                other[index].num_published = next((i for i, block in enumerate(held) if block in gone), len(held))

    def slide(self, tables: Tables, position: int, last_step: int, *, keeps_states: bool = True) -> None:
        """Give back what no query at `position` or after it sees; `last_step` as in `adopt`. keeps_states: but for
        states that are still to be published."""
        for index in self._sliding:
            pool, table = self.pools[index], tables[index]
            num_hidden = num_hidden_blocks(position, pool.window, self.block_size)
            if table.checkpoints is not None and self._caches_prefixes and keeps_states:
                num_hidden = min(num_hidden, table.num_published)
            if num_hidden > table.num_released:
                self._give_back(pool, table, num_hidden, last_step)

    def release(self, tables: Tables, last_step: int) -> None:
        """Give everything back; the tables are not to be used again."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table.held, last_step)

    def summary(self, most_runs: int) -> PrefixSummary:
        """What the first group that sees everything has published."""
        return PrefixSummary() if self.full_pool is None else self.full_pool.summary(most_runs)

    def end_step(self, step: int) -> None:
        """See BlockManager.end_step."""
        for pool in self.pools:
            pool.end_step(step)
        if self.encoder is not None:
            self.encoder.end_step(step)

    def check(self, all_tables: Iterable[Tables]) -> None:
        """Assert what must hold between calls, given the tables of every sequence; slow, for tests."""
        held = [[table.held for table in tables] for tables in all_tables]
        for index, pool in enumerate(self.pools):
            pool.check(blocks[index] for blocks in held)

    def _give_back(self, pool: BlockManager, table: BlockTable, end: int, last_step: int) -> None:
        begin = table.num_released
        pool.release([block for block in table.ids[begin:end] if block != NO_BLOCK], last_step)
        table.ids[begin:end] = [0] * (end - begin)
        table.num_released = end
