"""How much the experts of a mixture computed, and how evenly: three series for each layer that has experts.

A series for each expert would be thousands; those numbers are in the file of --expert-load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...core.experts import ExpertLoad, WeightReads, balancedness, num_unused

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
