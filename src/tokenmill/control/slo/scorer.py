"""Hears of every request: what a tenant's or client's traffic resembles, and whether objectives were met."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...cluster.events import Ended
from ...core.events import FINISH_LENGTH, FINISH_STOP
from ...core.request import IDLE_PRIORITY, Request
from ...core.slo import PROFILES, Traffic
from ...core.tenant import Tenant
from ..observe.observers import Observer

MOST_KNOWN = 1024
"""Tenants and clients whose traffic is kept: those that called last."""

OWN = "own"
"""Stands for the profile of requests that name targets and no profile."""

_LABELS = ("model_name", "engine")
_TIMES = ("ttft", "tpot")


class Scorer(Observer):
    """An Observer, and a collector of Prometheus.

    effective  by profile, its targets in seconds; traffic is by the tenant, and without one by the client
    """

    def __init__(self, model_name: str, effective: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
        self._labels = (model_name, "0")
        self._effective = effective
        self._traffic: OrderedDict[str, Traffic] = OrderedDict()
        self._names: dict[str, str] = {}
        self._open: dict[str, Traffic] = {}
        self._counts: dict[tuple[str, str, bool], int] = {}

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """By the tenant's identifier, or the client's name."""
        return self._traffic

    @property
    def counts(self) -> Mapping[tuple[str, str, bool], int]:
        """Requests that ended, by (profile, "ttft" or "tpot", whether it was met)."""
        return self._counts

    def shown_name(self, key: str) -> str:
        return self._names.get(key, key)

    def came(self, tenant: Tenant, client: str, now: float, is_streamed: bool) -> str:
        """A call came; the profile that its caller's traffic has resembled so far, "": not known."""
        key = tenant.id or client
        traffic = self._traffic.get(key)
        if traffic is None:
            traffic = self._traffic[key] = Traffic()
            self._names[key] = tenant.name or client
            if len(self._traffic) > MOST_KNOWN:
                self._names.pop(self._traffic.popitem(last=False)[0], None)
        else:
            self._traffic.move_to_end(key)
        traffic.came(now, is_streamed)
        return "" if traffic.verdict is None else traffic.verdict.profile

    def opened(self, requests: Sequence[Request], client: str) -> None:
        for request in requests:
            traffic = self._traffic.get(request.terms.tenant or client)
            if traffic is not None and request.pooling is None and request.priority < IDLE_PRIORITY:
                self._open[request.id] = traffic

    def ended(self, ended: Ended) -> None:
        request, output, reason, last_token_s = ended[:4]
        traffic = self._open.pop(request.id, None)
        if output is None or reason not in (FINISH_STOP, FINISH_LENGTH):
            return
        if traffic is not None:
            traffic.ended(len(request.prompt_tokens), output.num_output, output.num_cached)
        terms, timing = request.terms, output.timing
        if (terms.ttft_s or terms.tpot_s) and timing is not None and timing.first_token_s >= 0:
            profile = terms.profile or OWN
            if terms.ttft_s:
                self._count(profile, "ttft", timing.first_token_s - request.arrival_s <= terms.ttft_s)
            num_more = output.num_output - len(request.output_tokens) - 1
            if terms.tpot_s and num_more > 0:
                end_s = max(last_token_s, timing.first_token_s)
                self._count(profile, "tpot", (end_s - timing.first_token_s) / num_more <= terms.tpot_s)

    def _count(self, profile: str, time: str, is_met: bool) -> None:
        key = (profile, time, is_met)
        self._counts[key] = self._counts.get(key, 0) + 1

    # ---- metrics ----

    def describe(self) -> Iterator[Metric]:
        """Names alone: nobody is asked anything yet."""
        return iter(_families())

    def collect(self) -> Iterator[Metric]:
        family, targets, callers = _families()
        for (profile, time, is_met), number in self._counts.items():
            family.add_metric((*self._labels, profile, time, "met" if is_met else "missed"), number)
        yield family
        for profile, pair in self._effective().items():
            for time, target_s in zip(_TIMES, pair, strict=True):
                if target_s:
                    targets.add_metric((*self._labels, profile, time), target_s)
        yield targets
        found = [each.verdict.profile for each in self._traffic.values() if each.verdict is not None]
        for profile in PROFILES:
            callers.add_metric((*self._labels, profile), found.count(profile))
        yield callers


def _families() -> tuple[CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    return (
        CounterMetricFamily(
            "tokenmill:slo_objectives",
            "Targets of requests that ended, by whether they were met",
            labels=(*_LABELS, "profile", "objective", "result"),
        ),
        GaugeMetricFamily(
            "tokenmill:slo_target_seconds", "Targets of profiles here", labels=(*_LABELS, "profile", "objective")
        ),
        GaugeMetricFamily(
            "tokenmill:slo_recognised_callers",
            "Tenants and clients whose traffic resembles a profile",
            labels=(*_LABELS, "profile"),
        ),
    )
