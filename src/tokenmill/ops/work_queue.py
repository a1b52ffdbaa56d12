"""Work on a backend's memory, done one piece at a time in the order in which it was submitted, beside the event loop.

A piece of work is a bound call of a program, or any function of no arguments. Whoever submits it is told of its end on
the event loop that it was submitted from. A backend brings the queue that suits it (`Ops.open_queue`); the one here
serves any backend: a Python thread that does one piece after another.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

REST_S = 0.02
"""How long nothing must have come before a queue does what can wait: work that is late must not wait for it."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A piece of work and, once it has ended, how it went. Times are seconds on a clock that never goes back."""

    work: Callable[[], Any]
    began_s: float = 0.0
    ended_s: float = 0.0
    result: Any = None
    error: Exception | None = None

    def run(self) -> None:
        """Do the work here and now."""
        self.began_s = time.perf_counter()
        try:
            self.result = self.work()
        except Exception as error:
            self.error = error
        self.ended_s = time.perf_counter()

    def outcome(self) -> Any:
        """What the work has returned. Raises what it raised."""
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class WorkQueue(Protocol):
    """Submitting is for one thread at a time. With nothing to do for a while, the queue does what it was opened
    with."""

    def submit(self, work: Callable[[], Any], on_end: Callable[[Ticket], None]) -> None:
        """Do `work` after all that was submitted before. `on_end` is called on the running event loop once it has
        ended; the next piece may have begun by then."""
        ...

    def run(self, work: Callable[[], Any]) -> Ticket:
        """The same, waiting for its end."""
        ...

    def close(self) -> None:
        """Wait for the work that is being done, drop what has not begun (it ends with an error), and tell of all ends
        that nobody was told of, at once and on this thread. May be called again."""
        ...


class ThreadQueue:
    """when_idle: does a small piece of work that can wait, and tells whether there may be more."""

    def __init__(self, when_idle: Callable[[], bool] = lambda: False) -> None:
        self._when_idle = when_idle
        self._waiting: queue.SimpleQueue[tuple[Ticket, Callable[[Ticket], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, work: Callable[[], Any], on_end: Callable[[Ticket], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(ticket: Ticket) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_end, ticket)

        self._put(Ticket(work), tell)

    def run(self, work: Callable[[], Any]) -> Ticket:
        ticket, ended = Ticket(work), threading.Event()
        self._put(ticket, lambda _: ended.set())
        ended.wait()
        return ticket

    def close(self) -> None:
        self._is_closed = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._when_idle = lambda: False

    def _put(self, ticket: Ticket, tell: Callable[[Ticket], None]) -> None:
        assert not self._is_closed, "the queue is closed"
        self._waiting.put((ticket, tell))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tokenmill-step", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            ticket, tell = entry
            if self._is_closed:
                ticket.error = AssertionError("closed before it began")
            else:
                ticket.run()
            tell(ticket)

    def _next(self) -> tuple[Ticket, Callable[[Ticket], None]] | None:
        try:
            return self._waiting.get(timeout=REST_S)
        except queue.Empty:
            while self._waiting.empty() and self._when_idle():
                pass
        return self._waiting.get()
