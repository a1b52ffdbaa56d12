"""Max-min fair rates of flows that share links, by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).

The rates of all flows rise together; where a link is full its flows stay as they are, and the others rise on. Flows
that take the same links have the same rate, so they count as one bundle, and the cost does not depend on how many flows
there are: each bundle is touched once for each of its links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Bundle(NamedTuple):
    """Flows over the same links. most_bytes_s: what one of them gets at most."""

    links: Sequence[int]
    num_flows: int
    most_bytes_s: float


def fair_rates(capacities: Mapping[int, float], bundles: Sequence[Bundle]) -> list[float]:
    """Bytes a second for each flow of each bundle. capacities: of links, in bytes a second; links that are not there
    bind nobody."""
    users: dict[int, list[int]] = {}
    num_rising: dict[int, int] = {}
    for place, bundle in enumerate(bundles):
        for link in bundle.links:
            if link in capacities:
                users.setdefault(link, []).append(place)
                num_rising[link] = num_rising.get(link, 0) + bundle.num_flows
    left = {link: capacities[link] for link in users}
    # What a link leaves to each of its flows never falls while others are fixed, so that old entries come too early.
    levels = [(left[link] / num_rising[link], link) for link in users]
    heapify(levels)
    by_most = sorted(range(len(bundles)), key=lambda place: bundles[place].most_bytes_s, reverse=True)
    rates: list[float | None] = [None] * len(bundles)

    def fix(place: int, rate: float) -> None:
        rates[place] = rate
        bundle = bundles[place]
        for link in bundle.links:
            if link in left:
                num_rising[link] -= bundle.num_flows
                left[link] = max(0.0, left[link] - rate * bundle.num_flows)

    while levels:
        level, link = heappop(levels)
        num_flows = num_rising[link]
        if not num_flows:
            continue
        if left[link] / num_flows > level:
            heappush(levels, (left[link] / num_flows, link))
            continue
        while by_most and (rates[by_most[-1]] is not None or bundles[by_most[-1]].most_bytes_s <= level):
            place = by_most.pop()
            if rates[place] is None:
                fix(place, bundles[place].most_bytes_s)
        if not num_rising[link]:
            continue
        if num_rising[link] != num_flows or left[link] / num_rising[link] > level:
            heappush(levels, (left[link] / num_rising[link], link))
            continue
        for place in users[link]:
            if rates[place] is None:
                fix(place, level)
    return [bundles[place].most_bytes_s if rate is None else rate for place, rate in enumerate(rates)]
