"""A new version of a model beside the one that serves: who gets it, and when it is taken back.

A name has versions with weights. Calls of one session get one version: a hash of name, seed and session is a point of
[0, 1), and the versions lie there one behind the other, so that a change of weights moves as few sessions as it can.

Whether the canary is worse is judged by a sequential test for each of four signs: errors, targets missed, TTFT, TPOT.
Each call gives 0 or 1 for a sign (a time gives 1 if it is above the stable version's median so far, times the
tolerance for the canary), and calls come in blocks: one of the canary with those of the stable version since its last.
The product, over blocks, of

    p(block | chance of each version as estimated from earlier blocks) / p(block | one chance for both)

is, while the canary is not worse, at least `1/alpha` with a probability of at most alpha, however often one looks
(Turner, Ly & Gruenwald, "Generic E-variables for exact sequential k-sample tests", 2024: with `one chance` the mean of
both weighted by the block's sizes, each factor has expectation at most 1). Estimates by which the canary is not worse
count as equal. After a window of canary calls the product begins again at 1, so that a canary that turns bad late is
found as soon as one that was bad at once.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SIGNS = ("errors", "targets", "ttft", "tpot")


class Version(NamedTuple):
    """model: that answers. weight: its share of sessions, of the sum of all weights."""

    model: str
    weight: float


class Sample(NamedTuple):
    """What came of a call. None: it tells nothing of that."""

    is_error: bool
    meets_targets: bool | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """alpha         probability that a canary that is as good is taken back, at most, in one window
    window           calls of the canary in one
    min_samples      of its calls in the window before it may be taken back
    tolerance        by which share its times may be longer
    max_stable       calls of the stable version in one block
    """

    alpha: float = 0.01
    window: int = 500
    min_samples: int = 5
    tolerance: float = 0.1
    max_stable: int = 20

    def __post_init__(self) -> None:
        assert 0 < self.alpha < 1 and self.window >= self.min_samples >= 1, self
        assert self.tolerance >= 0 and self.max_stable >= 1, self


def choose(name: str, versions: Sequence[Version], session: str, seed: int = 0) -> str:
    """The model of the version that calls of this session get. At least one weight is above 0."""
    total = sum(version.weight for version in versions)
    assert total > 0, "a version must have a weight"
    digest = hashlib.sha256(f"{seed}\x00{name}\x00{session}".encode("utf8", "surrogatepass")).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64 * total
    for version in versions:
        point -= version.weight
        if point < 0:
            return version.model
    return next(version.model for version in reversed(versions) if version.weight > 0)


@dataclass(slots=True)
class _Counts:
    """Calls of one version, and how many of them had the sign. Half a call of each kind is counted before the first."""

    num: int = 0
    num_bad: int = 0

    @property
    def chance(self) -> float:
        return (self.num_bad + 0.5) / (self.num + 1)

    def add(self, num: int, num_bad: int) -> None:
        self.num += num
        self.num_bad += num_bad


class SignTest:
    """The test of one sign. `evidence`: the product of the window."""

    def __init__(self, max_stable: int) -> None:
        self.stable = _Counts()
        self.canary = _Counts()
        self.evidence = 1.0
        self._since: deque[bool] = deque(maxlen=max_stable)

    def restart(self) -> None:
        """A new window: what is known of both versions stays."""
        self.evidence = 1.0

    def note_stable(self, is_bad: bool) -> None:
        self._since.append(is_bad)

    def note_canary(self, is_bad: bool) -> None:
        """Ends a block, if the stable version has had a call since the last."""
        if not self._since:
            return
        num, num_bad = len(self._since), sum(self._since)
        self._since.clear()
        p_stable, p_canary = self.stable.chance, self.canary.chance
        if p_canary > p_stable:
            both = (num * p_stable + p_canary) / (num + 1)
            self.evidence *= _likelihood(p_stable, num, num_bad) * _likelihood(p_canary, 1, int(is_bad))
            self.evidence /= _likelihood(both, num + 1, num_bad + int(is_bad))
            self.evidence = min(max(self.evidence, 1e-100), 1e100)
        self.stable.add(num, num_bad)
        self.canary.add(1, int(is_bad))


def _likelihood(chance: float, num: int, num_bad: int) -> float:
    return float(chance**num_bad * (1 - chance) ** (num - num_bad))


class _Times:
    """Times of the stable version: their median over the last calls."""

    def __init__(self, most: int) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []
        self._most = most

    def add(self, value: float) -> None:
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self._most:
            self._sorted.remove(self._order.popleft())

    @property
    def median(self) -> float | None:
        return self._sorted[len(self._sorted) // 2] if self._sorted else None


class Verdict(NamedTuple):
    """Why a canary is taken back. stable, canary: share of calls with the sign; evidence: against both being alike."""

    sign: str
    stable: float
    canary: float
    evidence: float
    num_canary: int


@dataclass(slots=True)
class CanaryJudge:
    """What is known of one canary against the stable version."""

    rules: Rules
    num_stable: int = 0
    num_canary: int = 0
    num_window: int = 0
    tests: dict[str, SignTest] = field(default_factory=dict)
    times: dict[str, _Times] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tests = {sign: SignTest(self.rules.max_stable) for sign in SIGNS}
        self.times = {sign: _Times(self.rules.window) for sign in ("ttft", "tpot")}

    def note(self, sample: Sample, *, is_canary: bool) -> Verdict | None:
        """What came of a call; the verdict where the canary is to be taken back now."""
        if not is_canary:
            self.num_stable += 1
            for sign, is_bad in self._signs(sample, 1.0):
                self.tests[sign].note_stable(is_bad)
            for sign, value in _times(sample):
                self.times[sign].add(value)
            return None
        if self.num_window == self.rules.window:
            self.num_window = 0
            for test in self.tests.values():
                test.restart()
        self.num_canary += 1
        self.num_window += 1
        for sign, is_bad in self._signs(sample, 1 + self.rules.tolerance):
            self.tests[sign].note_canary(is_bad)
        return self._verdict()

    def _signs(self, sample: Sample, allowed: float) -> list[tuple[str, bool]]:
        """By the median as it was before the call: the test needs a border that does not know the outcome."""
        found = [("errors", sample.is_error)]
        if sample.meets_targets is not None:
            found.append(("targets", not sample.meets_targets))
        for sign, value in _times(sample):
            median = self.times[sign].median
            if median is not None:
                found.append((sign, value > median * allowed))
        return found

    def _verdict(self) -> Verdict | None:
        if self.num_window < self.rules.min_samples:
            return None
        sign = max(SIGNS, key=lambda each: self.tests[each].evidence)
        test = self.tests[sign]
        if test.evidence < len(SIGNS) / self.rules.alpha:
            return None
        stable, canary = test.stable, test.canary
        return Verdict(sign, _share(stable), _share(canary), test.evidence, self.num_canary)


def _share(counts: _Counts) -> float:
    return counts.num_bad / counts.num if counts.num else 0.0


def _times(sample: Sample) -> list[tuple[str, float]]:
    found = (("ttft", sample.ttft_s), ("tpot", sample.tpot_s))
    return [(sign, value) for sign, value in found if value is not None and not sample.is_error]
