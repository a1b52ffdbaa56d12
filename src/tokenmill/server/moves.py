"""What goes from one engine to another, and how well answers' lengths are predicted, told as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from ..cluster.events import Effects

_LABELS = ("model_name", "engine")
_PAUSE_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 4, 8)


class MoveMetrics:
    """Of requests whose move is over, and of answers that have ended."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._moved = Counter(
            "tokenmill:requests_moved", "Requests that went from one engine to another, or were to",
            (*_LABELS, "reason", "outcome"), registry=registry,
        )  # fmt: skip
        self._pause = Histogram(
            "tokenmill:move_pause_seconds", "From when its first engine stopped a request until the next one had it",
            _LABELS, buckets=_PAUSE_S, registry=registry,
        ).labels(*labels)  # fmt: skip
        self._tokens = self._counter(registry, "tokenmill:moved_kv_tokens", "Tokens whose KV another engine copied")
        self._rerouted = self._counter(
            registry, "tokenmill:requests_rerouted", "Requests that waited in one engine and were given to another"
        )
        self._copied = Counter(
            "tokenmill:prefixes_copied", "Prefixes that were copied to a further engine ahead of need, or were to be",
            (*_LABELS, "outcome"), registry=registry,
        )  # fmt: skip
        self._predicted = self._counter(registry, "tokenmill:answer_lengths_predicted", "Answers predicted and ended")
        self._hits = self._counter(
            registry, "tokenmill:answer_lengths_in_bucket", "Of these, those whose likeliest bucket of length was right"
        )
        self._error = Histogram(
            "tokenmill:answer_length_error_ratio", "By which share of it the length of an answer was mispredicted",
            _LABELS, buckets=_SHARES, registry=registry,
        ).labels(*labels)  # fmt: skip

    def note(self, effects: Effects) -> None:
        for moved in effects.moved:
            outcome = "failed" if moved.error else "moved"
            self._moved.labels(*self._labels, moved.why, outcome).inc()
            self._tokens.inc(moved.num_tokens)
            if moved.pause_s:
                self._pause.observe(moved.pause_s)
        self._rerouted.inc(effects.rerouted)
        for copied in effects.copied:
            self._copied.labels(*self._labels, "failed" if copied.error else "copied").inc()
            self._tokens.inc(copied.num_tokens)
        for seen in effects.lengths:
            self._predicted.inc()
            self._hits.inc(seen.is_hit)
            self._error.observe(abs(seen.num_guessed - seen.num_tokens) / seen.num_tokens)

    def _counter(self, registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=registry).labels(*self._labels)
