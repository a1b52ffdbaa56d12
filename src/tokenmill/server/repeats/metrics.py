"""Series about calls that were sent again."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

_LABELS = ("model_name", "engine")
_OUTCOMES = ("run", "replayed", "refused")


class RepeatMetrics:
    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        family = Counter(
            "tokenmill:idempotent_calls", "Calls with an Idempotency-Key", (*_LABELS, "outcome"), registry=registry
        )
        self._outcomes = {outcome: family.labels(model_name, "0", outcome) for outcome in _OUTCOMES}

    def note(self, outcome: str) -> None:
        self._outcomes[outcome].inc()
