"""Series of each worker under vLLM's names, with labels that say which worker and which pool it is; and how much the
experts of a mixture computed, and how evenly.

The series of workers have a path of their own, /metrics/workers: beside the series of all workers together, under the
same names, every sum over them would count twice. Of experts there are three series for each layer: a series for each
expert would be thousands; those numbers are in the file of --expert-load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...cluster.gateway import Gateway
from ...core.events import EngineStats
from ...core.experts import ExpertLoad, WeightReads, balancedness, num_unused
from .roster import DRAINING, LOST, READY, STARTING, Roster

_LABELS = ("model_name", "engine", "layer")


class ExpertMetrics:
    """A collector, of what `read` gives at a scrape; nothing where that is None."""

    def __init__(self, model_name: str, read: Callable[[], ExpertLoad | None]) -> None:
        self._labels = (model_name, "0")
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        load = self._read()
        if load is None:
            return
        tokens = CounterMetricFamily("tokenmill:expert_tokens", "Rows that experts computed", labels=_LABELS)
        even = GaugeMetricFamily("tokenmill:expert_balancedness", "Mean over maximum of experts", labels=_LABELS)
        unused = GaugeMetricFamily("tokenmill:experts_unused", "Experts that computed nothing so far", labels=_LABELS)
        for layer, counts in zip(load.layers, load.tokens, strict=True):
            labels = (*self._labels, str(layer))
            tokens.add_metric(labels, sum(counts))
            even.add_metric(labels, balancedness(counts))
            unused.add_metric(labels, num_unused(counts))
        yield from (tokens, even, unused)
        if load.reads is not None:
            for name, meaning, value in _of_reads(load.reads):
                counter = CounterMetricFamily(f"tokenmill:{name}", meaning, labels=_LABELS[:2])
                counter.add_metric(self._labels, value)
                yield counter


def _of_reads(reads: WeightReads) -> Iterator[tuple[str, str, float]]:
    yield "weight_bytes_read", "Bytes of weights read from disk", reads.bytes_read
    yield "weight_wait_seconds", "Time that threads waited for weights", reads.waited_s
    yield "expert_hits", "Experts asked for that were in memory or on their way", reads.hits
    yield "expert_misses", "Experts asked for that were not", reads.misses
    yield "experts_guessed", "Experts read ahead of their layer", reads.guesses_read
    yield "expert_guess_hits", "Experts read ahead and then asked for", reads.guess_hits


LABELS = ("model_name", "worker", "pool")
_STATES = (STARTING, READY, DRAINING, LOST)
_GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch", "num_running"),
    ("vllm:num_requests_waiting", "Requests that the worker has and that wait there", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks held by requests, of the fullest pool", "kv_usage"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of scheduled requests", "prompt_tokens"),
    ("vllm:generation_tokens", "Output tokens produced", "generation_tokens"),
    ("vllm:num_preemptions", "Times a running request gave its blocks back", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", "prefix_hits"),
    ("tokenmill:steps", "Engine steps", "num_steps"),
)


class WorkerMetrics:
    """A collector. Counters of a worker begin again with each life of it. registry: of these series alone."""

    def __init__(self, model_name: str, roster: Roster, gateway: Gateway) -> None:
        self._model_name = model_name
        self._roster = roster
        self._gateway = gateway
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        workers = self._roster.shown()
        serving: list[tuple[tuple[str, ...], EngineStats]] = []
        for worker in workers:
            link = None if worker.link is None else self._gateway.link(worker.link)
            if link is not None:
                serving.append(((self._model_name, worker.facts.id, worker.facts.pool), link.stats))
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, stats in serving:
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, stats in serving:
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        states = GaugeMetricFamily("tokenmill:worker_state", "1 for the state that it is in", labels=(*LABELS, "state"))
        for worker in workers:
            for state in _STATES:
                labels = (self._model_name, worker.facts.id, worker.facts.pool, state)
                states.add_metric(labels, float(worker.state == state))
        yield states
