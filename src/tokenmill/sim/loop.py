"""An asyncio loop whose selector advances a virtual clock instead of sleeping.

Runs are deterministic: ready callbacks go in order, timers by their time and then as they were armed, and nothing
depends on a set's order. Time is that of the timer that is due, to the last bit, whatever else has been due before.
Three ways of hanging are errors instead: a loop with nothing ready and nothing armed is a `Deadlock`; a spawned node
that dies ends the run at once with its exception; and time beyond `limit_s` is a `TimeLimit`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")
_MANY = 1000


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is armed: the run can never go on."""


class TimeLimit(RuntimeError):
    """The run went on for longer than it was allowed, in virtual time."""


class _Timer(asyncio.TimerHandle):
    """Without what a real loop keeps of its timers."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: VirtualLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]
            if self._scheduled:
                self._loop.drop_timer()


class _Past:
    """contextlib.contextmanager would cost three times as much."""

    __slots__ = ("_loop", "_when_s")

    def __init__(self, loop: VirtualLoop, when_s: float) -> None:
        self._loop = loop
        self._when_s = when_s

    def __enter__(self) -> None:
        self._when_s = self._loop.show(self._when_s)

    def __exit__(self, *error: object) -> None:
        self._loop.show(self._when_s)


class VirtualLoop(asyncio.BaseEventLoop):
    """Also a core.ports.Clock: `now()` is the loop's time, from 0. Of timers of one time, the one that was armed first
    is due first."""

    def __init__(self, limit_s: float = 1e6) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, _Timer]] = []
        self._failure: BaseException | None = None
        self._is_unwinding = False
        self._num_timers = self._num_dropped = 0
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._now_s

    def now(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, timer))
        return timer

    def drop_timer(self) -> None:
        """One was cancelled; they go when they would be due, or when they are many."""
        self._num_dropped += 1
        if 2 * self._num_dropped > len(self._timers) + _MANY:
            self._timers = [each for each in self._timers if not each[2]._cancelled]
            heapify(self._timers)
            self._num_dropped = 0

    def _run_once(self) -> None:
        """As BaseEventLoop does: one turn of what is ready, with the timers that are due. Where nothing is ready, time
        goes to the next timer, exactly: what is due at one time sees this time, and no other."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2]._cancelled:
            heappop(timers)
            self._num_dropped -= 1
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not timers:
                raise Deadlock(f"nothing is ready and nothing is armed at {self._now_s:.6f} s of virtual time")
            self._now_s = max(self._now_s, timers[0][0])
            if self._now_s > self._limit_s:
                raise TimeLimit(f"more than {self._limit_s} s of virtual time")
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            timer = heappop(timers)[2]
            if timer._cancelled:
                self._num_dropped -= 1
            else:
                timer._scheduled = False
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def past(self, when_s: float) -> _Past:
        """The clock shows `when_s`, for what is told late."""
        return _Past(self, when_s)

    def show(self, when_s: float) -> float:
        """What the clock shows from now on; what it showed before."""
        now_s, self._now_s = self._now_s, when_s
        return now_s

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a node: a task whose death ends the run."""
        task = self.create_task(coroutine, name=name)
        task.add_done_callback(self._on_node_done)
        return task

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end and return its result, or raise what killed it or any node. Then close the loop."""
        task = self.create_task(main, name="main")
        task.add_done_callback(self._on_main_done)
        try:
            self.run_forever()
            if self._failure is not None:
                raise self._failure
            return task.result()
        finally:
            self._unwind()
            self.close()

    def _on_main_done(self, _: asyncio.Task[Any]) -> None:
        self.stop()

    def _on_node_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, error: BaseException | None) -> None:
        if self._failure is None:
            self._failure = error
        if not self._is_unwinding:
            self.stop()

    def _unwind(self) -> None:
        """Cancel whatever is left, so that nothing is destroyed while pending."""
        self.set_exception_handler(lambda _loop, _context: None)
        self._limit_s = float("inf")
        self._is_unwinding = True
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        for task in tasks:
            task.remove_done_callback(self._on_main_done)
            task.remove_done_callback(self._on_node_done)
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _write_to_self(self) -> None:
        raise AssertionError("a simulated run has no threads")


@contextmanager
def rare_collections() -> Iterator[None]:
    """What there is stays, so the collector need not walk it; and what a simulation drops is seldom a cycle."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
