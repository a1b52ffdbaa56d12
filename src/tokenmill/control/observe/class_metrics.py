"""Series by priority class and SLO profile, for everyone who may scrape. Observed as a request gets its first token and
as it ends, never with a token. Profiles are a fixed list, so the number of series is bounded."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from ...core.slo import PROFILES
from ...core.terms import NUM_PRIORITY_CLASSES, Terms
from .requests import Record, RequestRegistry, state_of

LABELS = ("model_name", "engine")
SLO_RESULTS = ("attained", "missed")
KINDS = ("prompt", "cached", "output")
_OTHER = "other"

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 60)
_TPOT_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Series(NamedTuple):
    """Of one class and profile."""

    ttft: Histogram
    tpot: Histogram
    queue: Histogram
    preemptions: Counter
    tokens: tuple[Counter, ...]


class ClassMetrics:
    """A collector of gauges; its histograms and counters are in `registry`."""

    def __init__(self, registry: CollectorRegistry, model_name: str, requests: RequestRegistry) -> None:
        self._labels = (model_name, "0")
        self._requests = requests
        names = (*LABELS, "priority_class", "profile")

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tokenmill:class_{name}", text, names, buckets=buckets, registry=registry)

        ttft = histogram("time_to_first_token_seconds", "Arrival to first token, by class and profile", _TTFT_S)
        tpot = histogram("time_per_output_token_seconds", "Mean time per output token, by class and profile", _TPOT_S)
        queue = histogram("queue_time_seconds", "Arrival to first scheduled, by class and profile", _QUEUE_S)
        preemptions = Counter(
            "tokenmill:class_preemptions", "Preemptions of requests that ended", names, registry=registry
        )
        tokens = Counter("tokenmill:class_tokens", "Tokens of requests that ended", (*names, "kind"), registry=registry)
        self._ended = Counter(
            "tokenmill:class_requests", "Requests that ended", (*names, "finished_reason"), registry=registry
        )
        self._slo = Counter(
            "tokenmill:slo_requests", "Requests with targets that ended", (*names, "result"), registry=registry
        )

        def make(key: tuple[str, str]) -> _Series:
            labels = (*self._labels, *key)
            return _Series(
                ttft.labels(*labels), tpot.labels(*labels), queue.labels(*labels), preemptions.labels(*labels),
                tuple(tokens.labels(*labels, kind) for kind in KINDS),
            )  # fmt: skip

        self._make = make
        self._made: dict[tuple[str, str], _Series] = {}
        registry.register(self)

    def first(self, terms: Terms, ttft_s: float) -> None:
        self._series(_key(terms)).ttft.observe(ttft_s)

    def end(self, record: Record) -> None:
        key = _key(record.terms)
        labels = (*self._labels, *key)
        self._ended.labels(*labels, record.reason).inc()
        if record.is_attained is not None:
            self._slo.labels(*labels, SLO_RESULTS[not record.is_attained]).inc()
        if record.scheduled_s < 0:
            return
        series = self._series(key)
        series.queue.observe(record.scheduled_s - record.arrival_s)
        if record.tpot_s is not None:
            series.tpot.observe(record.tpot_s)
        if record.num_preemptions:
            series.preemptions.inc(record.num_preemptions)
        counts = (record.num_prompt, record.num_cached, record.num_output)
        for counter, number in zip(series.tokens, counts, strict=True):
            counter.inc(number)

    def _series(self, key: tuple[str, str]) -> _Series:
        """Made once: to look labels up costs more than to observe."""
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(key)
        return made

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        yield open_requests(
            "tokenmill:class_requests_open", "Open requests by class and state", self._labels, "priority_class",
            ((str(each.terms.priority_class), state_of(each)) for each in self._requests),
        )  # fmt: skip


def open_requests(
    name: str, text: str, labels: tuple[str, ...], by: str, found: Iterator[tuple[str, str]]
) -> GaugeMetricFamily:
    """How many there are of each (whose, state)."""
    family = GaugeMetricFamily(name, text, labels=(*LABELS, by, "state"))
    for key, number in sorted(Tally(found).items()):
        family.add_metric((*labels, *key), float(number))
    return family


def _key(terms: Terms) -> tuple[str, str]:
    number = terms.priority_class
    known = terms.profile in PROFILES or not terms.profile
    return str(number) if 0 <= number < NUM_PRIORITY_CLASSES else _OTHER, terms.profile if known else _OTHER
