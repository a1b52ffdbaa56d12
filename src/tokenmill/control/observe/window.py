"""What happened in the last minute: how fast tokens came, and what requests waited for them; and how that was at each
second of the last five minutes.

Rates come from the engines' counters, of which one sample a second is kept; waits from requests as they get their first
token and as they end. Nothing is noted with a token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...core.events import EngineStats
from ...core.terms import Terms
from .requests import Record

WINDOW_S = 60.0
SAMPLE_S = 1.0
HISTORY_S = 300.0
_MOST = 2048
"""First tokens and ends that are kept: of a busier minute, the later part counts."""


class First(NamedTuple):
    at_s: float
    ttft_s: float
    terms: Terms


class End(NamedTuple):
    """tpot_s: None for a request of fewer than two tokens. is_attained: as Record has it."""

    at_s: float
    tpot_s: float | None
    queue_s: float | None
    is_attained: bool | None
    reason: str
    terms: Terms
    num_prompt: int
    num_cached: int
    num_output: int


class Sample(NamedTuple):
    """ttft_s, tpot_s: median and 90th percentile over WINDOW_S before; None where nothing was measured."""

    at_s: float
    stats: EngineStats
    ttft_s: tuple[float, float] | None
    tpot_s: tuple[float, float] | None


class Window:
    """next_sample_s: from when on a sample is wanted."""

    def __init__(self) -> None:
        self.next_sample_s = 0.0
        self._firsts: deque[First] = deque(maxlen=_MOST)
        self._ends: deque[End] = deque(maxlen=_MOST)
        self._samples: deque[Sample] = deque(maxlen=int(HISTORY_S / SAMPLE_S) + 2)

    def sample(self, now: float, stats: EngineStats) -> None:
        self.next_sample_s = now + SAMPLE_S
        ttfts = [each.ttft_s for each in self.firsts(now)]
        tpots = [each.tpot_s for each in self.ends(now) if each.tpot_s is not None]
        self._samples.append(Sample(now, stats, _middle(ttfts), _middle(tpots)))

    def first(self, now: float, ttft_s: float, terms: Terms) -> None:
        self._firsts.append(First(now, ttft_s, terms))

    def end(self, record: Record) -> None:
        queue_s = None if record.scheduled_s < 0 else record.scheduled_s - record.arrival_s
        self._ends.append(
            End(
                record.ended_s,
                record.tpot_s,
                queue_s,
                record.is_attained,
                record.reason,
                record.terms,
                record.num_prompt,
                record.num_cached,
                record.num_output,
            )
        )

    def firsts(self, now: float) -> list[First]:
        return _since(self._firsts, now - WINDOW_S)

    def ends(self, now: float) -> list[End]:
        return _since(self._ends, now - WINDOW_S)

    def rate(self, field: str, stats: EngineStats, now: float, over_s: float) -> float:
        """How fast a counter of the stats grew, a second."""
        samples, start_s = self._samples, now - over_s
        if not samples or samples[-1].at_s + SAMPLE_S <= start_s:
            return 0.0  # a step that ended later than that would have left another sample
        before = bisect_right(samples, start_s, key=lambda each: each.at_s) - 1
        first = samples[max(0, before)]
        grown: float = getattr(stats, field) - getattr(first.stats, field)
        return grown / max(over_s if before >= 0 else now - first.at_s, SAMPLE_S)

    def history(self, now: float, over_s: float) -> list[Sample]:
        """One a second of those in which steps ended, oldest first."""
        return [each for each in self._samples if each.at_s >= now - over_s]


def spread(values: Iterable[float]) -> dict[str, Any]:
    """How many there are, their mean, and quantiles (null where there are none)."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        **{name: quantile(ordered, share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
    }


def _middle(values: list[float]) -> tuple[float, float] | None:
    ordered = sorted(values)
    return (quantile(ordered, 0.5), quantile(ordered, 0.9)) if ordered else None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, at least one: linear between the two nearest."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _since(events: deque[Any], start_s: float) -> list[Any]:
    while events and events[0].at_s < start_s:
        events.popleft()
    return list(events)
