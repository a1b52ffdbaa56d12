"""Runs of millions of requests: what is needed of the times between tokens is added up as each request ends, and the
times are let go. Of ITL a histogram is kept (`histogram`: to within 1 / 2048 of a value); all else is as exact as ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from ..result import Distribution, RequestRow
from .histogram import Histogram

BIN_S = 1.0


class Tally:
    """rows: of the requests that have ended, each with the first two of its token events alone. num_events: of all;
    num_good: of those that succeeded. num_met_itl: requests that succeeded and met the objective on ITL."""

    def __init__(self) -> None:
        self.rows: list[RequestRow] = []
        self.num_events = 0
        self.num_good = self.num_met_itl = 0
        self._gaps = Histogram()
        self._bins: Counter[int] = Counter()

    def take(self, row: RequestRow, met_itl: bool) -> None:
        """A request that has ended. row: with all its times; met_itl: whether those met the objective on them."""
        times = row.event_s or []
        self.num_events += len(times)
        if row.ok:
            self.num_good += len(times)
            self.num_met_itl += met_itl
            self._gaps.add_all([max(0.0, later - earlier) for earlier, later in pairwise(times)])
        counts, due_s = row.event_tokens, row.due_s
        if counts is None:
            self._bins.update([int((due_s + at_s) / BIN_S) for at_s in times])
        else:
            for at_s, count in zip(times, counts, strict=True):
                self._bins[int((due_s + at_s) / BIN_S)] += count
        self.rows.append(replace(row, event_s=times[:2], event_tokens=None if counts is None else counts[:2]))

    def itl_s(self, percentiles: tuple[float, ...]) -> Distribution:
        return self._gaps.distribution(percentiles)

    def tokens(self, begin_s: float, width_s: float, num: int) -> list[int]:
        """Of each of `num` slices of time, which are whole bins or wider."""
        found = [0] * num
        for number, count in self._bins.items():
            found[min(num - 1, max(0, int((number * BIN_S - begin_s) / width_s)))] += count
        return found
