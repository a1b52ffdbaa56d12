"""What overload costs, told: metrics of predictions and of what was given up, and the record of a shadow's refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...cluster.events import Ended
from ...core.cost import Costs
from ...core.events import EngineStats, Output, StepOutputs
from ...core.policy import Verdict
from ...core.request import Request

_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4)
_LABELS = ("model_name", "engine")
SHORTENED = b"x-tokenmill-shortened"
"""Header of an answer whose max_tokens was cut to so many."""
_LEAST_S = 0.05
"""Of times below this, errors are not counted: they are less than a step."""


class OverloadMetrics:
    """level: how far the plan of degradation has got (cluster.pressure)."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str], stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._stats = stats
        self.level: Callable[[], int] = lambda: 0
        self._errors = Histogram(
            "tokenmill:ttft_prediction_error_ratio",
            "By which share of it the time to a first token was mispredicted, of times above 50 ms",
            _LABELS, buckets=_SHARES, registry=registry,
        ).labels(*labels)  # fmt: skip
        self._told = self._counter(registry, "tokenmill:ttft_predicted_seconds", "Predicted times to first tokens")
        self._took = self._counter(registry, "tokenmill:ttft_real_seconds", "What these times were")
        self._expired = self._counter(
            registry, "tokenmill:requests_expired", "Requests that ended because their time was over"
        )
        self._shortened = self._counter(registry, "tokenmill:answers_shortened", "Calls whose max_tokens was cut")
        self._shadow = Counter(
            "tokenmill:shadow_refusals", "Calls that were let in though they would have been refused",
            (*_LABELS, "outcome"), registry=registry,
        )  # fmt: skip
        registry.register(_Gauges(self))

    def compare(self, told_s: float, took_s: float) -> None:
        """A first token came after so long, of which so long was predicted."""
        self._told.inc(told_s)
        self._took.inc(took_s)
        if took_s >= _LEAST_S:
            self._errors.observe(abs(told_s - took_s) / took_s)

    def expired(self, number: int) -> None:
        self._expired.inc(number)

    def shortened(self) -> None:
        self._shortened.inc()

    def shadowed(self, outcome: str) -> None:
        """ "met": all targets, "missed": one of them, "failed": it did not get so far."""
        self._shadow.labels(*self._labels, outcome).inc()

    def _counter(self, registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=registry).labels(*self._labels)

    def families(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("tokenmill:degradation_level", "How far the plan of degradation has got", self.level())
        yield self._gauge("tokenmill:step_cost_error_ratio", "By which share steps are mispredicted", stats.cost_error)
        costs = GaugeMetricFamily(
            "tokenmill:step_cost_seconds", "What a step takes, and each part of it", labels=(*_LABELS, "part")
        )
        for name, value in zip(Costs._fields[:-1], stats.costs[:-1], strict=True):
            costs.add_metric((*self._labels, name.removesuffix("_s")), value)
        yield costs
        late = CounterMetricFamily(
            "tokenmill:engine_requests_expired", "Requests that no step was planned for in time", labels=_LABELS
        )
        late.add_metric(self._labels, stats.num_expired)
        yield late

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, float(value))
        return family


class _Gauges:
    def __init__(self, metrics: OverloadMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


class Shadow:
    """An observer of requests that are served though they would have been refused: did they keep their targets?"""

    def __init__(self, metrics: OverloadMetrics) -> None:
        self._metrics = metrics
        self._ids: set[str] = set()

    def note(self, requests: Iterable[Request], verdict: Verdict) -> None:
        """To be called before they are opened."""
        if verdict.refusal is not None:
            self._ids.update(request.id for request in requests)

    def opened(self, requests: Sequence[Request], client: str) -> None: ...

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None: ...

    def ended(self, ended: Ended) -> None:
        if ended.request.id in self._ids:
            self._ids.discard(ended.request.id)
            self._metrics.shadowed(outcome(ended))


def outcome(ended: Ended) -> str:
    """Whether a request met its targets."""
    request, output, reason, last_token_s = ended[:4]
    timing = None if output is None else output.timing
    if output is None or timing is None or timing.first_token_s < 0 or reason not in ("stop", "length"):
        return "failed"
    terms = request.terms
    ttft_s = timing.first_token_s - request.arrival_s
    tpot_s = max(0.0, last_token_s - timing.first_token_s) / max(1, output.num_output - 1)
    is_met = (not terms.ttft_s or ttft_s <= terms.ttft_s) and (not terms.tpot_s or tpot_s <= terms.tpot_s)
    return "met" if is_met else "missed"


def shortened(requests: list[Request]) -> list[Request]:
    """The requests with answers as short as their tenant allows, where that is shorter."""
    most = requests[0].terms.shorten_to
    return [
        each
        if each.max_tokens <= most
        else replace(
            each,
            max_tokens=max(most, each.sampling.min_tokens),
            sampling=replace(each.sampling, max_tokens=max(most, each.sampling.min_tokens)),
        )
        for each in requests
    ]
