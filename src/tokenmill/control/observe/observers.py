"""Who is told what engines do with requests: metrics, the request log, the monitor, and observers that were added.

Each may be missing: the library runs without them, and they take a while to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...cluster.events import Effects, Ended
from ...cluster.totals import ExpertTotals
from ...core.events import EngineStats, Output, Ready, StepOutputs
from ...core.request import Request

if TYPE_CHECKING:
    from .metrics import Metrics
    from .monitor import Monitor
    from .request_log import RequestLog


class Observer(Protocol):
    """Each call is made in the event loop, within the time that a step's tokens take to their clients, and must return
    in microseconds. A class that derives from this defines the calls that it needs; the others do nothing."""

    def opened(self, requests: Sequence[Request], client: str) -> None:
        """A call has been let in."""
        return

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        """These outputs go to their clients as soon as this returns: those of a step, or None: of another event."""
        return

    def ended(self, ended: Ended) -> None:
        """A request is over."""
        return


class Observers:
    """Told by a client of engines, in the order in which things happen. Times are of the loop's clock. experts: what
    those of the engines' model have computed. added: meters, quotas and others that need no more than an Observer."""

    def __init__(self) -> None:
        self.experts = ExpertTotals()
        self.metrics: Metrics | None = None
        self.request_log: RequestLog | None = None
        self.added: list[Observer] = []
        self.monitor: Monitor | None = None

    def opened(self, requests: Sequence[Request], client: str, now: float) -> None:
        for observer in self.added:
            observer.opened(requests, client)
        if self.monitor is not None:
            self.monitor.opened(requests, client, now)

    def given(self, number: int, request: Request, now: float) -> None:
        """An engine was given the request."""
        if self.monitor is not None:
            self.monitor.requests.given(number, request, now)

    def routed(self, routes: Sequence[tuple[int, str, str]]) -> None:
        """Of requests for which there was a choice: engine, request, why that one."""
        if self.monitor is not None:
            for route in routes:
                self.monitor.requests.routed(*route)
        if self.metrics is not None:
            for _, _, reason in routes:
                self.metrics.request_routed(reason)

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        """Before clients hear of it."""
        if outputs or step is not None:
            for observer in self.added:
                observer.sending(outputs, step)

    def ended(self, ended: Ended) -> None:
        for observer in self.added:
            observer.ended(ended)
        if self.monitor is not None:
            self.monitor.requests.close(ended)
        request, output, reason, last_token_s, now = ended[:5]
        if output is None:
            if self.metrics is not None:
                self.metrics.request_lost(reason)
            if self.request_log is not None:
                self.request_log.given_up(request, reason)
            return
        if self.metrics is not None:
            self.metrics.request_done(request, output, reason, last_token_s, now)
        if self.request_log is not None:
            self.request_log.ended(request, output, reason, now)

    def stepped(self, effects: Effects, now: float, stats: EngineStats) -> None:
        """`now`: of the step; `stats`: of all engines after it."""
        monitor, metrics = self.monitor, self.metrics
        if monitor is not None:
            for request, since_arrival_s in effects.firsts:
                monitor.first(request, since_arrival_s, now)
            if now >= monitor.next_sample_s:
                monitor.sample(now, stats)
        if metrics is not None:
            for _, since_arrival_s in effects.firsts:
                metrics.first_token(since_arrival_s)
            for told_s, took_s in effects.forecasts:
                metrics.overload.compare(told_s, took_s)
            for last_s, count in effects.gaps.items():
                metrics.further_tokens(now - last_s, count)
            metrics.step(stats)

    def moved(self, effects: Effects, now: float) -> None:
        """Requests went to other engines, or predicted answers have ended."""
        if self.monitor is not None:
            self.monitor.moved(effects, now)
        if self.metrics is not None:
            self.metrics.moves.note(effects)

    def expired(self, number: int) -> None:
        if self.metrics is not None:
            self.metrics.overload.expired(number)

    def engine_came(self, number: int, ready: Ready, stats: EngineStats, flight: str) -> None:
        self.experts.join(number, ready.expert_load)
        if self.monitor is not None:
            self.monitor.engine_came(number, ready.worker, flight)
        if self.metrics is not None:
            self.metrics.engine_ready(ready, stats)

    def engine_left(self, number: int, now: float) -> None:
        self.experts.leave(number)
        if self.monitor is not None:
            self.monitor.engine_left(number, now)

    def engine_lost(self, ready: Ready | None, stats: EngineStats, effects: Effects) -> None:
        """One that served. `ready`: the facts of those that still do."""
        if self.monitor is not None:
            self.monitor.decisions.lost(effects)
        if self.metrics is not None:
            self.metrics.engine_lost(ready, stats)
            self.metrics.requests_resumed(effects.resumed)
            self.metrics.requests_poisoned(effects.poisoned)
