"""Fetch or recompute: how much of a stored prefix is worth bringing in, by what each takes. Pure.

    gain(end) = seconds of computing the tokens up to `end`  -  seconds of loading their blocks

for every end that pools and tiers can serve together; the end with the largest gain is taken, and none where no gain is
above 0. So a run is cut where its next piece does not pay, whichever tier that lies in. What others of the engine are
to compute first would be waited for in any case: a load behind it costs nothing until that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ....core.cost import Costs
from ....core.tiers import TIERS, USUAL_FACTS, TierFacts

_LEARNT, _LEARNT_WORSE = 0.3, 0.7
"""Of an error, after each load: of one that was faster than expected, and of one that was slower, which somebody waited
for."""
_MOST = 16.0
"""An error counts as at most so many times what was expected, and at least as the inverse."""
_RELAXED = 0.997
"""Whenever a block was not worth its load, its tier's times become this share of what they were."""
NUM_KNOWN = 3
"""A tier is known after so many loads."""
_SUDDEN, PROBE_S = 4.0, 5.0
"""Loads from a tier that was known which take so many times what is expected say little of those to come: what was
expected before them counts again so long after the last."""
_LEAST_LATENCY_S, _LEAST_BYTE_S = 1e-5, 1e-12
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


class Rates:
    """What loading from each tier takes, learnt from the loads that were made.

        a load of some bytes takes   what is under way in front of it  +  latency  +  bytes * byte_s

    A tier starts with what its facts say. A load that took longer or shorter than expected changes both numbers by the
    same share of the error, each by its part in what was expected: small loads teach the latency and large ones the
    rate. Loads from one tier count as made one after the other, whatever the store makes of them: what is learnt is
    what they give together. A tier that was slow is tried again in the end (`relax`), and one that became slow
    suddenly within seconds: a store that hung is as it was before once it goes on.

    Tiers are named by their digits (core.tiers.TIERS)."""

    def __init__(self, tiers: tuple[TierFacts, ...]) -> None:
        self._rates: dict[int, _Rate] = {}
        self._loads: dict[int, _Load] = {}
        for digit, name in enumerate(TIERS, 1):
            facts = next((each for each in tiers if each.name == name), TierFacts(name))
            usual = USUAL_FACTS[name]
            self._rates[digit] = _Rate(facts.latency_s or usual.latency_s, 1 / (facts.bytes_s or usual.bytes_s))

    def latency_s(self, digit: int) -> float:
        """Until the first byte of a further load: with what is under way before it."""
        rate = self._rates[digit]
        return rate.latency_s + rate.ahead_s

    def byte_s(self, digit: int) -> float:
        return self._rates[digit].byte_s

    def is_learnt(self, digit: int) -> bool:
        """Whether some loads have told what the tier gives."""
        return self._rates[digit].num_learnt >= NUM_KNOWN

    def relax(self, digits: Iterable[int], now: float) -> None:
        """Blocks of these tiers are computed although they are stored. What is expected of a tier becomes a little
        better each time, so that one that was slow once is tried again after hundreds of them."""
        for digit in {*digits} & self._rates.keys():
            rate = self._rates[digit]
            if rate.before is not None and now - rate.over_s >= PROBE_S:
                rate.latency_s, rate.byte_s = rate.before
                rate.before, rate.num_learnt, rate.num_usual = None, 0, 0
            rate.latency_s = max(_LEAST_LATENCY_S, rate.latency_s * _RELAXED)
            rate.byte_s = max(_LEAST_BYTE_S, rate.byte_s * _RELAXED)

    def begin(self, number: int, digit: int, num_bytes: int, now: float) -> float:
        """A load starts; when it is expected to have ended, in seconds from now."""
        rate = self._rates[digit]
        load = self._loads[number] = _Load(digit, num_bytes, rate.load_s(num_bytes), now)
        rate.ahead_s += load.expected_s
        return rate.ahead_s

    def end(self, number: int, num_bytes: int, now: float) -> None:
        """It has ended, with so many bytes of those that were wanted."""
        load = self._loads.pop(number, None)
        if load is None:
            return
        rate = self._rates[load.digit]
        rate.ahead_s = max(0.0, rate.ahead_s - load.expected_s) if self._loads else 0.0
        took_s, rate.over_s = now - max(load.begun_s, rate.over_s), now
        expected_s = rate.load_s(load.num_bytes)
        if took_s <= 0 or (num_bytes < load.num_bytes and took_s <= expected_s):
            return  # what is not there is missed quickly: that says nothing
        rate.num_learnt += 1
        off = min(_MOST, max(1 / _MOST, took_s / expected_s))
        latency_s, byte_s = rate.before or (rate.latency_s, rate.byte_s)
        if took_s < _SUDDEN * (latency_s + load.num_bytes * byte_s):
            rate.before = None
            rate.num_usual += 1
        elif rate.num_usual >= NUM_KNOWN:
            rate.before = latency_s, byte_s
        else:
            rate.num_usual = 0
        latency_share = rate.latency_s / expected_s
        learnt = _LEARNT if off < 1 else _LEARNT_WORSE
        rate.latency_s = max(_LEAST_LATENCY_S, rate.latency_s * off ** (learnt * min(1, 2 * latency_share)))
        rate.byte_s = max(_LEAST_BYTE_S, rate.byte_s * off ** (learnt * min(1, 2 - 2 * latency_share)))


@dataclass(slots=True)
class _Rate:
    """over_s: when the last ended load was over; ahead_s: expected time of the loads under way; num_learnt: loads that
    were learnt from; num_usual: loads as expected, counted anew where one suddenly is slow before there are NUM_KNOWN.
    before: latency and rate before loads suddenly became slow; None: the last one was not slow, compared with these."""

    latency_s: float
    byte_s: float
    over_s: float = 0.0
    ahead_s: float = 0.0
    num_learnt: int = 0
    num_usual: int = 0
    before: tuple[float, float] | None = None

    def load_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.byte_s


@dataclass(frozen=True, slots=True)
class _Load:
    digit: int
    num_bytes: int
    expected_s: float
    begun_s: float
