"""Series about the audit log, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .class_metrics import LABELS


class AuditMetrics:
    """A collector. `status`: of an audit log that is open."""

    def __init__(self, model_name: str, status: Callable[[], Mapping[str, Any]]) -> None:
        self._labels = (model_name, "0")
        self._status = status

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        entries = CounterMetricFamily("tokenmill:audit_entries", "Entries of the audit log", labels=LABELS)
        entries.add_metric(self._labels, float(status["seq"]))
        yield entries
        for name, text, value in (
            ("tokenmill:audit_pending", "Entries that are not written yet", status["pending"]),
            ("tokenmill:audit_failing", "1 while the audit log cannot be written", status["failure"] is not None),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, float(value))
            yield gauge
