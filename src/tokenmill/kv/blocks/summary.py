"""A prefix tree in few words: its runs, the largest of them. Reads and changes nothing.

blocks   a - b - c - d        runs   0: a b        two prompts begin with the blocks a, b
               \\ - e - f              1: c d        one goes on with c, d
                                     2: e f        the other with e, f
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from ...core.prefixes import PrefixRun, PrefixSummary
from .radix import Node

MOST_SEEN = 16_384
"""Blocks that are looked at, in the order of publication; a few milliseconds."""


def summarise(
    nodes: Iterable[Node], num_published: int, is_cached: Callable[[int], bool], most_runs: int
) -> PrefixSummary:
    """nodes: all, parents before children. is_cached: whether nobody holds a block."""
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
