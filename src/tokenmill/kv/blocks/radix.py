"""The prefix tree: which block holds which key, and which unreferenced block to evict first.

A node is one full block; its parent is the block before it. Because keys are chained, a prefix is looked up with one
dictionary access for each block, and the tree's edges matter only for eviction: a parent must outlive its children.

A policy chooses which leaf is evicted first (`unreferenced`). Callers follow two rules so that a leaf is always among
the unreferenced: a sequence that holds a node holds its parent too, and it releases the child before the parent. So a
child always becomes unreferenced before its parent. `evict` asserts it.

The idea of sharing KV through a radix tree: SGLang's RadixAttention (Zheng et al., 2023); the hash-chained form: vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from ...core.block import BlockKey
from ...core.kv_events import PrefixRun, PrefixSummary
from .allocator import LeastRecentFirst, Unreferenced

MOST_SEEN = 16_384
"""Blocks that a summary looks at, in the order of publication; a few milliseconds."""


@dataclass(slots=True, eq=False)
class Node:
    """number: of the publication. depth: blocks before it in its prompt. num_uses: sequences that computed it or had a
    hit on it."""

    key: BlockKey
    block: int
    parent: Node | None
    number: int
    depth: int = 0
    num_children: int = 0
    num_uses: int = 1


class Listener(Protocol):
    """Hears which keys are published, with the one above (b"" at the root) and how many are; and which no longer."""

    def stored(self, key: BlockKey, parent: BlockKey, depth: int) -> None: ...

    def removed(self, key: BlockKey) -> None: ...


class RadixTree:
    """Published blocks by key. Every operation is O(1) a block, but for what `unreferenced` takes."""

    def __init__(self, unreferenced: Unreferenced | None = None) -> None:
        self._by_key: dict[BlockKey, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._num_published = 0
        self.listeners: list[Listener] = []
        self._unreferenced = LeastRecentFirst() if unreferenced is None else unreferenced

    def __len__(self) -> int:
        return len(self._by_block)

    @property
    def num_unreferenced(self) -> int:
        return len(self._unreferenced)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def is_unreferenced(self, block: int) -> bool:
        return block in self._unreferenced

    def find(self, key: BlockKey) -> int | None:
        """The block published under `key`, or None."""
        node = self._by_key.get(key)
        return None if node is None else node.block

    def items(self) -> list[tuple[BlockKey, int]]:
        """Every key with its block, parents before children: in the order in which they were inserted."""
        return [(node.key, block) for block, node in self._by_block.items()]

    def nodes(self) -> Iterable[Node]:
        """All, parents before children."""
        return self._by_block.values()

    def match(self, keys: Sequence[BlockKey], start: int, stop: int) -> list[int]:
        """Blocks of the longest run keys[start:...] that is published, at most up to `stop`; changes nothing."""
        blocks: list[int] = []
        for index in range(start, stop):
            node = self._by_key.get(keys[index])
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def insert(self, key: BlockKey, block: int, parent: int | None, depth: int = 0) -> None:
        """Publish `block` under a key that is not published yet, below the published block `parent`; `depth`
        blocks of its prompt are before it."""
        assert key not in self._by_key, f"block {block} is published already"
        self._put(key, block, None if parent is None else self._by_block[parent], depth)

    def insert_all(self, keys: Sequence[BlockKey], blocks: Sequence[int], start: int, stop: int) -> int:
        """As `insert` of blocks [start, stop) of a prefix, of which those before are published, up to the first key
        that is published already; the number of leading blocks that are published."""
        above = self._by_block[blocks[start - 1]] if 0 < start < stop else None
        for index in range(start, stop):
            if keys[index] in self._by_key:
                return index
            above = self._put(keys[index], blocks[index], above, index)
        return max(start, stop)

    def _put(self, key: BlockKey, block: int, above: Node | None, depth: int) -> Node:
        assert block not in self._by_block, f"block {block} is published already"
        if above is not None:
            above.num_children += 1
        node = self._by_key[key] = self._by_block[block] = Node(key, block, above, self._num_published, depth)
        self._num_published += 1
        for listener in self.listeners:
            listener.stored(key, b"" if above is None else above.key, depth)
        return node

    def below(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are published and all that hang below them, parents before children. O(nodes)."""
        found = {block: None for block in blocks if block in self._by_block}
        if found:
            for block, node in self._by_block.items():  # in the order in which they were inserted
                if node.parent is not None and node.parent.block in found:
                    found[block] = None
        return [block for block in self._by_block if block in found]

    def remove(self, block: int) -> None:
        """Take a leaf out, whether referenced or not."""
        node = self._by_block.pop(block)
        assert node.num_children == 0, f"block {block} still has {node.num_children} children"
        del self._by_key[node.key]
        for listener in self.listeners:
            listener.removed(node.key)
        self._unreferenced.discard(block)
        above = node.parent
        if above is not None:
            above.num_children -= 1
            if not above.num_children:
                self._unreferenced.expose(above)

    def mark_unreferenced(self, block: int) -> bool:
        """The block may be evicted from now on. Whether it is published."""
        node = self._by_block.get(block)
        if node is None:
            return False
        self._unreferenced.add(node)
        return True

    def use(self, block: int) -> None:
        """One more sequence has a hit on the block, which may not be evicted."""
        self._by_block[block].num_uses += 1
        self._unreferenced.discard(block)

    def next_evicted(self) -> int:
        """The unreferenced block that the policy gives up first: a leaf."""
        return self._unreferenced.first()

    def upcoming(self, most: int) -> list[BlockKey]:
        """Keys of the unreferenced blocks that the policy gives up first, so many at most."""
        return [self._by_block[block].key for block in self._unreferenced.upcoming(most)]

    def check(self) -> None:
        """Assert what must hold between calls; O(number of nodes), for tests."""
        assert len(self._by_key) == len(self._by_block)
        children: dict[int, int] = {}
        position = {block: index for index, block in enumerate(self._unreferenced)}
        for block, node in self._by_block.items():
            assert node.block == block and self._by_key[node.key] is node
            if node.parent is None:
                continue
            above = node.parent.block
            assert self._by_block.get(above) is node.parent, f"block {block} lost its parent {above}"
            children[above] = children.get(above, 0) + 1
            if above in position:
                assert position.get(block, len(position)) < position[above], f"{above} would go before {block}"
        for block, node in self._by_block.items():
            assert node.num_children == children.get(block, 0), f"block {block} miscounts its children"


def summarise(
    nodes: Iterable[Node], num_published: int, is_cached: Callable[[int], bool], most_runs: int
) -> PrefixSummary:
    """The tree in few words: its runs, the largest of them.

        blocks   a - b - c - d        runs   0: a b        two prompts begin with the blocks a, b
                   \\ - e - f              1: c d        one goes on with c, d
                                         2: e f        the other with e, f

    nodes: all, parents before children. is_cached: whether nobody holds a block."""
    run_of: dict[int, int] = {}
    firsts: list[Node] = []
    parents: list[int] = []
    sizes: list[int] = []
    held: list[int] = []
    children: list[int] = []
    num_seen = 0
    for node in islice(nodes, MOST_SEEN):
        num_seen += 1
        above = node.parent
        if above is not None and above.num_children == 1:
            run = run_of[above.block]
        else:
            run = len(firsts)
            firsts.append(node)
            parents.append(-1 if above is None else run_of[above.block])
            sizes.append(0)
            held.append(0)
            children.append(0)
        run_of[node.block] = run
        sizes[run] += 1
        children[run] = node.num_children
        if not is_cached(node.block):
            held[run] += 1
    totals = sizes[:]
    for run in range(len(firsts) - 1, -1, -1):
        if parents[run] >= 0:
            totals[parents[run]] += totals[run]
    # A run is no larger than what it hangs below, which comes before it: a run is never taken without its parent.
    largest = sorted(sorted(range(len(firsts)), key=lambda run: (-totals[run], run))[:most_runs])
    runs = tuple(
        PrefixRun(
            run, parents[run], firsts[run].depth, sizes[run], held[run], totals[run], firsts[run].num_uses,
            children[run],
        )
        for run in largest
    )  # fmt: skip
    return PrefixSummary(runs, num_published, num_seen)
