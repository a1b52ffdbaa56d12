"""A thread that works for an event loop, jobs in the order in which they come: what waits for a disk, waits there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..core.errors import Unavailable

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Periodic:
    job: Callable[[], None]
    period_s: float
    due_s: float


class BackgroundWriter:
    """`begin` runs first and `end` last, both in the thread. What a job raises that nobody waits for is a bug, of which
    the log tells; the thread goes on, because others wait for it."""

    def __init__(
        self, name: str, *, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._begin = begin
        self._end = end
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._periodic: list[_Periodic] = []
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Raises what `begin` raises."""
        begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(begun,), name=self._name, daemon=True)
        self._thread.start()
        error = begun.get()
        if error is not None:
            self._thread.join()
            self._thread = None
            raise error

    def close(self) -> None:
        """What was given is done when this returns."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def every(self, period_s: float, job: Callable[[], None]) -> None:
        """Have a job done whenever `period_s` have passed, from now on, until the thread ends."""
        self.put(lambda: self._periodic.append(_Periodic(job, period_s, time.monotonic() + period_s)))

    def put(self, job: Callable[[], None]) -> None:
        """Done in its turn; nobody waits for it, and it raises nothing."""
        self._jobs.put(job)

    def ask(self, job: Callable[[], object]) -> None:
        """A job in its turn, waited for. Raises what it raises."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                job()
            except Exception as error:  # whoever waits hears of it
                done.put(error)
            else:
                done.put(None)

        self.put(run)
        if (error := done.get()) is not None:
            raise error

    async def do(self, job: Callable[[], T]) -> T:
        """The result of a job, in its turn, or what it raises. Raises Unavailable when the thread is not open."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def answer(result: Any, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failure = None, None
            try:
                result = job()
            except Exception as error:  # whoever waits hears of it
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(answer, result, failure)

        if self._thread is None:
            raise Unavailable("The server is shutting down.")
        self._jobs.put(run)
        return await done

    def _run(self, begun: queue.SimpleQueue[Exception | None]) -> None:
        try:
            self._begin()
        except Exception as error:  # told to who opens
            begun.put(error)
            return
        begun.put(None)
        try:
            while True:
                due = min(self._periodic, key=lambda each: each.due_s, default=None)
                try:
                    job = self._jobs.get(timeout=max(0.0, due.due_s - time.monotonic()) if due else None)
                except queue.Empty:
                    assert due is not None
                    self._guarded(due.job)
                    due.due_s = time.monotonic() + due.period_s
                    continue
                if job is None:
                    return
                self._guarded(job)
        finally:
            self._periodic.clear()
            self._end()

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            _log.exception("A job failed.")
