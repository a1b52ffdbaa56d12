"""Who works for this front end, whether or not an engine of theirs serves now.

    starting  its process is there, or will be, and has not said Ready
    ready     it gets requests
    draining  it gets no more, finishes what it has, and goes
    lost      its engine has died or its link has ended; whoever started it is expected to start it again

A worker keeps its id over its lives. One that was started by somebody else and is lost is forgotten after a while, one
that left in order at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ...core.events import WorkerFacts

STARTING, READY, DRAINING, LOST = "starting", "ready", "draining", "lost"
LEFT = "left"
"""Not a state: what is told of a worker that was draining and has gone."""
KEPT_S = 600.0
"""How long a worker that somebody else started is remembered after it was lost."""
MAX_LOST = 1000
POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
POOL_RULE = "must be 1 to 32 lower-case letters, digits, hyphens and underscores"


class Owner(Protocol):
    """Who starts a worker of this machine. pool: in which its next life serves."""

    pool: str

    def will_end(self, comes_back: bool) -> None:
        """Its engine has been told to end, and `comes_back` after that."""
        ...


@dataclass(slots=True)
class Worker:
    """link: number of the engine that serves, if one does. address: where a link comes from; "": this machine.
    since_s: when it came into its state, in seconds since 1970. owner: None: somebody else starts it."""

    facts: WorkerFacts
    state: str
    since_s: float
    address: str = ""
    link: int | None = None
    owner: Owner | None = None


class Roster:
    """Its client tells it who came and went, an owner who is started. on_change: told of a worker's new state, LEFT, or
    "pool" where it is in another."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._by_link: dict[int, Worker] = {}
        self.on_change: Callable[[str, WorkerFacts], None] = lambda change, facts: None

    def find(self, name: str) -> Worker | None:
        self._forget()
        return self._workers.get(name)

    def shown(self) -> list[Worker]:
        """In the order of their coming."""
        self._forget()
        return list(self._workers.values())

    # ---- told by owners ----

    def start(self, name: str, owner: Owner) -> None:
        """A process of the worker begins."""
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = Worker(WorkerFacts(name), STARTING, 0.0)
        worker.owner = owner
        worker.facts = WorkerFacts(name, pool=owner.pool)
        self._set(worker, STARTING)

    def lose(self, name: str) -> None:
        """Its process has ended. One that said Ready is lost already."""
        self._end(self._workers[name])

    def remove(self, name: str) -> None:
        del self._workers[name]

    # ---- told by the client ----

    def come(self, link: int, facts: WorkerFacts, address: str) -> None:
        """An engine serves from now on."""
        name = facts.id or f"engine-{link}"
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = Worker(facts, READY, 0.0)
        worker.facts, worker.address, worker.link = facts._replace(id=name), address, link
        self._by_link[link] = worker
        self._set(worker, READY)

    def leave(self, link: int) -> None:
        """It gets no more."""
        if (worker := self._by_link.get(link)) is not None:
            self._set(worker, DRAINING)

    def put(self, link: int, pool: str) -> None:
        """Its engine says in which pool it is: this or another front end has put it there."""
        if (worker := self._by_link.get(link)) is not None:
            self.pool(worker, pool)

    def go(self, link: int) -> None:
        """Its link has ended."""
        worker = self._by_link.pop(link, None)
        if worker is None or worker.link != link:  # another life of it has come meanwhile
            return
        worker.link = None
        is_expected = worker.state != DRAINING or worker.owner is not None
        self._end(worker)
        if not is_expected:
            self.remove(worker.facts.id)

    def pool(self, worker: Worker, pool: str) -> None:
        """It serves there from now on, and so do its next lives on this machine."""
        if worker.facts.pool != pool:
            worker.facts = worker.facts._replace(pool=pool)
            self.on_change("pool", worker.facts)
        if worker.owner is not None:
            worker.owner.pool = pool

    def _end(self, worker: Worker) -> None:
        if worker.state != LOST:
            change = LEFT if worker.state == DRAINING else LOST
            worker.state, worker.since_s = LOST, self._clock()
            self.on_change(change, worker.facts)

    def _set(self, worker: Worker, state: str) -> None:
        worker.state, worker.since_s = state, self._clock()
        self.on_change(state, worker.facts)

    def _forget(self) -> None:
        before_s = self._clock() - KEPT_S
        lost = [each for each in self._workers.values() if each.state == LOST and each.owner is None]
        for index, worker in enumerate(lost):
            if worker.since_s < before_s or index < len(lost) - MAX_LOST:
                self.remove(worker.facts.id)
