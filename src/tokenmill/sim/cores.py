"""Cores of a host that its processes share: workers' compute threads, front ends and the clients that load them.

A process does one job after the other, as an event loop or an engine does; while it does one, its threads want a core
each. Up to as many threads as there are cores run at full speed; beyond that all run at the same part of it, which is
processor sharing (Kleinrock, Queueing Systems II, 4.4) by threads, as a fair scheduler of an operating system does it
where slices are short against jobs. A job is a number of seconds that it takes with cores of its own.

One number counts what every running thread has had so far, so that an event costs the logarithm of how many
processes run, and nothing is ever recomputed for all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from .loop import VirtualLoop

_SAME_S = 2e-9
"""Ends closer than this are the same: the loop's timers are no finer."""


class Host:
    """`cores`: 0 where there are more than are ever wanted. `speed`: of each thread now, 1.0 where all have cores.
    `num_threads` run now, `num_step_threads` of them for processes that compute steps."""

    def __init__(self, loop: VirtualLoop, cores: int, name: str = "host") -> None:
        self.name = name
        self.cores = cores
        self.num_threads = 0
        self.num_step_threads = 0
        self.speed = 1.0
        self.processes: dict[str, Process] = {}
        self._loop = loop
        self._slowness = 1.0
        self._had_s = 0.0  # by each thread that ran all the time
        self._last_s = 0.0
        self._ends: list[tuple[float, int, Process]] = []
        self._num_begun = 0
        self._timer: asyncio.TimerHandle | None = None

    def process(self, name: str, threads: int = 1, *, is_steps: bool = False) -> Process:
        """A process of its own, which does one job at a time on so many threads. is_steps: it computes steps, which
        take memory bandwidth and caches from those of others."""
        assert threads >= 1, threads
        assert name not in self.processes, name
        process = self.processes[name] = Process(self, self._loop, name, threads, is_steps)
        return process

    def slow(self, factor: float) -> None:
        """All it does takes so many times as long from now on."""
        self._advance()
        self._slowness = factor
        self._set_speed()

    def _begin(self, process: Process) -> None:
        """Its next job."""
        self._advance()
        job = process._jobs[0]
        seconds = job.seconds + job.crowded_s * self._crowding(process) if job.crowded_s else job.seconds
        process._number = self._num_begun
        heappush(self._ends, (self._had_s + seconds, self._num_begun, process))
        self._num_begun += 1
        process._running = job.threads
        self._count(process, 1)
        self._set_speed()

    def _crowding(self, process: Process) -> float:
        """Of the cores that its threads leave, the share that steps of others have now. As often as others begin while
        it runs, they end: so what is there at its begin is right on average."""
        left = self.cores - process.threads
        return min(1.0, self.num_step_threads / left) if left > 0 else 0.0

    def _count(self, process: Process, sign: int) -> None:
        self.num_threads += sign * process._running
        if process.is_steps:
            self.num_step_threads += sign * process._running

    def _stop(self, process: Process) -> None:
        """Its job has ended, or will never."""
        self._advance()
        process._number = -1
        self._count(process, -1)
        self._set_speed()

    def _advance(self) -> None:
        now = self._loop.time()
        self._had_s += (now - self._last_s) * self.speed
        self._last_s = now

    def _set_speed(self) -> None:
        is_scarce = 0 < self.cores < self.num_threads
        self.speed = (self.cores / self.num_threads if is_scarce else 1.0) / self._slowness
        ends = self._ends
        while ends and ends[0][2]._number != ends[0][1]:
            heappop(ends)
        due_s = math.inf
        if ends:
            due_s = self._last_s + max(0.0, ends[0][0] - self._had_s) / self.speed
        else:
            self._had_s = 0.0  # nobody runs: small numbers are exact for longer
        if self._timer is not None:
            if self._timer.when() == due_s:
                return
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer = self._loop.call_at(due_s, self._on_end)

    def _on_end(self) -> None:
        self._timer = None
        self._advance()
        near_s = self._had_s + _SAME_S
        ended: list[Process] = []
        while self._ends and self._ends[0][0] <= near_s:
            _, number, process = heappop(self._ends)
            if process._number == number:
                process._number = -1
                self._count(process, -1)
                ended.append(process)
        for process in ended:
            process._next()
        self._set_speed()


class _Job(NamedTuple):
    seconds: float
    then: Callable[[], object]
    threads: int
    crowded_s: float


class Process:
    """busy_s: of virtual time in which it had a job. Its jobs end in the order they came in."""

    def __init__(self, host: Host, loop: VirtualLoop, name: str, threads: int, is_steps: bool) -> None:
        self.name = name
        self.threads = threads
        self.is_steps = is_steps
        self.host = host
        self.busy_s = 0.0
        self._loop = loop
        self._jobs: deque[_Job] = deque()
        self._began_s = 0.0
        self._running = 0  # threads of the job that runs
        self._number = -1  # of the job that runs; -1: none does

    def submit(self, seconds: float, then: Callable[[], object], threads: int = 0, crowded_s: float = 0.0) -> None:
        """A job of so many seconds on cores of its own; `then` is called at its end. threads: 0: as many as ever.
        crowded_s: by so much longer it takes where steps of others have all cores that its threads leave."""
        assert seconds >= 0 and math.isfinite(seconds), seconds
        self._jobs.append(_Job(seconds, then, threads or self.threads, crowded_s))
        if len(self._jobs) == 1:
            self._began_s = self._loop.time()
            self.host._begin(self)

    def kill(self) -> None:
        """It has died: its jobs never end."""
        if self._jobs:
            self.busy_s += self._loop.time() - self._began_s
            self._jobs.clear()
            self.host._stop(self)

    def _next(self) -> None:
        """The job in front has ended."""
        now = self._loop.time()
        self.busy_s += now - self._began_s
        then = self._jobs.popleft().then
        if self._jobs:
            self._began_s = now
            self.host._begin(self)
        then()
