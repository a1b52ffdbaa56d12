"""A simulated run as a trace for ui.perfetto.dev: by virtual time, the steps of each worker, the life of each request
as its client sees it, KV on its way from worker to worker, and how many requests wait and run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ...bench.load.stream import Exchange
from ...control.observe.perfetto import Event, lasting, microseconds, named
from ...core.cost import Work
from ...core.events import Timing

MAX_EVENTS = 1_000_000
"""What a browser can still show. What comes after is counted and left out."""
_WORKERS, _REQUESTS, _TRANSFERS = 1, 2, 3


class TraceWriter:
    """Takes what `sim.timed.Trace` and `client.Ended` tell; `write` it in the end."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self._events: list[Event] = []
        self._tracks: dict[str, int] = {}
        self._num_transfers = 0

    def step(self, worker: str, work: Work, begin_s: float, end_s: float) -> None:
        if not self._has_room(1):
            return
        args = {"rows": work.num_rows, "tokens": work.num_tokens}
        title = f"{work.num_rows} rows, {work.num_tokens} tokens"
        track = self._track(_WORKERS, worker)
        self._events.append(lasting(title, "step", _WORKERS, track, begin_s, end_s, 0.0, args))

    def carried(self, source: str, destination: str, num_bytes: int, begin_s: float, end_s: float) -> None:
        """As an asynchronous pair: transfers of one link may overlap."""
        if not self._has_room(2):
            return
        self._num_transfers += 1
        title = f"{source} to {destination}"
        common = {"name": title, "cat": "transfer", "id": self._num_transfers, "pid": _TRANSFERS, "tid": 0}
        begin = {"ph": "b", **common, "ts": microseconds(begin_s, 0.0), "args": {"bytes": num_bytes}}
        self._events += [begin, {"ph": "e", **common, "ts": microseconds(end_s, 0.0)}]

    def ended(self, request_id: str, exchange: Exchange, timing: Timing | None) -> None:
        """timing: by its last engine, where one has said."""
        assert exchange.end_s is not None and exchange.sent_s is not None
        if not self._has_room(4 if exchange.event_times else 3):
            return
        track, begin_s, end_s = self._track(_REQUESTS, request_id), exchange.sent_s, exchange.end_s
        args = {
            "id": request_id,
            "prompt_tokens": exchange.input_tokens,
            "cached_tokens": exchange.cached_tokens,
            "output_tokens": exchange.output_tokens,
            "finish_reason": exchange.finish_reason,
            "error": exchange.error,
            "refused": exchange.num_refused,
            "preemptions": None if timing is None else timing.num_preemptions,
        }
        events = [lasting(request_id, "request", _REQUESTS, track, begin_s, end_s, 0.0, args)]
        first_s = exchange.event_times[0] if exchange.event_times else end_s
        planned_s = first_s if timing is None or timing.scheduled_s < 0 else timing.scheduled_s
        planned_s = min(max(planned_s, begin_s), first_s)
        for name, start_s, stop_s in (("queue", begin_s, planned_s), ("prefill", planned_s, first_s)):
            events.append(lasting(name, "request", _REQUESTS, track, start_s, stop_s, 0.0, {}))
        if exchange.event_times:
            events.append(lasting("decode", "request", _REQUESTS, track, first_s, end_s, 0.0, {}))
        self._events += events

    def write(self, path: Path, queues: Sequence[tuple[float, int, int, int]], about: dict[str, Any]) -> None:
        """queues: of the service's report. about: said beside the events."""
        whole = {
            "traceEvents": [*self._names(), *self._events, *_counters(queues)],
            "displayTimeUnit": "ms",
            "otherData": {**about, "left_out": self.num_left_out},
        }
        path.write_text(json.dumps(whole), encoding="utf8")

    def _has_room(self, num: int) -> bool:
        """For so many events; else they are counted."""
        if len(self._events) + num <= MAX_EVENTS:
            return True
        self.num_left_out += num
        return False

    def _track(self, process: int, name: str) -> int:
        return self._tracks.setdefault(f"{process} {name}", len(self._tracks) + 1)

    def _names(self) -> Iterable[Event]:
        titles = {_WORKERS: "workers", _REQUESTS: "requests", _TRANSFERS: "KV between workers"}
        processes = (named("process_name", process, 0, title) for process, title in titles.items())
        tracks = ((key.partition(" "), track) for key, track in self._tracks.items())
        return chain(processes, (named("thread_name", int(key[0]), track, key[2]) for key, track in tracks))


def _counters(queues: Sequence[tuple[float, int, int, int]]) -> Iterable[Event]:
    for at_s, num_outside, num_waiting, num_running in queues:
        args = {"without engine": num_outside, "waiting": num_waiting, "running": num_running}
        yield {
            "ph": "C", "name": "requests", "pid": _WORKERS, "tid": 0, "ts": microseconds(at_s, 0.0), "args": args
        }  # fmt: skip
