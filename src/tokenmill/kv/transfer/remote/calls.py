"""Calls of a store on threads, each of which ends in time whatever the store does.

A call that is late goes on on its thread until its own limit ends it: what it shares with the rest, it touches only
while its `Chunk` says that the call is not over.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from .breaker import Breaker

ASK, LOAD, SAVE = "ask", "load", "save"
"""Kinds of calls, each on threads of its own: a look does not wait until much has been loaded."""

SAVE_NICE = 5

_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class Chunk:
    """What one thread does of a call. Who has the lock, and finds it not over, may touch what is shared."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def check(self) -> None:
        """With the lock. Raises TimeoutError."""
        if self.is_over:
            raise TimeoutError("It takes too long.")


class Calls:
    """To one store, on one event loop.

    probe    whether it answers again; raises OSError, EOFError
    counts   timeouts, errors
    """

    def __init__(self, name: str, num_threads: int, probe: Callable[[], Awaitable[None]], retry_s: float) -> None:
        self._num_threads = num_threads
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._answered_s = 0.0
        self.breaker = Breaker(name, probe, retry_s)
        self.counts: Counter[str] = Counter()

    def open(self) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(self._num_threads, f"kv-{kind}", _give_way if kind == SAVE else None)
            for kind in (ASK, LOAD, SAVE)
        }

    async def close(self) -> None:
        await self.breaker.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    async def one(self, kind: str, call: Callable[[], _Result]) -> _Result:
        """Raises what it raises."""
        result = await asyncio.get_running_loop().run_in_executor(self._pools[kind], call)
        self._answered_s = time.monotonic()
        return result

    async def all(
        self, kind: str, calls: Sequence[Callable[[], _Result]], limit_s: float, chunks: Sequence[Chunk] = ()
    ) -> list[_Result | None]:
        """What each call gave; None where it failed, or was late. The breaker hears of it. Where others were answered
        meanwhile, late ones are no failure of the store: there is much to do."""
        began_s = time.monotonic()
        tasks = [asyncio.ensure_future(self.one(kind, call)) for call in calls]
        if not tasks:
            return []
        try:
            done, late = await asyncio.wait(tasks, timeout=limit_s)
        finally:
            for chunk in chunks:
                with chunk.lock:
                    chunk.is_over = True
            for task in tasks:
                task.cancel()
        errors = [error for task in done if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, OSError | EOFError):
                raise error
        if errors or late:
            why = errors[0] if errors else TimeoutError("It takes too long.")
            is_slow = isinstance(why, TimeoutError)
            self.counts["timeouts" if is_slow else "errors"] += 1
            if not is_slow or self._answered_s < began_s:
                self.breaker.fail(said(why))
        else:
            self.breaker.succeed()
        return [None if task in late or task.exception() is not None else task.result() for task in tasks]


def _give_way() -> None:
    """Nobody waits for what is saved: this thread gets less than others, where the system can tell them apart. It is
    not starved either: while it has the interpreter's lock, others wait for it."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICE)


def said(error: BaseException) -> str:
    return str(error) or type(error).__name__
