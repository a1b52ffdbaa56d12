"""Series about canaries, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .canaries import Canaries

_LABELS = ("model_name", "version")


class CanaryMetrics:
    """A collector."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        weights = GaugeMetricFamily("tokenmill:canary_weight", "Weight of a version", labels=_LABELS)
        calls = CounterMetricFamily("tokenmill:canary_calls", "Answers of a version", labels=(*_LABELS, "outcome"))
        evidence = GaugeMetricFamily(
            "tokenmill:canary_evidence", "Evidence that a canary is worse", labels=(*_LABELS, "sign")
        )
        for canary in self._canaries.all:
            for version in canary.versions:
                weights.add_metric((canary.name, version.model), version.weight)
                good, errors = canary.counts[version.model]
                calls.add_metric((canary.name, version.model, "ok"), float(good))
                calls.add_metric((canary.name, version.model, "error"), float(errors))
            for model, judge in canary.judges.items():
                for sign, test in judge.tests.items():
                    evidence.add_metric((canary.name, model, sign), test.evidence)
        yield weights
        yield calls
        yield evidence
        rollbacks = CounterMetricFamily("tokenmill:canary_rollbacks", "Canaries taken back", labels=_LABELS)
        for (name, model), number in self._canaries.num_rollbacks.items():
            rollbacks.add_metric((name, model), float(number))
        yield rollbacks
