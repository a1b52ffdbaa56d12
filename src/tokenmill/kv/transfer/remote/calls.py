"""Calls of a store on threads, each of which ends in time whatever the store does.

A call that is late goes on on its thread until its own limit ends it: what it shares with the rest, it touches only
while its `Chunk` says that the call is not over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)
MOST_FAILURES = 3
FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 4.0
_Result = TypeVar("_Result")
ASK, LOAD, SAVE = "ask", "load", "save"
"""Kinds of calls, each on threads of its own: a look does not wait until much has been loaded."""
SAVE_NICE = 5


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


class Breaker:
    """Keeps a store that is down or slow from costing time: after a few failures in a row nobody asks it any more.

        closed --- `most_failures` in a row ---> open --- a probe succeeds ---> closed
                                                 probes in the background, ever less often

    A timeout is a failure: who waits for a slow store is better off without.

    For one store, on one event loop.

    name           as the log has it
    probe          whether the store answers again: raises OSError where it does not
    first_pause_s  before the first probe; each later one waits twice as long, at most MOST_PAUSE_S, until a call that
                   was no probe has succeeded
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[None]],
        first_pause_s: float = FIRST_PAUSE_S,
        most_failures: int = MOST_FAILURES,
    ) -> None:
        self._name = name
        self._probe = probe
        self._first_pause_s = self._pause_s = first_pause_s
        self._most = most_failures
        self._num_failures = 0
        self._probing: asyncio.Task[None] | None = None
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether the store is not to be asked."""
        return self._probing is not None

    def succeed(self) -> None:
        self._num_failures = 0
        self._pause_s = self._first_pause_s

    def fail(self, why: str) -> None:
        """A call failed. Says so in the log when it is the last that is made for now."""
        self._num_failures += 1
        if self._num_failures >= self._most:
            self.trip(why)

    def trip(self, why: str) -> None:
        if self._probing is None:
            self.num_opened += 1
            log.warning("KV is not looked for in %s for now: %s", self._name, why)
            self._probing = asyncio.get_running_loop().create_task(self._wait_for_it())

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _wait_for_it(self) -> None:
        while True:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
            try:
                await self._probe()
            except (OSError, EOFError) as error:
                log.debug("%s does not answer yet: %s", self._name, error)
            else:
                break
        self._num_failures, self._probing = 0, None
        log.warning("KV is looked for in %s again.", self._name)


class Closing(Protocol):
    """A connection."""

    def close(self) -> None: ...


_Connection = TypeVar("_Connection", bound=Closing)


class Connections(Generic[_Connection]):
    """connect  makes one until so many seconds of time.monotonic; raises OSError, EOFError
    idle_s      for so long one is kept that nobody uses
    """

    def __init__(self, connect: Callable[[float], _Connection], idle_s: float) -> None:
        self._connect = connect
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[tuple[float, _Connection]] = []
        self._is_closed = False

    def use(self, limit_s: float, call: Callable[[_Connection, float], _Result]) -> _Result:
        """`call(connection, until_s)` with one that nobody else uses meanwhile; where one that was kept has been closed
        by the other end, once more with a fresh one. Raises what it raises, and OSError."""
        until_s = time.monotonic() + limit_s
        kept = self._take()
        if kept is not None:
            with suppress(ConnectionError, EOFError):
                return self._use_once(kept, until_s, call)
        return self._use_once(self._connect(until_s), until_s, call)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _take(self) -> _Connection | None:
        """The one that was used last; those that nobody has used for long are closed."""
        with self._lock:
            oldest_s = time.monotonic() - self._idle_s
            stale = [connection for since_s, connection in self._idle if since_s < oldest_s]
            self._idle = [kept for kept in self._idle if kept[0] >= oldest_s]
            found = self._idle.pop()[1] if self._idle else None
        for connection in stale:
            connection.close()
        return found

    def _use_once(
        self, connection: _Connection, until_s: float, call: Callable[[_Connection, float], _Result]
    ) -> _Result:
        try:
            result = call(connection, until_s)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return result
        connection.close()
        return result
