"""One life of an engine as its supervisor sees it: a process, and the ends of what connects the two."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from ..cluster.events import Cause
from ..core.errors import ConfigError, TokenmillError
from ..net.child_process import open_heartbeat, open_lifeline, read_to_end, take_heartbeats
from ..net.unix import private_address
from .launch import Launch


class EngineCrashed(TokenmillError):
    """The engine process ended while loading, for no reason it could name."""

    kind = "engine_crashed"


SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside: no process gives them to itself by a fault."""

MEMORY_OVERRUN = 1.25
"""A process that was killed, and had so many times the memory that was planned, was killed for its memory."""


class Death(NamedTuple):
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
        was_hungry = 0 < MEMORY_OVERRUN * planned_bytes < self.peak_bytes
        return Cause.FAULT if self.status == -signal.SIGKILL and (has_oom_kill or was_hungry) else Cause.OUTSIDE


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Of a process that has ended."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class EngineLife(Protocol):
    """address, flight: of its link and of its flight recorder."""

    address: str
    flight: str

    async def ended(self) -> Death:
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
class Ends:
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
    """status: as of a Death."""
    if report:
        return ConfigError(json.loads(report)["error"])
    if status is None:
        return EngineCrashed("The engine process is gone.")
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return EngineCrashed(f"The engine process {how}.")


class EngineProcess:
    """An EngineLife that loads for itself."""

    def __init__(self, process: subprocess.Popen[bytes], ends: Ends, flight: str) -> None:
        self.address = ends.address
        self.flight = flight
        self._process = process
        self._ends = ends
        self._peak_bytes = 0

    @classmethod
    def start(cls, launch: Launch) -> EngineProcess:
        ends = Ends.open()
        reporting_fd, read_fd, send_fd = ends.theirs
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
            ends.close()
            raise
        finally:
            ends.given()
        assert process.stdin is not None
        told = replace(launch, address=ends.address, lifeline_fd=read_fd, heartbeat_fd=send_fd)
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(told.to_json())
        return cls(process, ends, launch.flight)

    async def ended(self) -> Death:
        report = await self._ends.read_report()
        self._reap(0)
        status = self._process.wait()
        # What this process had when it forked counts as the child's until that becomes another program.
        own = peak_bytes(resource.getrusage(resource.RUSAGE_SELF))
        return Death(why_ended(report, status), status, self._peak_bytes if self._peak_bytes > own else 0)

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
        return take_heartbeats(self._ends.heartbeat_fd)

    def kill(self) -> bool:
        has_ended = self._reap(os.WNOHANG)
        self._process.kill()
        return not has_ended

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._ends.close()
