"""Fetch or recompute: how much of a stored prefix is worth bringing in, by what each takes. Pure.

    gain(end) = seconds of computing the tokens up to `end`  -  seconds of loading their blocks

for every end that pools and tiers can serve together; the end with the largest gain is taken, and none where no gain is
above 0. So a run is cut where its next piece does not pay, whichever tier that lies in. What others of the engine are
to compute first would be waited for in any case: a load behind it costs nothing until that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from ....core.cost import Costs

CLEARLY = 0.9
"""Computing a part while another loads is to take less than this share of the better of both alone."""


class Place(NamedTuple):
    """Of one KV group: for each block of a prefix, the digit of the tier that it is to be fetched from, 0: it is in the
    pool, -1: it is nowhere. first: of each end, the first block that it sees, or None: all."""

    digits: Sequence[int]
    num_bytes: int
    first: Sequence[int] | None = None


class Computing(NamedTuple):
    """What computing takes: the prompt's tokens from `start` to `stop`, `chunk` of them a step, where a step takes
    `step_s` beside them; `ahead_s`: what is computed first."""

    costs: Costs
    start: int
    stop: int
    chunk: int
    step_s: float
    ahead_s: float = 0.0

    def saved_s(self, end: int) -> float:
        """Seconds that need not be computed if it begins at `end`."""
        costs, start = self.costs, self.start
        num_tokens = end - start
        num_positions = num_tokens * start + num_tokens * (num_tokens - 1) // 2
        num_steps = -(-(self.stop - start) // self.chunk) - -(-(self.stop - end) // self.chunk)
        return costs.token_s * num_tokens + costs.position_s * num_positions + self.step_s * num_steps


class Speed(NamedTuple):
    """Of each tier, by its digit: seconds until the first byte, and for each one."""

    latency_s: Sequence[float]
    byte_s: Sequence[float]


class Run(NamedTuple):
    """end: of the blocks worth having; load_s, saved_s: what they take, and would have taken to compute."""

    end: int
    load_s: float = 0.0
    saved_s: float = 0.0


def ends(places: Sequence[Place], start: int) -> list[int]:
    """Ends beyond block `start` that can be served, in order."""
    found: list[int] = []
    holes = [-1] * len(places)  # the last block of each group that is nowhere
    for end in range(start + 1, len(places[0].digits) + 1):
        fits = True
        for group, place in enumerate(places):
            if place.digits[end - 1] < 0:
                holes[group] = end - 1
            if holes[group] >= (0 if place.first is None else place.first[end]):
                fits = False
                if place.first is None:
                    return found
        if fits:
            found.append(end)
    return found


def best_run(places: Sequence[Place], start: int, block_size: int, computing: Computing, speed: Speed) -> Run:
    """The run worth fetching after the blocks that are matched, `start` of them; Run(start): none."""
    totals = [_sums(place) for place in places]
    best, best_gain = Run(start), 0.0
    for end in ends(places, start):
        load_s = 0.0
        for digit in range(1, len(speed.byte_s)):
            num_bytes = sum(
                sums[digit][end] - sums[digit][0 if place.first is None else place.first[end]]
                for sums, place in zip(totals, places, strict=True)
                if digit in sums
            )
            if num_bytes:
                load_s += speed.latency_s[digit] + num_bytes * speed.byte_s[digit]
        saved_s = computing.saved_s(end * block_size)
        gain = saved_s - max(0.0, load_s - computing.ahead_s)
        if gain >= best_gain:
            best, best_gain = Run(end, load_s, saved_s), gain
    return best


def meeting(place: Place, run: Run, end: int, block_size: int, computing: Computing, speed: Speed) -> int:
    """The first block of those to load, up to `end`, while all before it are computed: where computing and loading end
    at the same time. 0 where that is not clearly better than `run`, the best without it. Of one KV group, all of whose
    blocks from where computing starts up to `end` are to be loaded."""
    start = computing.start // block_size
    load_s = [0.0] * len(speed.byte_s)
    best, best_s = 0, inf
    for head in range(end - 1, start, -1):
        digit = place.digits[head]
        load_s[digit] = (load_s[digit] or speed.latency_s[digit]) + place.num_bytes * speed.byte_s[digit]
        head_s = computing._replace(stop=head * block_size).saved_s(head * block_size)
        both_s = max(head_s, sum(load_s))
        if both_s >= best_s:
            break
        best, best_s = head, both_s
    all_s = computing.saved_s(computing.stop)
    rest_s = all_s - computing.saved_s(end * block_size)
    return best if best_s + rest_s < CLEARLY * (all_s - run.saved_s + run.load_s) else 0


def _sums(place: Place) -> dict[int, list[int]]:
    """By digit, the bytes to fetch of the blocks before each."""
    sums = {digit: [0] for digit in {*place.digits} if digit > 0}
    for digit in place.digits:
        for each, so_far in sums.items():
            so_far.append(so_far[-1] + (place.num_bytes if digit == each else 0))
    return sums
