"""The account of usage of one front end: its journal, and the thread that folds journals into the ledger, reads that,
and tries again to write what a disk has refused.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...core.errors import Unavailable
from ...state.writer import BackgroundWriter
from .journal import Journal
from .ledger import DAY_S, Ledger, cannot_open
from .meter import Meter
from .question import Question, Sum

FOLD_S = 1.0
_COARSEN_S = 600.0
_FAILURES = (sqlite3.Error, OSError)
_log = logging.getLogger(__name__)


class Accounting:
    """`open` it before use, `close` it after. folder: made for this user alone. path: as of a Ledger. kept_days: 0:
    sums are kept for ever.

    meter          what counts
    journal        where it writes
    num_folded     bytes of journals, other front ends' too, that this one has folded
    folded_wall_s  when it last folded all there was
    """

    def __init__(
        self,
        folder: Path,
        path: str = "",
        *,
        kept_days: int = 0,
        wall_s: Callable[[], float] = time.time,
        fold_s: float = FOLD_S,
    ) -> None:
        self._folder = folder
        self._path = path
        self._kept_s = kept_days * DAY_S
        self._wall_s = wall_s
        self.journal = Journal(folder, wall_s)
        self.meter = Meter(self.journal)
        self.num_folded = 0
        self.folded_wall_s = wall_s()
        self._ledger: Ledger | None = None
        self._coarsened_s = 0.0
        self._has_failed = False
        self._fold_s = fold_s
        self._writer = BackgroundWriter("usage", begin=self._begin, end=self._end)

    def open(self) -> None:
        """Raises ConfigError where the folder cannot be used."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer.open()
            self._writer.every(self._fold_s, self._each_period)
            self.journal.open()
        except _FAILURES as error:
            self._writer.close()
            raise cannot_open(self._folder, self._path, error) from error

    def close(self) -> None:
        """What was counted is in the ledger when this returns, if that can be written."""
        self._writer.close()

    @property
    def lag_s(self) -> float:
        """How old the last complete fold is."""
        return max(0.0, self._wall_s() - self.folded_wall_s)

    async def ask(self, question: Question) -> Sequence[Sum]:
        """All that was counted before it is in the answer. Raises Unavailable."""

        def job() -> Sequence[Sum]:
            assert self._ledger is not None
            self._fold()
            return self._ledger.ask(question)

        try:
            return await self._writer.do(job)
        except _FAILURES as error:
            raise Unavailable(f"The usage ledger cannot be read: {error}.") from error

    # ---- in the thread ----

    def _begin(self) -> None:
        self._ledger = Ledger(self._folder, self._path, self._kept_s)
        self._each_period()

    def _fold(self) -> None:
        assert self._ledger is not None
        now_s = self._wall_s()
        self.journal.retry()
        self.num_folded += self._ledger.fold()
        self.folded_wall_s = now_s

    def _each_period(self) -> None:
        assert self._ledger is not None
        try:
            self._fold()
            now_s = self._wall_s()
            if not self._coarsened_s <= now_s < self._coarsened_s + _COARSEN_S:
                self._ledger.coarsen(now_s)
                self._coarsened_s = now_s
            self._has_failed = False
        except _FAILURES as error:
            if not self._has_failed:
                self._has_failed = True
                _log.error("Usage is in the journal, but cannot be added up in %s: %s.", self._folder, error)

    def _end(self) -> None:
        assert self._ledger is not None
        self.journal.close()
        self._each_period()
        self._ledger.close()


_LABELS = ("model_name", "engine")


class UsageMetrics:
    """A collector. `accounting`: may be open or not."""

    def __init__(self, model_name: str, accounting: Accounting) -> None:
        self._labels = (model_name, "0")
        self._accounting = accounting

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        accounting = self._accounting
        for name, text, value in (
            ("tokenmill:usage_journal_bytes", "Bytes written to the usage journal", accounting.journal.num_bytes),
            (
                "tokenmill:usage_journal_failures",
                "Writes of the usage journal that the system refused",
                accounting.journal.num_failures,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, float(value))
            yield counter
        lag = GaugeMetricFamily(
            "tokenmill:usage_lag_seconds", "Age of the sums that usage is told from", labels=_LABELS
        )
        lag.add_metric(self._labels, accounting.lag_s)
        yield lag
