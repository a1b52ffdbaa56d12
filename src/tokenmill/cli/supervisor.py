"""Keeps one engine process alive and its link attached to the front end's client.

    start -> attach -> (Ready) ... -> ended -> detach -> wait -> start -> ...

A process that ends before it was ever ready ends `run` with the reason it gave: what it was asked cannot be loaded. One
that ends later is replaced: at once where it has made steps, or served until somebody killed it; else after a delay
that doubles each time. One that has work and makes no progress (see Watchdog) is ended. Knows nothing of HTTP or of
models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from ..cluster.events import Cause
from ..core.errors import ConfigError, TokenmillError
from ..core.events import Drain, FromEngine, Ready, ToEngine
from ..core.ports import FrontEnd
from ..net.child_process import HEARTBEAT_S, open_heartbeat, open_lifeline, read_to_end, take_heartbeats
from ..net.mapped_files import keep_copy, keep_lost, new_path
from ..net.system import MonotonicClock
from ..net.unix import UnixFrontEnd, private_address
from ..node.machine import oom_kills
from .engine_process import Launch

if TYPE_CHECKING:  # not to be imported before an engine is started
    from ..server.client import EngineClient
    from ..server.engine_link import AttachedEngine


class EngineCrashed(TokenmillError):
    """The engine process ended while loading, for no reason it could name."""

    kind = "engine_crashed"


SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside: no process gives them to itself by a fault."""

MEMORY_OVERRUN = 1.25
"""A process that was killed, and had so many times the memory that was planned, was killed for its memory."""


class ProcessExit(NamedTuple):
    """How a process ended. error: as a sentence; status: exit code, the negative number of a signal, or None where
    nobody can tell; peak_bytes: the most memory that it had since it served, 0 where nobody can tell."""

    error: TokenmillError
    status: int | None = None
    peak_bytes: int = 0

    def cause(self, planned_bytes: int, *, was_killed_by_us: bool = False, has_oom_kill: bool = False) -> Cause:
        """planned_bytes: what the engine said it takes at most; 0: it has not said. was_killed_by_us: its supervisor
        killed it, for what it did or failed to do. has_oom_kill: the kernel has lately killed a process for want of
        memory."""
        if was_killed_by_us:
            return Cause.FAULT
        if self.status is None:
            return Cause.UNKNOWN
        if -self.status not in SENT:
            return Cause.FAULT
        used_too_much = 0 < MEMORY_OVERRUN * planned_bytes < self.peak_bytes
        return Cause.FAULT if self.status == -signal.SIGKILL and (has_oom_kill or used_too_much) else Cause.OUTSIDE


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Of a process that has ended."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class EngineHandle(Protocol):
    """An engine process as its supervisor sees it.

    address, flight: of its link and of its flight recorder."""

    address: str
    flight: str

    async def ended(self) -> ProcessExit:
        """Waits for the process to end, and tells how it did."""
        ...

    def has_beaten(self) -> bool:
        """Whether it has shown progress since this was last asked."""
        ...

    def kill(self) -> bool:
        """Ends the process at once: it keeps nothing worth saving. Whether it had not ended before."""
        ...

    def close(self) -> None:
        """Ends the process, if it has not ended, and removes its socket."""
        ...


@dataclass(slots=True)
class Channels:
    """What an engine process is given besides its launch, and this end of each: the link's folder, the report pipe, the
    lifeline, the heartbeat. `close` them when it is over."""

    address: str
    report_fd: int
    heartbeat_fd: int
    theirs: tuple[int, int, int]
    held: contextlib.ExitStack

    @classmethod
    def open(cls) -> Self:
        """theirs: report, lifeline and heartbeat; `given` closes them here."""
        with contextlib.ExitStack() as held:
            address = held.enter_context(private_address())
            report_fd, reporting_fd = os.pipe()
            held.callback(os.close, report_fd)
            read_fd, write_fd = open_lifeline()
            held.callback(os.close, write_fd)
            heartbeat_fd, send_fd = open_heartbeat()
            held.callback(os.close, heartbeat_fd)
            return cls(address, report_fd, heartbeat_fd, (reporting_fd, read_fd, send_fd), held.pop_all())

    def given(self) -> None:
        for fd in self.theirs:
            os.close(fd)

    async def read_report(self) -> bytes:
        """All of it: it ends with the process."""
        return await read_to_end(self.report_fd)

    def close(self) -> None:
        self.held.close()


def why_ended(report: bytes, status: int | None) -> TokenmillError:
    """status: as of a ProcessExit."""
    if report:
        return ConfigError(json.loads(report)["error"])
    if status is None:
        return EngineCrashed("The engine process is gone.")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return EngineCrashed(f"The engine process {how}.")


class EngineProcess:
    """An EngineHandle that loads for itself."""

    def __init__(self, process: subprocess.Popen[bytes], channels: Channels, flight: str) -> None:
        self.address = channels.address
        self.flight = flight
        self._process = process
        self._channels = channels
        self._peak_bytes = 0

    @classmethod
    def start(cls, launch: Launch) -> EngineProcess:
        channels = Channels.open()
        reporting_fd, read_fd, send_fd = channels.theirs
        try:
            # -P: a folder called tokenmill in the working directory is not the package. A session of its own
            # keeps the terminal's Ctrl-C away until the process can ignore it.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.cli.engine_process"],
                stdin=subprocess.PIPE,
                stdout=reporting_fd,
                pass_fds=(read_fd, send_fd),
                start_new_session=True,
            )
        except BaseException:
            channels.close()
            raise
        finally:
            channels.given()
        assert process.stdin is not None
        told = replace(launch, address=channels.address, lifeline_fd=read_fd, heartbeat_fd=send_fd)
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(told.to_json())
        return cls(process, channels, launch.flight)

    async def ended(self) -> ProcessExit:
        report = await self._channels.read_report()
        self._reap(0)
        status = self._process.wait()
        # What this process had when it forked counts as the child's until that becomes another program.
        own = peak_bytes(resource.getrusage(resource.RUSAGE_SELF))
        return ProcessExit(why_ended(report, status), status, self._peak_bytes if self._peak_bytes > own else 0)

    def _reap(self, options: int) -> bool:
        """Whether it has ended. options: WNOHANG does not wait for that."""
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status, usage = os.wait4(self._process.pid, options)
                if pid:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
                    self._peak_bytes = peak_bytes(usage)
        return self._process.returncode is not None

    def has_beaten(self) -> bool:
        return take_heartbeats(self._channels.heartbeat_fd)

    def kill(self) -> bool:
        has_ended = self._reap(os.WNOHANG)
        self._process.kill()
        return not has_ended

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._channels.close()


LOOK_S = HEARTBEAT_S


class Watchdog:
    """Tells an engine that is stuck from one that is slow or idle, and from one whose supervisor was itself stopped.

    An engine is stuck when it has had work for `limit_s` and given no sign: neither the end of a step nor a heartbeat
    from within one (net/child_process.py). Loading is not watched: an engine has no work before it is ready.

    limit_s    0: nothing is ever stuck
    stalled_s  for how long there has been work and no sign
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.stalled_s = 0.0
        self._looked_s = -1.0
        self._num_steps = 0

    def finds_stuck(self, now_s: float, *, has_work: bool, has_beaten: bool, num_steps: int) -> bool:
        """To be asked every LOOK_S. What passes between two looks counts for no more than twice that: where it is
        more, this process was stopped, or the machine slept, and the engine may have been, too."""
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S) if self._looked_s >= 0 else 0.0
        gives_sign = has_beaten or num_steps != self._num_steps
        self._looked_s, self._num_steps = now_s, num_steps
        self.stalled_s = 0.0 if gives_sign or not has_work else self.stalled_s + passed_s
        return 0 < self._limit_s <= self.stalled_s


FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
LONGEST_AWAITED_S = 5.0
"""While requests wait for an engine, the delay grows no further."""
SETTLED_S = 60.0
"""After a process that lived this long the next delay is the first again, also where it made no step."""
EXPLAINED_S = 5.0
"""A process that lives so long after its link has ended is ended. Its end, whenever it is heard of, tells its cause."""

OOM_LOOKS = 10
"""The kernel counts a kill when it begins; the process ends when its memory is taken down, which may take seconds."""

log = logging.getLogger(__name__)


class Supervisor:
    """A context manager: entering starts the first process, so that the engine loads while the front end does, and
    leaving ends the one that runs then. `engine_timeout_s`: an engine that has work and makes no progress for so long
    is ended; 0: never. `flight_dir`: folder of the flight recorders' files; "": there are none. `was_ready`: an engine
    of its own has been. `start`: what makes a process of it."""

    def __init__(
        self,
        launch: Launch,
        engine_timeout_s: float = 0.0,
        flight_dir: str = "",
        start: Callable[[Launch], EngineHandle] = EngineProcess.start,
    ) -> None:
        self._launch = launch
        self._start_process = start
        self._flight_dir = flight_dir
        self._num_started = 0
        self.was_ready = False
        self._engine_timeout_s = engine_timeout_s
        self._process: EngineHandle | None = None
        self._link: FrontEnd | None = None
        self._is_draining = False
        self._has_drained = asyncio.Event()
        self._comes_back: bool | None = None  # after an end that an operator has asked for
        self._was_killed_by_us = False  # of the process under way
        self._oom_kills: deque[int] = deque(maxlen=OOM_LOOKS)  # counts of the last looks

    @property
    def pool(self) -> str:
        """In which its next process serves."""
        return self._launch.pool

    @pool.setter
    def pool(self, pool: str) -> None:
        self._launch = replace(self._launch, pool=pool)

    def will_end(self, comes_back: bool) -> None:
        """The engine has been told to end when it has finished what it has; `comes_back`: another is started then."""
        self._comes_back = comes_back

    def __enter__(self) -> Supervisor:
        self._process = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            if self._process.flight:
                Path(self._process.flight).unlink(missing_ok=True)
            self._process = None

    def _start(self) -> EngineHandle:
        name = f"{self._launch.worker}-{self._num_started}"
        flight = new_path(self._flight_dir, name) if self._flight_dir else ""
        self._num_started += 1
        return self._start_process(replace(self._launch, flight=flight))

    def keep_flight(self) -> None:
        """Copy what the engine has done lately to a file that stays, and tell of it in the log."""
        flight = "" if self._process is None else self._process.flight
        kept = keep_copy(flight, "asked") if flight else None
        if kept is not None:
            log.warning("What the engine did lately is in %s.", kept)

    async def drain(self, within_s: float) -> None:
        """Have the engine save what it keeps and end, which it may take `within_s` for. To be called when no request is
        open; `run` goes on until then."""
        if self._link is None:
            return
        self._is_draining = True
        with contextlib.suppress(EOFError, TimeoutError):
            async with asyncio.timeout(within_s):
                await self._link.send(Drain())  # waits for an engine that is still loading
                await self._has_drained.wait()
        if not self._has_drained.is_set():
            log.warning("The engine had not saved all of its KV after %.1f s.", within_s)

    async def run(
        self,
        client: EngineClient,
        complete: Callable[[Ready], Ready],
        has_begun: Callable[[], bool] = lambda: False,
    ) -> None:
        """Never returns; raises the reason when the first process ends without having been ready, unless `has_begun`
        tells that another like it was, or when cancelled. `complete` is given each Ready and returns it with what only
        the front end knows."""
        name, delay_s = self._launch.worker, 0.0
        started_s, load_s, planned_bytes = time.monotonic(), 0.0, 0

        def note(ready: Ready) -> Ready:
            nonlocal load_s, planned_bytes
            self.was_ready, planned_bytes = True, sum(size for _, size in ready.memory)
            load_s = time.monotonic() - started_s
            return complete(ready)

        while True:
            if self._process is None:
                self._process = self._start()
            client.roster.start(name, self)
            started_s, planned_bytes, self._was_killed_by_us = time.monotonic(), 0, False
            self._link = link = _opened(self._process)
            attached = client.attach(
                Watched(link, note), on_broken=self._kill, flight=self._process.flight, explained_s=EXPLAINED_S
            )
            watch = asyncio.create_task(self._end_when_stuck(self._process, attached), name="engine-watch")
            cause = Cause.UNKNOWN
            try:
                reason, _, _ = end = await self._process.ended()
                has_oom_kill = bool(self._oom_kills) and oom_kills() > self._oom_kills[0]
                cause = end.cause(planned_bytes, was_killed_by_us=self._was_killed_by_us, has_oom_kill=has_oom_kill)
            finally:
                self._link = None
                watch.cancel()
                has_served = attached.num_steps > 0 or (planned_bytes > 0 and cause is Cause.OUTSIDE)
                lived_s = time.monotonic() - started_s
                delay_s = next_delay_s(delay_s, lived_s, has_served=has_served, is_awaited=client.num_open > 0)
                client.detach(attached, "The engine is down and will be restarted.", delay_s + load_s, cause)
                client.roster.lose(name)
                link.close()
            self._process.close()
            lost = keep_lost(self._process.flight) if self._process.flight else None
            self._process = None
            if self._is_draining:
                self._has_drained.set()
                await asyncio.get_running_loop().create_future()  # never: whoever has it drained ends it
            if self._comes_back is not None:
                if lost is not None:
                    log.error("%s Worker %s was to end, but not so.", reason.message, name)
                if not self._comes_back:
                    client.roster.remove(name)
                    await asyncio.get_running_loop().create_future()  # never: it is not wanted any more
                self._comes_back, delay_s = None, 0.0
                continue
            if not (self.was_ready or has_begun()):
                raise reason
            _tell_restart(reason.message, name, delay_s, lost)
            await asyncio.sleep(delay_s)

    async def _end_when_stuck(self, process: EngineHandle, attached: AttachedEngine) -> None:
        watchdog = Watchdog(self._engine_timeout_s)
        while not watchdog.finds_stuck(
            time.monotonic(),
            has_work=attached.num_open > 0,
            has_beaten=process.has_beaten(),
            num_steps=attached.num_steps,
        ):
            self._oom_kills.append(oom_kills())
            await asyncio.sleep(LOOK_S)
        log.error(
            "The engine has made no progress for %g s with %d requests open.", self._engine_timeout_s, attached.num_open
        )
        self._kill()

    def _kill(self) -> None:
        """The process under way, for what it does or fails to do."""
        if self._process is not None:
            self._was_killed_by_us |= self._process.kill()


def next_delay_s(before_s: float, lived_s: float, *, has_served: bool, is_awaited: bool) -> float:
    """How long to wait before an engine is started again. before_s: it was started after this delay; lived_s: and
    lived so long; is_awaited: requests are open."""
    if has_served:
        return 0.0
    if lived_s > SETTLED_S:
        return FIRST_DELAY_S
    return min(max(2 * before_s, FIRST_DELAY_S), LONGEST_AWAITED_S if is_awaited else LONGEST_DELAY_S)


class Watched:
    """A front end's link whose Ready passes through `complete`."""

    def __init__(self, link: FrontEnd, complete: Callable[[Ready], Ready]) -> None:
        self._link = link
        self._complete = complete

    async def send(self, message: ToEngine) -> None:
        await self._link.send(message)

    async def receive(self) -> FromEngine:
        message = await self._link.receive()
        return self._complete(message) if isinstance(message, Ready) else message


def _opened(process: EngineHandle) -> UnixFrontEnd:
    link = UnixFrontEnd(process.address, MonotonicClock())
    link.open()
    return link


def _tell_restart(why: str, name: str, delay_s: float, lost: Path | None) -> None:
    """lost: where the flight of the process that has ended is kept."""
    when = f"in {delay_s:g} s" if delay_s else "at once"
    log.error("%s Worker %s is restarted %s.", why, name, when)
    if lost is not None:
        log.error("What it did last is in %s; see: tokenmill flight %s", lost, lost)
