"""Runs of millions of requests: what is needed of the times between tokens is added up as each request ends, and the
times are let go. Of ITL a histogram is kept (`histogram`: to within 1 / 2048 of a value); all else is as exact as ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from ..result import Distribution, RequestRow
from .histogram import Histogram
from .stream import Exchange

BIN_S = 1.0
KEPT_EVENTS = 2


class Tally:
    """rows: of the requests that have ended, each with the first KEPT_EVENTS of its token events alone. num_events: of
    all; num_good: of those that succeeded. num_met_itl: requests that succeeded and met the objective on ITL."""

    def __init__(self) -> None:
        self.rows: list[RequestRow] = []
        self.num_events = 0
        self.num_good = self.num_met_itl = 0
        self._gaps = Histogram()
        self._bins: Counter[int] = Counter()

    def take(self, row: RequestRow, exchange: Exchange, met_itl: bool) -> None:
        """A request that has ended. met_itl: whether its times met the objective on them."""
        times = np.array(exchange.event_times, np.float64) - exchange.due_s
        self.num_events += len(times)
        if row.ok:
            self.num_good += len(times)
            self.num_met_itl += met_itl
            self._gaps.add_all(np.maximum(0.0, np.diff(times)))
        bins = ((row.due_s + times) / BIN_S).astype(np.int64)
        if len(bins):
            first = int(bins.min())
            for number, count in enumerate(np.bincount(bins - first, exchange.event_tokens).tolist(), first):
                if count:
                    self._bins[number] += int(count)
        if row.event_s is not None and len(row.event_s) > KEPT_EVENTS:
            counts = None if row.event_tokens is None else row.event_tokens[:KEPT_EVENTS]
            row = replace(row, event_s=row.event_s[:KEPT_EVENTS], event_tokens=counts)
        self.rows.append(row)

    def itl_s(self, percentiles: tuple[float, ...]) -> Distribution:
        return self._gaps.distribution(percentiles)

    def tokens(self, begin_s: float, width_s: float, num: int) -> list[int]:
        """Of each of `num` slices of time, which are whole bins or wider."""
        found = [0] * num
        for number, count in self._bins.items():
            found[min(num - 1, max(0, int((number * BIN_S - begin_s) / width_s)))] += count
        return found
