"""What the operator sees of the engines' work: the registry of requests, the window of the last minute, the last
decisions about workers and moves, the flight recorders of engines. The monitor is told when a request comes, is given
to an engine, gets its first token, loses its engine and ends, and of one step a second: never of a token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from ...cluster.events import Effects
from ...core.events import EngineStats, WorkerFacts
from ...core.request import Request
from .call_context import PATH
from .class_metrics import ClassMetrics
from .requests import RequestRegistry
from .tenant_metrics import TenantMetrics
from .timeline import Rings
from .traces import Tracing
from .window import Window

NUM_KEPT = 500


class DecisionLog:
    """The last decisions about workers and moves, and why. Nothing is noted of requests that run where they were first
    sent. wall_s: seconds since the epoch."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._last: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self._names: dict[int, str] = {}

    def shown(self, limit: int) -> list[dict[str, Any]]:
        """The newest first."""
        return [each for _, each in zip(range(limit), reversed(self._last), strict=False)]

    def worker(self, state: str, facts: WorkerFacts) -> None:
        """A worker has come into a state (`control.workers.roster`) or into a pool, or has left."""
        self._note(state, worker=facts.id, pool=facts.pool)

    def came(self, number: int, facts: WorkerFacts) -> None:
        """The engine with this number is that worker's."""
        self._names[number] = facts.id or f"engine-{number}"
        while len(self._names) > NUM_KEPT:
            del self._names[next(iter(self._names))]

    def name_of(self, number: int) -> str:
        return self._names.get(number, f"engine-{number}")

    def lost(self, effects: Effects) -> None:
        """What became of the requests of an engine that has gone."""
        for kind, number in (("resumed", effects.resumed), ("given_up", effects.poisoned)):
            if number:
                self._note(kind, num_requests=number)

    def moved(self, effects: Effects) -> None:
        if effects.rerouted:
            self._note("rerouted", num_requests=effects.rerouted)
        for each in effects.moved:
            ends = {"worker": self.name_of(each.source), "to": self.name_of(each.target)}
            facts = {"request": each.request.id, "why": each.why, "tokens": each.num_tokens, "pause_s": each.pause_s}
            self._note("not_moved" if each.error else "moved", **ends, **facts, error=each.error or None)
        for copy in effects.copied:
            source = "tiers" if copy.source is None else self.name_of(copy.source)
            ends = {"worker": source, "to": self.name_of(copy.target)}
            facts = {"why": "hot", "tokens": copy.num_tokens, "took_s": copy.took_s}
            self._note("not_copied" if copy.error else "copied", **ends, **facts, error=copy.error or None)

    def _note(self, kind: str, **facts: Any) -> None:
        self._last.append({"time": self._wall_s(), "kind": kind, **facts})


class Monitor:
    """next_sample_s: from when on it wants to hear of a step. registry: of the metrics that everyone may see."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self.requests = RequestRegistry()
        self.classes = ClassMetrics(registry, model_name, self.requests)
        self.tenants = TenantMetrics(model_name, self.requests)
        self.window = Window()
        self.requests.listeners += [self.window.end, self.classes.end, self.tenants.end]
        self.decisions = DecisionLog()
        self.rings = Rings()
        self.next_sample_s = 0.0
        self.tracing: Tracing | None = None

    def trace(self, tracing: Tracing) -> None:
        """Write spans of requests, too."""
        self.tracing = tracing
        tracing.rings = self.rings
        self.requests.listeners.append(tracing.ended)

    def opened(self, requests: Sequence[Request], client: str, now: float) -> None:
        self.requests.opened(requests, client, now)
        if self.tracing is not None:
            self.tracing.opened(requests, PATH.get())

    def first(self, request: Request, since_arrival_s: float, now: float) -> None:
        self.requests.first(request, since_arrival_s)
        self.window.first(now, since_arrival_s, request.terms)
        self.classes.first(request.terms, since_arrival_s)
        self.tenants.first(request.terms, since_arrival_s)

    def refused(self, tenant: str, reason: str) -> None:
        """A call got an error instead of an answer."""
        self.tenants.refused(tenant, reason)

    def moved(self, effects: Effects, now: float) -> None:
        self.decisions.moved(effects)
        for each in effects.moved:
            self.requests.moved(each, now)

    def engine_came(self, link: int, facts: WorkerFacts, flight: str) -> None:
        """`flight`: file of its flight recorder; "": it has none here."""
        self.decisions.came(link, facts)
        self.rings.open(link, flight)

    def engine_left(self, link: int, now: float) -> None:
        self.requests.engine_left(link, now)

    def sample(self, now: float, stats: EngineStats) -> None:
        self.window.sample(now, stats)
        self.next_sample_s = self.window.next_sample_s
