"""An outside job that has the machine while nobody has a call open: a training run, an index to build.

It is stopped as soon as the head of a call is there, before its body is read, and goes on when the last call has ended
and none has come for QUIET_S. Batches come before it. The job itself, and how it is stopped, is `Job`'s (cli.idle_job).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...cluster.events import Ended
from ...core.ports import Clock
from ...core.request import Request
from ..observe.observers import Observer

QUIET_S = 0.2
_LABELS = ("model_name", "engine")
_log = logging.getLogger(__name__)


class Job(Protocol):
    """outcome: how it ended; "": it has not. It runs or is stopped as was asked last."""

    @property
    def outcome(self) -> str: ...

    def run(self) -> None: ...

    def stop(self) -> None: ...


class IdleTime(Observer):
    """Lets the job run in idle time. An Observer, and a collector of Prometheus. `note_call` and
    `note_read` are told of bodies (server.limits); `open` it inside the loop, when the server is ready."""

    def __init__(self, model_name: str, num_open: Callable[[], int], clock: Clock, job: Job) -> None:
        self._labels = (model_name, "0")
        self._num_open = num_open
        self._clock = clock
        self._job = job
        self._num_reading = 0
        self._is_open = False
        self._is_running = False
        self._since_s = clock.now()
        self._running_s = 0.0
        self._stopped_s = 0.0
        self._num_stops = 0
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._is_open = True
        self._since_s = self._clock.now()
        self._await_quiet()

    def close(self) -> None:
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()

    def note_call(self) -> None:
        """A call is here, and its body is about to be read."""
        self._num_reading += 1
        self._stop()

    def note_read(self) -> None:
        """It is submitted, or refused."""
        self._num_reading -= 1
        self._await_quiet()

    def opened(self, requests: Sequence[Request], client: str) -> None:
        self._stop()

    def ended(self, ended: Ended) -> None:
        self._await_quiet()

    def shown(self) -> dict[str, Any]:
        """For /admin/slo."""
        running_s, stopped_s = self._seconds()
        return {
            "state": "ended" if self._job.outcome else "running" if self._is_running else "stopped",
            "outcome": self._job.outcome or None,
            "running_s": round(running_s, 3),
            "stopped_s": round(stopped_s, 3),
            "num_stops": self._num_stops,
        }

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_running:
            self._job.stop()
            self._turn(is_running=False)
            self._num_stops += 1

    def _await_quiet(self) -> None:
        if self._is_open and not self._is_running and self._is_idle:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(QUIET_S, self._run)

    @property
    def _is_idle(self) -> bool:
        return not self._num_reading and not self._num_open()

    def _run(self) -> None:
        self._timer = None
        if self._is_idle and not self._job.outcome:
            self._job.run()
            self._turn(is_running=True)

    def _turn(self, *, is_running: bool) -> None:
        self._running_s, self._stopped_s = self._seconds()
        self._is_running = is_running
        self._since_s = self._clock.now()

    def _seconds(self) -> tuple[float, float]:
        """(running, stopped) so far."""
        more_s = 0.0 if self._job.outcome or not self._is_open else self._clock.now() - self._since_s
        if self._is_running:
            return self._running_s + more_s, self._stopped_s
        return self._running_s, self._stopped_s + more_s

    # ---- metrics ----

    def describe(self) -> Iterator[Metric]:
        return iter(_families())

    def collect(self) -> Iterator[Metric]:
        seconds, stops, state = _families()
        for kind, value in zip(("running", "stopped"), self._seconds(), strict=True):
            seconds.add_metric((*self._labels, kind), value)
        stops.add_metric(self._labels, self._num_stops)
        state.add_metric(self._labels, float(self._is_running and not self._job.outcome))
        return iter((seconds, stops, state))


def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily]:
    return (
        CounterMetricFamily("tokenmill:idle_job_seconds", "Time of the idle command", labels=(*_LABELS, "state")),
        CounterMetricFamily("tokenmill:idle_job_stops", "Times the idle command was stopped", labels=_LABELS),
        GaugeMetricFamily("tokenmill:idle_job_running", "1 while the idle command runs", labels=_LABELS),
    )
