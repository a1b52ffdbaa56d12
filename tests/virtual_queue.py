"""Queues whose capacity is known, on a virtual clock: what a search or a comparison says can be held against the truth.

Requests are served in order of arrival by one or several servers, with equal or exponential service times (M/D/1,
M/M/c). The capacity for an objective on the time in the queue is known: Erlang's formulas of 1909 (M/D/1) and 1917.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from tokenmill.bench.load import goodput
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.result import Probe, Run
from tokenmill.sim.loop import VirtualLoop


@dataclass(frozen=True)
class Queue:
    """limit_s: the objective, on the time until service begins. is_even: every service takes service_s; one server."""

    num_servers: int
    service_s: float
    is_even: bool
    limit_s: float

    @property
    def most(self) -> float:
        """Requests a second that it can serve at all."""
        return self.num_servers / self.service_s

    def waits(self, rng: random.Random, arrivals: list[float]) -> list[float]:
        free = [0.0] * self.num_servers
        waits = []
        for at in arrivals:
            start = max(at, free[0])
            length = self.service_s if self.is_even else rng.expovariate(1.0 / self.service_s)
            heapreplace(free, start + length)
            waits.append(start - at)
        return waits

    def kept(self, rate: float) -> float:
        """Share of requests that keep the limit in the long run."""
        if self.is_even:
            assert self.num_servers == 1
            terms = [self.limit_s - i * self.service_s for i in range(int(self.limit_s / self.service_s + 1e-9) + 1)]
            total = sum(math.exp(rate * t) * (-rate * t) ** i / math.factorial(i) for i, t in enumerate(terms))
            return (1 - rate * self.service_s) * total
        load, num = rate * self.service_s, self.num_servers
        if load >= num:
            return 0.0
        all_busy = load**num / math.factorial(num) / (1 - load / num)
        waiting = all_busy / (sum(load**k / math.factorial(k) for k in range(num)) + all_busy)
        return 1 - waiting * math.exp(-(self.most - rate) * self.limit_s)

    def capacity(self, target: float) -> float:
        """The highest rate at which target of all requests keep the limit."""
        low, high = 0.0, self.most
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.kept(middle) >= target else (low, middle)
        return low


def search(queue: Queue, limits: goodput.Search, probe_s: float, seed: int, blank: Run) -> list[Probe]:
    """A whole search against the queue, on the virtual loop. `blank` stands for the runs, whose figures go unused."""
    loop = VirtualLoop(limit_s=1e9)
    num_probes = 0

    async def attempt(rate: float) -> Probe:
        nonlocal num_probes
        num_probes += 1
        rng = random.Random(f"{seed}/{num_probes}")
        num = max(50, round(probe_s * rate))
        arrivals = Schedule(request_rate=rate).arrival_times(num, seed * 1000 + num_probes)
        waits = queue.waits(rng, arrivals)
        start_s = loop.time()
        await sleep(loop, arrivals[-1] + waits[-1] + queue.service_s)
        assert loop.time() > start_s
        points = [(at, wait + queue.service_s) for at, wait in zip(arrivals, waits, strict=True)]
        met = [wait <= queue.limit_s for wait in waits]
        return goodput.probe_of(rate, met, points, limits.target_attainment, blank)

    return loop.run(goodput.search(attempt, limits))


async def sleep(loop: VirtualLoop, seconds: float) -> None:
    woken: Any = loop.create_future()
    loop.call_later(seconds, woken.set_result, None)
    await woken
