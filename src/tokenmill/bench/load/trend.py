"""Whether a queue grew during a run: a trend over blocks, because neighbours are not independent.

Latencies of requests that follow one another rise and fall together, so a test that takes each for a witness of its own
finds growth where there is none. A run is cut into NUM_BLOCKS blocks in the order in which requests were due; the first
NUM_WARMUP_BLOCKS, in which a queue that began empty fills, are left out (the method of batch means: Law, Simulation
Modeling and Analysis). Growth is a trend of the blocks' mean latencies by Mann and Kendall's test (Mann 1945), steeper
than DRIFT_SHARE by Theil and Sen's slope (Sen 1968): answers then fall behind by that share of the time that passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, fmean, median
from typing import TypeVar

NUM_BLOCKS = 10
NUM_WARMUP_BLOCKS = 2
DRIFT_SHARE = 0.03
DRIFT_CONFIDENCE = 0.99
"""Of Mann and Kendall's test. With the slope asked for besides, fewer than 2 of 100 runs at up to 0.9 of a queue's
capacity are said to drift (tests/unit/test_bench_virtual.py)."""

MIN_PER_BLOCK = 2

T = TypeVar("T")


def steady_blocks(ordered: Sequence[T]) -> list[Sequence[T]]:
    """The blocks after the first ones; of few values as many blocks as there are values. None is empty."""
    num = min(NUM_BLOCKS, len(ordered))
    cut = [ordered[i * len(ordered) // num : (i + 1) * len(ordered) // num] for i in range(num)]
    return cut[NUM_WARMUP_BLOCKS:] or cut[-1:]


@dataclass(frozen=True, slots=True)
class Drift:
    """slope: seconds by which latency grows in a second; None where there is too little to tell. z: of the trend."""

    slope: float | None
    z: float

    @property
    def has_grown(self) -> bool:
        limit = NormalDist().inv_cdf(DRIFT_CONFIDENCE)
        return self.slope is not None and self.slope > DRIFT_SHARE and self.z > limit


def drift(points: Sequence[tuple[float, float]]) -> Drift:
    """Of (due, latency) in the order of due, seconds."""
    if len(points) < NUM_BLOCKS * MIN_PER_BLOCK:
        return Drift(None, 0.0)
    cut = steady_blocks(points)
    at = [fmean(due for due, _ in block) for block in cut]
    level = [fmean(latency for _, latency in block) for block in cut]
    pairs = list(combinations(range(len(cut)), 2))
    slopes = [(level[j] - level[i]) / (at[j] - at[i]) for i, j in pairs if at[j] > at[i]]
    if not slopes:
        # All due at once: there is no time in which a queue could grow.
        return Drift(None, 0.0)
    return Drift(median(slopes), kendall_z(level))


def kendall_z(values: Sequence[float]) -> float:
    """Standard normal, with continuity correction, under no trend; positive where values rise."""
    num = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    spread = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return (score - math.copysign(1, score)) / spread if score else 0.0
