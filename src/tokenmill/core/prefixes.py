"""What a prefix cache holds, told in few words: the runs of its tree, and its pools."""

from __future__ import annotations

from typing import NamedTuple


class PrefixRun(NamedTuple):
    """Published blocks in a row, of which only the last has another number of blocks below it than one.

    id            in its summary; parent: the run it hangs below, or -1
    start         blocks before it in its prompt
    num_blocks    of its own; num_held: those of them that sequences hold
    total_blocks  with all runs below it, also those left out
    num_uses      sequences that computed its first block or had a hit on it
    num_children  blocks below its last one
    """

    id: int
    parent: int
    start: int
    num_blocks: int
    num_held: int
    total_blocks: int
    num_uses: int
    num_children: int


class PoolCounts(NamedTuple):
    """Blocks of one pool. window: positions that its layers see at most; 0: all."""

    window: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int


class PrefixSummary(NamedTuple):
    """runs: the largest, with what is below them; parents come before children. num_published: blocks of the tree;
    num_seen: so many of these, the oldest, were looked at."""

    runs: tuple[PrefixRun, ...] = ()
    num_published: int = 0
    num_seen: int = 0
