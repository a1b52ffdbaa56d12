"""Who an EngineClient tells what becomes of requests, so that it can be shown: the book of requests, the window of the
last minute, the flight recorders of engines. It is told when a request comes, is given to an engine, gets its first
token, loses its engine and ends, and of one step a second: never of a token."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from ...cluster.events import Effects, Ended
from ...core.events import EngineStats, WorkerFacts
from ...core.request import Request
from .book import RequestBook
from .call_context import PATH
from .class_metrics import ClassMetrics
from .happenings import Happenings
from .rings import Rings
from .tenant_metrics import TenantMetrics
from .traces import Tracing
from .window import Window


class Monitor:
    """next_sample_s: from when on it wants to hear of a step. registry: of the metrics that everyone may see."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self.book = RequestBook()
        self.classes = ClassMetrics(registry, model_name, self.book)
        self.tenants = TenantMetrics(model_name, self.book)
        self.window = Window()
        self.book.listeners += [self.window.end, self.classes.end, self.tenants.end]
        self.happenings = Happenings()
        self.rings = Rings()
        self.next_sample_s = 0.0
        self.tracing: Tracing | None = None

    def trace(self, tracing: Tracing) -> None:
        """Write spans of requests, too."""
        self.tracing = tracing
        tracing.rings = self.rings
        self.book.listeners.append(tracing.ended)

    def opened(self, requests: Sequence[Request], client: str, now: float) -> None:
        self.book.opened(requests, client, now)
        if self.tracing is not None:
            self.tracing.opened(requests, PATH.get())

    def given(self, link: int, request: Request, now: float) -> None:
        self.book.given(link, request, now)

    def first(self, request: Request, since_arrival_s: float, now: float) -> None:
        self.book.first(request, since_arrival_s)
        self.window.first(now, since_arrival_s, request.terms)
        self.classes.first(request.terms, since_arrival_s)
        self.tenants.first(request.terms, since_arrival_s)

    def ended(self, ended: Ended) -> None:
        self.book.close(ended)

    def refused(self, tenant: str, reason: str) -> None:
        """A call got an error instead of an answer."""
        self.tenants.refused(tenant, reason)

    def moved(self, effects: Effects, now: float) -> None:
        self.happenings.moved(effects)
        for each in effects.moved:
            self.book.moved(each, now)

    def engine_came(self, link: int, facts: WorkerFacts, flight: str) -> None:
        """`flight`: file of its flight recorder; "": it has none here."""
        self.happenings.came(link, facts)
        self.rings.open(link, flight)

    def engine_left(self, link: int, now: float) -> None:
        self.book.engine_left(link, now)

    def sample(self, now: float, stats: EngineStats) -> None:
        self.window.sample(now, stats)
        self.next_sample_s = self.window.next_sample_s
