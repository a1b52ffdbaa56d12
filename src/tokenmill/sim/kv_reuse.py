"""What a cache of any size would save of a load: exactly for LRU, at most for any policy.

A request asks for a path of blocks, from the first one on. Those that were asked together last are asked together
again, so that all is counted by runs: blocks one after the other in this request, which one earlier request was the
last to ask for.

    reuse distance   distinct blocks asked since: LRU has a block if its room is larger (Mattson et al., 1970). Blocks
                     of a path are touched last to first, so that all before a block are nearer than it
    bound            room and time of a cache are for sale, at a price by time: what a policy saves is at most what is
                     worth more than its price, and all room at that price (Lagrangian dual of the flow of FOO). With
                     one price it is PFOO (Berger, Beckmann & Harchol-Balter, Practical bounds on optimal caching with
                     variable object sizes, 2018); prices by time bring it close to the flow itself, which is exact for
                     blocks of one size. That a block needs those before it is left out: the true optimum is less
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, exp
from typing import NamedTuple

from .kv_traces import Asked


class RecomputeCosts(NamedTuple):
    """Seconds to compute a block: the first of a prompt, and more for each before it."""

    first_s: float
    more_s: float

    def sum_s(self, start: int, end: int) -> float:
        """Of the blocks at these depths."""
        return (end - start) * (self.first_s + self.more_s * (start + end - 1) / 2)


def recompute_costs(block_size: int, token_s: float, position_s: float) -> RecomputeCosts:
    more_s = position_s * block_size * block_size
    return RecomputeCosts(token_s * block_size + more_s / 2, more_s)


class Run(NamedTuple):
    """Blocks at depths from `start` to `end` that request `now` asks for, and `last` did before, and nobody between.
    distance: distinct blocks asked since the one at `start`; of each one deeper it is one more."""

    last: int
    now: int
    start: int
    end: int
    distance: int


def runs_of(requests: Sequence[Asked]) -> list[Run]:
    """In order of `now`."""
    last: dict[int, int] = {}
    tree = [0] * (len(requests) + 1)  # of Fenwick: blocks by the request that asked for them last

    def add(place: int, num: int) -> None:
        place += 1
        while place < len(tree):
            tree[place] += num
            place += place & -place

    def before(place: int) -> int:
        total = 0
        while place:
            total += tree[place]
            place &= place - 1
        return total

    found: list[Run] = []
    for now, (_, blocks) in enumerate(requests):
        runs: list[tuple[int, int, int]] = []
        start, of = 0, -1
        for depth, block in enumerate(blocks):
            by = last.get(block, -1)
            last[block] = now
            if by != of:
                if of >= 0:
                    runs.append((of, start, depth))
                start, of = depth, by
        if of >= 0:
            runs.append((of, start, len(blocks)))
        asked = before(now)
        for by, start, end in runs:
            found.append(Run(by, now, start, end, asked - before(by + 1)))
        for by, start, end in runs:
            add(by, start - end)
        add(now, len(blocks))
    return found


def total_s(runs: Sequence[Run], costs: RecomputeCosts) -> float:
    """What a cache of endless room saves."""
    return sum(costs.sum_s(run.start, run.end) for run in runs)


def num_reused(runs: Sequence[Run], num_blocks: float) -> int:
    """Blocks that LRU with so much room has when they are asked for."""
    return sum(min(run.end - run.start, max(0, int(num_blocks) - run.distance)) for run in runs)


def lru_s(runs: Sequence[Run], costs: RecomputeCosts, num_blocks: float) -> float:
    """Seconds that it saves."""
    saved = 0.0
    for run in runs:
        num = min(run.end - run.start, int(num_blocks) - run.distance)
        if num > 0:
            saved += costs.sum_s(run.start, run.start + num)
    return saved


def working_set(runs: Sequence[Run], costs: RecomputeCosts, share: float = 0.99) -> int:
    """Blocks with which LRU saves so large a share of all that could be saved."""
    aim = share * total_s(runs, costs)
    least, most = 0, 1 + max((run.distance + run.end - run.start for run in runs), default=0)
    while most - least > 1:
        middle = (least + most) // 2
        if lru_s(runs, costs, middle) >= aim:
            most = middle
        else:
            least = middle
    return most


def bound_s(
    runs: Sequence[Run],
    costs: RecomputeCosts,
    num_blocks: int,
    num_requests: int,
    num_prices: int = 100,
    num_rounds: int = 80,
) -> float:
    """No cache of this size saves more seconds, whatever it knows. More prices and rounds: nearer to the least one."""
    edges = [num_requests * place // num_prices for place in range(num_prices + 1)]
    spans = [end - start for start, end in pairwise(edges)]
    places = [(_spot(edges, run.last), _spot(edges, run.now)) for run in runs]

    def ask(prices: Sequence[float]) -> tuple[float, list[float]]:
        """The bound at these prices, and the room that is asked for in each span, in blocks times requests."""
        sums = [0.0, *accumulate(price * span for price, span in zip(prices, spans, strict=True))]
        value = num_blocks * sums[-1]
        change = [0.0] * (num_prices + 2)
        partly = [0.0] * (num_prices + 1)
        for run, ((i, from_share), (j, to_share)) in zip(runs, places, strict=True):
            start_price = sums[i] + (prices[i] * spans[i] * from_share if i < num_prices else 0.0)
            end_price = sums[j] + (prices[j] * spans[j] * to_share if j < num_prices else 0.0)
            price = end_price - start_price
            start = run.start
            if price > costs.first_s + costs.more_s * start:
                if not costs.more_s:
                    continue
                start = max(start, ceil((price - costs.first_s) / costs.more_s))
                if start >= run.end:
                    continue
            num = run.end - start
            value += costs.sum_s(start, run.end) - num * price
            change[i] += num
            change[j] -= num
            partly[i] -= num * from_share
            partly[j] += num * to_share
        room = [(num + part) * span for num, part, span in zip(accumulate(change), partly, spans, strict=False)]
        return value, room

    low, high = 1e-12, costs.first_s + costs.more_s * max((run.end for run in runs), default=0)
    for _ in range(40):  # one price for all times
        one, other = low * (high / low) ** 0.382, low * (high / low) ** 0.618
        if ask([one] * num_prices)[0] < ask([other] * num_prices)[0]:
            high = other
        else:
            low = one
    usual = (low * high) ** 0.5
    prices, best = [usual] * num_prices, total_s(runs, costs)
    for nth in range(num_rounds):
        value, room = ask(prices)
        best = min(best, value)
        step = 0.5 / (1 + nth / 10) ** 0.5
        for place, (asked, span) in enumerate(zip(room, spans, strict=True)):
            if span:
                beyond = max(-2.0, min(2.0, asked / (num_blocks * span) - 1.0))
                prices[place] = max(usual * 1e-6, prices[place] * exp(step * beyond))
    return best


def _spot(edges: Sequence[int], place: int) -> tuple[int, float]:
    """The span that a request is in, and how far."""
    span = bisect_right(edges, place) - 1
    if span >= len(edges) - 1:
        return len(edges) - 1, 0.0
    return span, (place - edges[span]) / (edges[span + 1] - edges[span])
