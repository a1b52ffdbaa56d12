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
from heapq import heappush
from math import ulp
from typing import Any, TypeVar

T = TypeVar("T")


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is armed: the run can never go on."""


class TimeLimit(RuntimeError):
    """The run went on for longer than it was allowed, in virtual time."""


class _Timer(asyncio.TimerHandle):
    """Of timers of one time, the one that was armed first is due first."""

    __slots__ = ("number",)

    def __lt__(self, other: Any) -> bool:
        mine, others = self._when, other._when  # type: ignore[attr-defined]
        return bool(mine < others or (mine == others and self.number < other.number))  # type: ignore[attr-defined]


class _VirtualSelector:
    """Stands where a real loop waits for sockets; there are none."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise Deadlock(f"nothing is ready and nothing is armed at {self._loop.time():.6f} s of virtual time")
        if timeout_s > 0:
            self._loop.advance()
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Also a core.ports.Clock: `now()` is the loop's time, from 0."""

    def __init__(self, limit_s: float = 1e6) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._clock_resolution = ulp(0.0)
        self._selector = _VirtualSelector(self)
        self._failure: BaseException | None = None
        self._is_unwinding = False
        self._num_timers = 0
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._now_s

    def now(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = self._num_timers  # type: ignore[attr-defined]
        self._num_timers += 1
        heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def advance(self) -> None:
        """To the next timer, exactly: what is due at one time sees this time, and no other. The loop fires timers that
        are due before `now + resolution`; with the least resolution that changes `now`, these are those due now."""
        self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        self._clock_resolution = ulp(self._now_s)
        if self._now_s > self._limit_s:
            raise TimeLimit(f"more than {self._limit_s} s of virtual time")

    @contextmanager
    def past(self, when_s: float) -> Iterator[None]:
        """The clock shows `when_s`, for what is told late."""
        now_s, self._now_s = self._now_s, when_s
        try:
            yield
        finally:
            self._now_s = now_s

    async def sleep_until(self, when_s: float) -> None:
        """Until this very time, which may be now: `asyncio.sleep` of a difference would be off by a rounding."""
        if when_s > self._now_s:
            woken: asyncio.Future[None] = self.create_future()
            timer = self.call_at(when_s, _wake, woken)
            try:
                await woken
            finally:
                timer.cancel()

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

    # What BaseEventLoop asks of a loop with a selector.

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

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
