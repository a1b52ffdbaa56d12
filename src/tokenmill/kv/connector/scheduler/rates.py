"""What loading from each tier takes, learnt from the loads that were made.

    a load of some bytes takes   what is under way in front of it  +  latency  +  bytes * byte_s

A tier starts with what its facts say. A load that took longer or shorter than expected changes both numbers by the same
share of the error, each by its part in what was expected, so that small loads teach the latency and large ones the
rate. Loads from one tier count as made one after the other, whatever the store makes of them: what is learnt is what
they give together. A tier that was slow is tried again in the end (`relax`), and one that was slow of a sudden within
seconds: a store that hung is as it was before once it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....core.tiers import TIERS, USUAL_FACTS, TierFacts

_LEARNT, _LEARNT_WORSE = 0.3, 0.7
"""Of an error, after each load: of one that was faster than expected, and of one that was slower, which somebody waited
for."""

_MOST = 16.0
"""An error counts as at most so many times what was expected, and at least as the inverse."""

_RELAXED = 0.997
"""What is left of a tier's times whenever a block there was not worth its load."""

NUM_KNOWN = 3
"""A tier is known after so many loads."""

_SUDDEN, PROBE_S = 4.0, 5.0
"""Loads from a tier that was known which take so many times what is expected say little of those to come: what was
expected before them counts again so long after the last."""

_LEAST_LATENCY_S, _LEAST_BYTE_S = 1e-5, 1e-12


@dataclass(slots=True)
class _Rate:
    """over_s: when the last load that has ended was over; ahead_s: what those under way are expected to take;
    num_learnt: loads that said something; num_usual: those as expected, since one was slow of a sudden before NUM_KNOWN
    of them. before: latency and rate as they were before loads were slow of a sudden; None: the last was not, compared
    with these."""

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


class Rates:
    """Tiers are named by their digits (core.tiers.TIERS)."""

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
