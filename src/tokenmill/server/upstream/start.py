"""The upstreams of one application: models of the registry, who hears of their calls, and series about what they
answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily

from ...control.audit.log import AuditLog
from ...control.models.registry import ModelRegistry
from ...control.usage.journal import Account
from ...control.usage.meter import Meter
from ...core.ports import Clock
from ..limits import Limits
from .prefixes import Prefixes
from .proxy import Ended, UpstreamModel
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


def add_upstreams(
    models: ModelRegistry,
    upstreams: Sequence[Upstream],
    limits: Limits,
    clock: Clock,
    new_id: Callable[[str], str],
    *,
    max_open: int,
    prefixes: Mapping[str, Prefixes],
    registry: CollectorRegistry,
    meter: Meter | None,
    audit: AuditLog | None,
) -> None:
    """Those of one name are one model. `prefixes`: what they have cached, by that name. `meter`, `audit`: None where
    nothing is counted, or noted."""
    if not upstreams:
        return
    metrics = UpstreamMetrics(upstreams, registry)
    for name in dict.fromkeys(each.name for each in upstreams):
        mine = [each for each in upstreams if each.name == name]
        model = UpstreamModel(name, mine, limits, clock, new_id, max_open=max_open, prefixes=prefixes.get(name))
        model.on_end.append(metrics.ended)
        if meter is not None:
            model.on_end.append(_charging(meter))
        if audit is not None:
            model.on_end.append(_noting(audit))
        models.add(model)


def _charging(meter: Meter) -> Callable[[Ended], None]:
    def charge(ended: Ended) -> None:
        if not ended.counts:
            return
        caller, tally = ended.caller, ended.tally
        number = meter.journal.number_of(Account(caller.tenant.id, caller.key, ended.model))
        meter.journal.append([(number, 1, tally.num_prompt, tally.num_cached, tally.num_output, caller.once)])

    return charge


def _noting(audit: AuditLog) -> Callable[[Ended], None]:
    def note(ended: Ended) -> None:
        audit.note(
            {
                "actor": {"tenant": ended.caller.tenant.id, "client": ended.caller.name},
                "action": "call.end",
                "object": ended.address,
                "outcome": ended.outcome,
                "model": ended.model,
                "prompt_tokens": ended.tally.num_prompt,
                "output_tokens": ended.tally.num_output,
            }
        )

    return note
