"""An asyncio loop whose selector advances a virtual clock instead of sleeping.

Runs are deterministic: ready callbacks go in order, timers by their time, and nothing depends on a set's order. Three
ways of hanging are errors instead: a loop with nothing ready and nothing armed is a `Deadlock`; a spawned node that
dies ends the run at once with its exception; and time beyond `limit_s` is a `TimeLimit`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Timers closer than this fire together. At 0 none would ever be due: the loop compares with <, not <=.
_RESOLUTION_S = 1e-9


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is armed: the run can never go on."""


class TimeLimit(RuntimeError):
    """The run went on for longer than it was allowed, in virtual time."""


class _VirtualSelector:
    """Stands where a real loop waits for sockets; there are none."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise Deadlock(f"nothing is ready and nothing is armed at {self._loop.time():.6f} s of virtual time")
        if timeout_s > 0:
            self._loop.advance(timeout_s)
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Also a core.ports.Clock: `now()` is the loop's time, from 0."""

    def __init__(self, limit_s: float = 1e6) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._clock_resolution = _RESOLUTION_S
        self._selector = _VirtualSelector(self)
        self._failure: BaseException | None = None
        self._is_unwinding = False
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._now_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
        if self._now_s > self._limit_s:
            raise TimeLimit(f"more than {self._limit_s} s of virtual time")

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
