"""Series about what upstreams answered, and whether they are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily

from .passing import Ended
from .upstream import Upstream

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class UpstreamMetrics:
    """A collector, and a hearer of ends. `upstreams`: all there are."""

    def __init__(self, upstreams: Sequence[Upstream], registry: CollectorRegistry) -> None:
        self._upstreams = upstreams
        self._calls = Counter(
            "tokenmill:upstream_calls", "Calls by outcome", ("model_name", "upstream", "outcome"), registry=registry
        )
        self._tries = Counter(
            "tokenmill:upstream_tries",
            "Calls given to upstreams, with repeats",
            ("model_name",),
            registry=registry,
        )
        self._tokens = Counter(
            "tokenmill:upstream_tokens", "Tokens of calls", ("model_name", "kind", "source"), registry=registry
        )
        self._first = Histogram(
            "tokenmill:upstream_time_to_first_byte_seconds",
            "To the first byte of answers",
            ("model_name",),
            buckets=_BUCKETS,
            registry=registry,
        )
        registry.register(self)

    def ended(self, ended: Ended) -> None:
        self._calls.labels(ended.model, ended.address or "none", ended.outcome).inc()
        self._tries.labels(ended.model).inc(ended.num_tries)
        if not ended.counts or ended.ttft_s is None:
            return
        source = "told" if ended.tally.is_told else "counted"
        self._tokens.labels(ended.model, "prompt", source).inc(ended.tally.num_prompt)
        self._tokens.labels(ended.model, "output", source).inc(ended.tally.num_output)
        self._first.labels(ended.model).observe(ended.ttft_s)

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "upstream")
        up = GaugeMetricFamily("tokenmill:upstream_up", "1 while calls are given to it", labels=labels)
        running = GaugeMetricFamily("tokenmill:upstream_calls_running", "Calls that it works on", labels=labels)
        for each in self._upstreams:
            up.add_metric((each.name, str(each.address)), float(each.health.is_up))
            running.add_metric((each.name, str(each.address)), float(each.num_open))
        yield up
        yield running
