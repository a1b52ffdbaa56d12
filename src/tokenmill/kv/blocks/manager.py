"""BlockManager: the only object that decides which block ids a sequence may use.

It reserves, shares, publishes, withdraws and releases ids, and keeps

    free + cached + held = num_blocks          (quarantined blocks count as held)

It knows no bytes, sequences or scheduling. Callers keep the block tables; this room sees only ids and keys.

    free -> reserve -> held -> publish -> held and matchable -> release -> (quarantine) -> cached -> evict -> held again
                            -> release, never published ------> (quarantine) -> free

A published block may be copied (`begin_copy`) whether or not anybody holds it: it keeps its place in the order of
eviction, but is not handed out before the copy has ended (`end_copy`). One that is evicted meanwhile is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...core.block import BlockKey, num_hidden_blocks
from ...core.kv_events import PrefixSummary
from .allocator import BlockAllocator, Unreferenced
from .radix import Listener, Node, RadixTree, summarise


class BlockManager:
    """Blocks of one pool. All costs are O(1) a block.

    window  positions that a query sees at most; 0: all. Whoever holds a block of a pool without a window holds all
            before it, so that blocks are published and evicted as a tree. With a window, blocks stand alone: leading
            ones are given back while later ones are in use, and a hit needs only those that its end still sees.
    """

    def __init__(self, num_blocks: int, window: int = 0, unreferenced: Unreferenced | None = None) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self._allocator = BlockAllocator(num_blocks)
        self._tree = RadixTree(unreferenced)
        self._copied: set[int] = set()
        self._num_copied_idle = 0  # of those, the ones that nobody holds and that are published
        self._aside: set[int] = set()  # of those, the ones that nobody holds and that are not

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that serve later prefix hits until they are evicted."""
        return self._tree.num_unreferenced

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` can hand out now."""
        return self._allocator.num_free + self._tree.num_unreferenced - self._num_copied_idle

    @property
    def num_quarantined(self) -> int:
        """Blocks that nobody holds, yet a step in flight may touch."""
        return self._allocator.num_quarantined

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def match(self, keys: Sequence[BlockKey], start: int, stop: int) -> list[int]:
        """Blocks holding the KV of blocks [start, stop) of a prefix, as many as are published in a row.

        The caller limits `stop` to floor((len(tokens) - 1) / block_size), so that one token at least is computed.
        """
        return self._tree.match(keys, start, stop)

    def match_window(self, keys: Sequence[BlockKey], start: int, stop: int, block_size: int) -> tuple[int, list[int]]:
        """The longest hit, and its blocks, in a pool with a window: the last end <= `stop` such that all blocks from
        `start` on that a query there sees are published, or `start`. The blocks are those up to the end."""
        end = index = stop
        blocks: list[int] = []
        while end > start:
            first = max(start, num_hidden_blocks(end * block_size, self.window, block_size))
            while index > first and (block := self._tree.find(keys[index - 1])) is not None:
                blocks.append(block)
                index -= 1
            if index <= first:
                return end, blocks[::-1]
            # Every end that has been tried sees the block before `index`.
            end = index = index - 1
            blocks.clear()
        return start, []

    def find(self, key: BlockKey) -> int | None:
        """The block published under `key`, or None."""
        return self._tree.find(key)

    def published(self) -> list[tuple[BlockKey, int]]:
        """Every published block with its key, what hangs below another one after it."""
        return self._tree.items()

    def nodes(self) -> Iterable[Node]:
        """What is published, what hangs below another one after it."""
        return self._tree.nodes()

    @property
    def listeners(self) -> list[Listener]:
        """Who hears of what is published and what no longer; to be changed."""
        return self._tree.listeners

    def summary(self, most_runs: int) -> PrefixSummary:
        """What is published, in few words. Empty with a window: blocks stand alone."""
        if self.window:
            return PrefixSummary()
        tree = self._tree
        return summarise(tree.nodes(), len(tree), tree.is_unreferenced, most_runs)

    def num_cached_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are unreferenced: adopting them makes that many fewer available. Those that are being
        copied are not available in any case."""
        is_unreferenced = self._tree.is_unreferenced
        if not self._copied:
            return sum(1 for block in blocks if is_unreferenced(block))
        return sum(1 for block in blocks if is_unreferenced(block) and block not in self._copied)

    def adopt(self, blocks: Iterable[int]) -> None:
        """Take a reference to each matched block. A shared block is never written."""
        for block in blocks:
            if self._copied:
                self._num_copied_idle -= self._is_copied_idle(block)
            self._allocator.retain(block)
            self._tree.use(block)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these blocks, which a table holds. In a pool without a window, whoever does so
        holds those before them too."""
        for block in blocks:
            self._allocator.retain(block)

    def reserve(self, num_blocks: int) -> list[int]:
        """Hand out `num_blocks` writable ids: free ones first, then cached ones as the policy of eviction says."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        blocks: list[int] = []
        allocator, tree = self._allocator, self._tree
        for _ in range(num_blocks):
            while not allocator.num_free and self._copied:
                self.withdraw((tree.next_evicted(),))
            if allocator.num_free:
                blocks.append(allocator.take())
            else:
                block = tree.next_evicted()
                tree.remove(block)
                allocator.take_again(block)
                blocks.append(block)
        return blocks

    def publish(self, keys: Sequence[BlockKey], blocks: Sequence[int], start: int, stop: int) -> int:
        """Make the held blocks [start, stop) of one table matchable; blocks [0, start) are published already.

        Stops at the first key under which another block is published: what follows would hang below a block that this
        table does not hold. In a pool with a window it passes over such keys. Returns the new number of leading blocks
        that need no further call.
        """
        if not self.window:
            return self._tree.insert_all(keys, blocks, start, stop)
        for index in range(start, stop):
            if self._tree.find(keys[index]) is None:
                self._tree.insert(keys[index], blocks[index], None, index)
        return max(start, stop)

    def is_published(self, block: int) -> bool:
        return block in self._tree

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublish blocks, say because their step failed and they were never written; children come before parents."""
        for block in blocks:
            idle = self._tree.is_unreferenced(block)
            self._num_copied_idle -= self._is_copied_idle(block)
            self._tree.remove(block)
            if idle:
                self._free(block)

    def forget(self, blocks: Iterable[int]) -> set[int]:
        """Unpublish those of `blocks` that are published, and all below them; returns all these. O(published)."""
        below = self._tree.below(blocks)
        self.withdraw(reversed(below))
        return set(below)

    def release(self, blocks: Sequence[int], last_step: int) -> None:
        """Give blocks back, last first; `last_step` is the last step that carries a row reading or writing them."""
        for block in self._allocator.release(reversed(blocks), last_step):
            self._settle(block)

    def end_step(self, step: int) -> None:
        """Every step up to `step` has ended: blocks that only those could touch leave quarantine."""
        for block in self._allocator.end_step(step):
            self._settle(block)

    def has_spare(self, evicts: bool) -> bool:
        """Whether `lend` would find a block."""
        return self._allocator.num_lendable > 0 or (evicts and self.num_available > self.num_free)

    def lend(self, most: int, evicts: bool) -> list[int]:
        """So many blocks at most that nobody uses and that have memory, to be given to `take_back`: free ones, and then
        (`evicts`) cached ones as the policy of eviction says."""
        while evicts and self._allocator.num_lendable < most and self.num_available > self.num_free:
            self.withdraw((self._tree.next_evicted(),))
        return self._allocator.lend(most)

    def take_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were lent; their memory has gone."""
        self._allocator.take_back(blocks)

    def is_copied(self, block: int) -> bool:
        return block in self._copied

    def begin_copy(self, blocks: Iterable[int]) -> None:
        """Published blocks are read from now on, by others than steps. None of them is being copied already."""
        for block in blocks:
            assert block in self._tree and block not in self._copied, f"block {block} cannot be copied"
            self._copied.add(block)
            self._num_copied_idle += self._tree.is_unreferenced(block)

    def end_copy(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._num_copied_idle -= self._is_copied_idle(block)
            self._copied.remove(block)
            if block in self._aside:
                self._aside.remove(block)
                self._allocator.put(block)

    def upcoming(self, most: int) -> list[BlockKey]:
        """Keys of blocks that are about to be evicted, so many at most."""
        return self._tree.upcoming(most)

    def _settle(self, block: int) -> None:
        """An idle block is cached if it is published, else free."""
        if self._tree.mark_unreferenced(block):
            self._num_copied_idle += block in self._copied
        else:
            self._free(block)

    def _free(self, block: int) -> None:
        """It is idle and not published."""
        if block in self._copied:
            self._aside.add(block)
        else:
            self._allocator.put(block)

    def _is_copied_idle(self, block: int) -> bool:
        return block in self._copied and self._tree.is_unreferenced(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert conservation, given the table of every sequence that holds blocks; O(num_blocks), for tests."""
        references = [0] * self.num_blocks
        for table in tables:
            for block in table:
                references[block] += 1
        self._allocator.check(references)
        self._tree.check()
        used = [block for block, count in enumerate(references) if count]
        for block in used:
            assert not self._tree.is_unreferenced(block), f"block {block} is used and evictable"
        assert self._num_copied_idle == sum(map(self._is_copied_idle, self._copied)), self._num_copied_idle
        num_held = len(used) + self._allocator.num_quarantined + self._allocator.num_lent + len(self._aside)
        assert self.num_free + self.num_cached + num_held == self.num_blocks, "blocks were lost"
