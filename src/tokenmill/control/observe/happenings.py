"""What was decided about workers and moves of late, and why: a bounded list for the operator. Nothing is noted of
requests that run where they were first sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ...cluster.events import Effects
from ...core.events import WorkerFacts

NUM_KEPT = 500


class Happenings:
    """wall_s: seconds since the epoch."""

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
