"""Series by tenant, for scrapes with a key of scope admin alone.

Only `MAX_TENANTS` tenants have series of their own, those with the most tokens; the others count together as "other".
Who overtakes one of them by a half takes its place: the newcomer's series begin at 0, and what the other one's said is
added to "other". So no counter falls, and sums over tenants stay right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ...core.terms import Terms
from .class_metrics import KINDS, LABELS, SLO_RESULTS, open_requests
from .requests import Record, RequestRegistry, state_of

MAX_TENANTS = 50
OTHER = "other"
_LEAD = 1.5
_MAX_KNOWN = 100_000
"""Tenants whose tokens are counted to choose among them."""
_TTFT_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class _Account:
    """What is told of one tenant, or of the others together."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = defaultdict(int)
        self.refused: dict[str, int] = defaultdict(int)
        self.slo = [0, 0]
        self.tokens = [0, 0, 0]
        self.queue_s = 0.0
        self.num_preemptions = 0
        self.ttft_counts = [0] * (len(_TTFT_S) + 1)
        self.ttft_sum_s = 0.0


class TenantMetrics:
    """A collector, in `registry`."""

    def __init__(self, model_name: str, requests: RequestRegistry, max_tenants: int = MAX_TENANTS) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._requests = requests
        self._max_tenants = max_tenants
        self._accounts: dict[str, _Account] = {}
        self._others = _Account()
        self._tokens: dict[str, int] = {}
        self.registry.register(self)

    def first(self, terms: Terms, ttft_s: float) -> None:
        account = self._account(terms.tenant)
        account.ttft_counts[bisect_left(_TTFT_S, ttft_s)] += 1
        account.ttft_sum_s += ttft_s

    def refused(self, tenant: str, reason: str) -> None:
        """A call of it got an error instead of an answer."""
        self._account(tenant).refused[reason] += 1

    def end(self, record: Record) -> None:
        tenant = record.terms.tenant
        self._rank(tenant, record.num_prompt + record.num_output)
        account = self._account(tenant)
        account.requests[str(record.terms.priority_class), record.reason] += 1
        if record.is_attained is not None:
            account.slo[not record.is_attained] += 1
        if record.scheduled_s < 0:
            return
        account.queue_s += record.scheduled_s - record.arrival_s
        account.num_preemptions += record.num_preemptions
        for i, number in enumerate((record.num_prompt, record.num_cached, record.num_output)):
            account.tokens[i] += number

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        told = sorted(self._accounts.items())
        if len(self._tokens) > len(self._accounts):
            told.append((OTHER, self._others))
        yield self._counter("requests", "Requests that ended", ("priority_class", "finished_reason"), [
            ((name, *key), number) for name, each in told for key, number in sorted(each.requests.items())
        ])  # fmt: skip
        yield self._counter("calls_refused", "Calls that got an error", ("reason",), [
            ((name, reason), number) for name, each in told for reason, number in sorted(each.refused.items())
        ])  # fmt: skip
        yield self._counter("tokens", "Tokens of requests that ended", ("kind",), [
            ((name, kind), number) for name, each in told for kind, number in zip(KINDS, each.tokens, strict=True)
        ])  # fmt: skip
        yield self._counter("slo_requests", "Requests with targets that ended", ("result",), [
            ((name, SLO_RESULTS[i]), number) for name, each in told for i, number in enumerate(each.slo)
        ])  # fmt: skip
        yield self._counter("queue_seconds", "Arrival to first scheduled, summed", (), [
            ((name,), each.queue_s) for name, each in told
        ])  # fmt: skip
        yield self._counter("preemptions", "Preemptions of requests that ended", (), [
            ((name,), each.num_preemptions) for name, each in told
        ])  # fmt: skip
        yield self._waits(told)
        yield open_requests(
            "tokenmill:tenant_requests_open", "Open requests by tenant and state", self._labels, "tenant",
            ((self._name(each.terms.tenant), state_of(each)) for each in self._requests),
        )  # fmt: skip

    def _counter(
        self, name: str, text: str, more: tuple[str, ...], samples: list[tuple[tuple[str, ...], float]]
    ) -> Metric:
        family = CounterMetricFamily(f"tokenmill:tenant_{name}", text, labels=(*LABELS, "tenant", *more))
        for labels, value in samples:
            family.add_metric((*self._labels, *labels), float(value))
        return family

    def _waits(self, told: list[tuple[str, _Account]]) -> Metric:
        family = HistogramMetricFamily(
            "tokenmill:tenant_time_to_first_token_seconds", "Arrival to first token", labels=(*LABELS, "tenant")
        )
        names = [floatToGoString(bound) for bound in (*_TTFT_S, float("inf"))]
        for name, each in told:
            buckets = list(zip(names, accumulate(each.ttft_counts), strict=True))
            family.add_metric((*self._labels, name), buckets, each.ttft_sum_s)
        return family

    def _name(self, tenant: str) -> str:
        return tenant if tenant in self._accounts or tenant not in self._tokens else OTHER

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None and tenant not in self._tokens:
            self._rank(tenant, 0)
            account = self._accounts.get(tenant)
        return account or self._others

    def _rank(self, tenant: str, num_tokens: int) -> None:
        """It has used more; it may get series of its own for that."""
        known = self._tokens.get(tenant)
        if known is None and len(self._tokens) >= _MAX_KNOWN:
            return
        used = self._tokens[tenant] = (known or 0) + num_tokens
        if tenant in self._accounts:
            return
        if len(self._accounts) < self._max_tenants:
            self._accounts[tenant] = _Account()
            return
        least = min(self._accounts, key=lambda name: (self._tokens[name], name))
        if used > _LEAD * self._tokens[least]:
            _add(self._others, self._accounts.pop(least))
            self._accounts[tenant] = _Account()


def _add(total: _Account, part: _Account) -> None:
    """What a tenant has had until now counts among the others' from now on."""
    for key, number in part.requests.items():
        total.requests[key] += number
    for reason, number in part.refused.items():
        total.refused[reason] += number
    total.slo = [a + b for a, b in zip(total.slo, part.slo, strict=True)]
    total.tokens = [a + b for a, b in zip(total.tokens, part.tokens, strict=True)]
    total.ttft_counts = [a + b for a, b in zip(total.ttft_counts, part.ttft_counts, strict=True)]
    total.ttft_sum_s += part.ttft_sum_s
    total.queue_s += part.queue_s
    total.num_preemptions += part.num_preemptions
