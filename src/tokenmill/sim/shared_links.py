"""Bulk transfers over links that they share: at any time each flow has its max-min fair rate.

Rates change where a flow begins or ends, or a link changes. Ends are exact: a flow's bytes at the rates that it had,
then the latency of its way, once. What changes at one instant is settled together, at its end.

Fair rates are found by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): the rates of all flows rise
together; where a link is full its flows stay as they are, and the others rise on. Flows over the same links have the
same rate and count as one bundle, so the cost does not depend on how many flows there are. Only what can bind is looked
at: a bundle never gets more than its narrowest link, and a link couples bundles only if what they could get together is
more than it has. So a transfer that meets no other costs a few operations, and one that does costs what is coupled with
it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .loop import VirtualLoop
from .topology import Wiring


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


_SAME_S = 2e-9
"""Ends closer than this are the same: the loop's timers are no finer."""


class _Flow:
    """One transfer in its bundle. until_bytes: what each flow of the bundle has had, counted from its beginning, where
    this one ends."""

    __slots__ = ("done", "is_over", "until_bytes")

    def __init__(self, until_bytes: float, done: asyncio.Future[None]) -> None:
        self.until_bytes = until_bytes
        self.done = done
        self.is_over = False


class _Shared:
    """A bundle: its flows by their ends, and how many bytes each has had since it is kept. narrow_bytes_s: of the
    narrowest of its links."""

    def __init__(self, links: tuple[int, ...], narrow_bytes_s: float) -> None:
        self.links = links
        self.num_flows = 0
        self.served_bytes = 0.0
        self.rate_bytes_s = 0.0
        self.narrow_bytes_s = narrow_bytes_s
        self.last_s = 0.0
        self.ends: list[tuple[float, int, _Flow]] = []
        self.timer: asyncio.TimerHandle | None = None


class LinkUse(NamedTuple):
    """carried_bytes: so far. num_flows: now."""

    name: str
    bytes_s: float
    carried_bytes: float
    num_flows: int


class SharedLinks:
    """Links as `wiring` has them. It stands where a `network.Network` carries bulk transfers."""

    def __init__(self, loop: VirtualLoop, wiring: Wiring) -> None:
        self.num_carried = 0
        self.carried_bytes = 0
        self._loop = loop
        self._wiring = wiring
        self._bytes_s = list(wiring.bytes_s)
        self._carried = [0.0] * len(wiring.bytes_s)
        self._bundles: dict[tuple[int, ...], _Shared] = {}
        self._on_link: list[dict[tuple[int, ...], _Shared]] = [{} for _ in wiring.bytes_s]
        self._could = [0.0] * len(wiring.bytes_s)
        self._changed: dict[tuple[int, ...], _Shared] = {}
        self._is_settling = False
        self._num_begun = 0

    # ---- transfers ----

    async def carry(self, source: str, destination: str, num_bytes: int) -> None:
        """Returns when a bulk transfer has arrived. Raises KeyError for an address that the topology has not."""
        flows = [
            (route.links, self._begin(route.links, num_bytes * route.share))
            for route in self._wiring.routes(source, destination)
            if route.links and num_bytes > 0
        ]
        try:
            for _, flow in flows:
                await flow.done
        finally:
            for links, flow in flows:
                self._forget(links, flow)
        latency_s = self._wiring.latency_s(source, destination)
        if latency_s:
            await asyncio.sleep(latency_s)
        self.num_carried += 1
        self.carried_bytes += num_bytes

    # ---- links ----

    def set_share(self, link: str, share: float) -> None:
        """A link has this share of its bandwidth from now on; 0: nothing gets through. Raises KeyError where there is
        no such link."""
        place = self._wiring.places[link]
        for bundle in self._on_link[place].values():
            self._touch(bundle)
        self._spread(self._on_link[place].values())
        self._bytes_s[place] = self._wiring.bytes_s[place] * share
        for bundle in self._on_link[place].values():
            self._widen(bundle)

    def use(self) -> list[LinkUse]:
        """Of each link, in the order of the topology."""
        for bundle in self._bundles.values():
            self._advance(bundle)
        return [
            LinkUse(
                name, self._wiring.bytes_s[i], self._carried[i], sum(b.num_flows for b in self._on_link[i].values())
            )
            for name, i in self._wiring.places.items()
        ]

    # ---- flows ----

    def _begin(self, links: tuple[int, ...], num_bytes: float) -> _Flow:
        bundle = self._bundles.get(links)
        if bundle is None:
            bundle = self._bundles[links] = _Shared(links, min(self._bytes_s[link] for link in links))
            bundle.last_s = self._loop.time()
            for link in links:
                self._on_link[link][links] = bundle
                self._could[link] += bundle.narrow_bytes_s
        self._advance(bundle)
        if not bundle.num_flows:
            bundle.served_bytes = 0.0  # small numbers are exact for longer
        flow = _Flow(bundle.served_bytes + num_bytes, self._loop.create_future())
        heappush(bundle.ends, (flow.until_bytes, self._num_begun, flow))
        self._num_begun += 1
        bundle.num_flows += 1
        self._touch(bundle)
        return flow

    def _forget(self, links: tuple[int, ...], flow: _Flow) -> None:
        """A transfer that was given up goes no further."""
        if not flow.is_over:
            flow.is_over = True
            bundle = self._bundles[links]
            self._advance(bundle)
            bundle.num_flows -= 1
            self._touch(bundle)

    def _advance(self, bundle: _Shared) -> None:
        now = self._loop.time()
        if bundle.rate_bytes_s and now > bundle.last_s:
            had = bundle.rate_bytes_s * (now - bundle.last_s)
            bundle.served_bytes += had
            for link in bundle.links:
                self._carried[link] += had * bundle.num_flows
        bundle.last_s = now

    def _on_end(self, bundle: _Shared) -> None:
        bundle.timer = None
        self._advance(bundle)
        near = bundle.served_bytes + bundle.rate_bytes_s * _SAME_S
        ends = bundle.ends
        while ends and (ends[0][2].is_over or ends[0][0] <= near):
            flow = heappop(ends)[2]
            if not flow.is_over:
                flow.is_over = True
                bundle.num_flows -= 1
                if not flow.done.done():
                    flow.done.set_result(None)
        self._touch(bundle)

    # ---- rates ----

    def _touch(self, bundle: _Shared) -> None:
        self._changed[bundle.links] = bundle
        if not self._is_settling:
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        """New rates for the bundles that changed, and all that are coupled with them."""
        self._is_settling = False
        self._spread(self._changed.values())
        changed, self._changed = self._changed, {}
        for bundle in list(changed.values()):
            if not bundle.num_flows:
                self._drop(bundle)
                del changed[bundle.links]
        bundles = list(changed.values())
        capacities = {link: self._bytes_s[link] for bundle in bundles for link in bundle.links if self._can_bind(link)}
        asked = [Bundle(each.links, each.num_flows, each.narrow_bytes_s / each.num_flows) for each in bundles]
        for bundle, rate in zip(bundles, fair_rates(capacities, asked), strict=True):
            self._advance(bundle)
            bundle.rate_bytes_s = rate
            self._set_timer(bundle)

    def _spread(self, first: Iterable[_Shared]) -> None:
        """Take what is coupled with the changed bundles among them."""
        stack = list(first)
        seen: set[int] = set()
        while stack:
            for link in stack.pop().links:
                if link not in seen and self._can_bind(link):
                    seen.add(link)
                    for links, other in self._on_link[link].items():
                        if links not in self._changed:
                            self._changed[links] = other
                            stack.append(other)

    def _can_bind(self, link: int) -> bool:
        return self._could[link] > self._bytes_s[link] * (1 + 1e-12)

    def _widen(self, bundle: _Shared) -> None:
        """A link of it has changed."""
        before = bundle.narrow_bytes_s
        bundle.narrow_bytes_s = min(self._bytes_s[link] for link in bundle.links)
        for link in bundle.links:
            self._could[link] += bundle.narrow_bytes_s - before

    def _drop(self, bundle: _Shared) -> None:
        if bundle.timer is not None:
            bundle.timer.cancel()
        del self._bundles[bundle.links]
        for link in bundle.links:
            users = self._on_link[link]
            del users[bundle.links]
            self._could[link] -= bundle.narrow_bytes_s
            if not users:
                self._could[link] = 0.0

    def _set_timer(self, bundle: _Shared) -> None:
        ends = bundle.ends
        while ends[0][2].is_over:
            heappop(ends)
        left = max(0.0, ends[0][0] - bundle.served_bytes)
        due_s = bundle.last_s + left / bundle.rate_bytes_s if bundle.rate_bytes_s else math.inf
        if bundle.timer is not None:
            if bundle.timer.when() == due_s:
                return
            bundle.timer.cancel()
            bundle.timer = None
        if due_s < math.inf:
            bundle.timer = self._loop.call_at(due_s, self._on_end, bundle)
