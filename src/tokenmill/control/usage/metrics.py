"""Series about the account of usage, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .books import Books

_LABELS = ("model_name", "engine")


class UsageMetrics:
    """A collector. `books`: may be open or not."""

    def __init__(self, model_name: str, books: Books) -> None:
        self._labels = (model_name, "0")
        self._books = books

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        books = self._books
        for name, text, value in (
            ("tokenmill:usage_journal_bytes", "Bytes written to the usage journal", books.journal.num_bytes),
            (
                "tokenmill:usage_journal_failures",
                "Writes of the usage journal that the system refused",
                books.journal.num_failures,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, float(value))
            yield counter
        lag = GaugeMetricFamily(
            "tokenmill:usage_lag_seconds", "Age of the sums that usage is told from", labels=_LABELS
        )
        lag.add_metric(self._labels, books.lag_s)
        yield lag
