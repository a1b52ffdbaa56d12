"""The front end's side of a zygote: the process that has the weights, and forks engines (see zygote_process).

A zygote that has ended is replaced, with growing delays; the engines it had forked live on. Its successor loads the
weights again, so there are two copies of them until engines of the first have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Self

from ..core.errors import ConfigError, TokenmillError
from ..net.child_process import take_heartbeats
from .engine_process import Launch
from .supervisor import FIRST_DELAY_S, LONGEST_DELAY_S, Channels, EngineCrashed, ProcessExit, why_ended
from .zygote_process import MAX_MESSAGE

_END_S = 5.0
"""What a killed process may take until it is gone."""

_log = logging.getLogger(__name__)


def can_fork() -> bool:
    """Whether this system has what a zygote needs: descriptors of processes, which are Linux's."""
    return hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")


class ForkedEngine:
    """An EngineHandle, made by a zygote. `process_fd`: of its process, -1 until the zygote has told."""

    def __init__(self, channels: Channels, flight: str) -> None:
        self.address = channels.address
        self.flight = flight
        self.pid = 0
        self.process_fd = -1
        self._channels = channels
        self._status: int | None = None
        self._peak_bytes = 0
        self._error: TokenmillError | None = None
        self._is_told = asyncio.Event()
        self._is_killed = self._is_closed = False

    def begun(self, pid: int, process_fd: int) -> None:
        self.pid, self.process_fd = pid, process_fd
        if self._is_killed:
            self.kill()
        if self._is_closed:
            self._forget()

    def told(self, status: int | None = None, error: TokenmillError | None = None, peak_bytes: int = 0) -> None:
        """How it ended, or that nobody will tell."""
        self._status, self._error, self._peak_bytes = status, error, peak_bytes
        self._is_told.set()

    async def ended(self) -> ProcessExit:
        """A Zygote tells of all its engines, of those that its process has not told of when that ends."""
        report = await self._channels.read_report()
        await self._is_told.wait()
        return ProcessExit(self._error or why_ended(report, self._status), self._status, self._peak_bytes)

    def has_beaten(self) -> bool:
        return take_heartbeats(self._channels.heartbeat_fd)

    def kill(self) -> bool:
        self._is_killed = True
        if self.process_fd < 0:
            return not self._is_told.is_set()
        has_ended = self._wait(0.0)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process_fd, signal.SIGKILL)
        return not has_ended

    def close(self) -> None:
        """One that the zygote has not told of ends a second later, by its lifeline."""
        self.kill()
        if self.process_fd >= 0:
            self._wait(_END_S)
            self._forget()
        self._channels.close()
        self._is_closed = True

    def _wait(self, within_s: float) -> bool:
        """Whether the process has ended by then."""
        ends = select.poll()
        ends.register(self.process_fd, select.POLLIN)
        return bool(ends.poll(within_s * 1000))

    def _forget(self) -> None:
        os.close(self.process_fd)
        self.process_fd = -1


class Zygote:
    """A context manager: entering starts the process, so that it loads while the front end does. `run` meanwhile, or
    nobody hears of what it forks."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._error: TokenmillError | None = None
        self._asked: dict[str, ForkedEngine] = {}  # by worker: those that it has not told of
        self._forked: dict[int, ForkedEngine] = {}  # by process

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
        self._end()

    @property
    def pid(self) -> int:
        """0: there is none now."""
        return 0 if self._process is None else self._process.pid

    def start(self, launch: Launch) -> ForkedEngine:
        """Have an engine forked as soon as the weights are loaded. Where there is no zygote now, it ends at once."""
        channels = Channels.open()
        life = ForkedEngine(channels, launch.flight)
        try:
            if self._control is None:
                raise BrokenPipeError
            socket.send_fds(self._control, [replace(launch, address=channels.address).to_json()], channels.theirs)
            self._asked[launch.worker] = life
        except OSError:
            life.told(error=self._error or EngineCrashed("There is no zygote now that could start an engine."))
        finally:
            channels.given()
        return life

    async def run(self) -> None:
        """Never returns; ends when cancelled."""
        delay_s = FIRST_DELAY_S
        while True:
            if self._process is None:
                self._start()
            began_s = time.monotonic()
            await self._hear()
            status = self._end()
            if time.monotonic() - began_s > LONGEST_DELAY_S:
                delay_s = FIRST_DELAY_S
            if self._error is None:
                _log.error("The zygote has ended (status %s); its engines live on. Another is started.", status)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            # Its numerical libraries must not start threads: a fork takes only one along.
            alone = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.cli.zygote_process", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **alone},
                start_new_session=True,
            )
        self._control, self._error = ours, None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._launch.to_json())

    async def _hear(self) -> None:
        """Until it ends."""
        control = self._control
        assert control is not None
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def hear() -> None:
            while not ended.done():
                try:
                    data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
                except BlockingIOError:
                    return
                except ConnectionResetError:  # it had not read all that it was asked; what it said is still to come
                    continue
                if data:
                    self._take(json.loads(data), *fds)
                else:
                    ended.set_result(None)

        loop.add_reader(control, hear)
        try:
            await ended
        finally:
            loop.remove_reader(control)

    def _take(self, what: dict[str, int | str], *fds: int) -> None:
        if "error" in what:
            self._error = ConfigError(str(what["error"]))
        elif "worker" in what:
            pid = int(what["pid"])
            life = self._forked[pid] = self._asked.pop(str(what["worker"]))
            life.begun(pid, fds[0])
        else:
            self._forked.pop(int(what["pid"])).told(int(what["status"]), peak_bytes=int(what["peak_bytes"]))

    def _end(self) -> int | None:
        """Nobody hears of what it had forked, or was to fork. Its exit status."""
        if self._process is None or self._control is None:
            return None
        self._control.close()
        status = self._process.wait()
        self._process = self._control = None
        error = self._error or EngineCrashed(f"The zygote ended with status {status} before the engine began.")
        for life in self._asked.values():
            life.told(error=error)
        for life in self._forked.values():
            life.told()
        self._asked, self._forked = {}, {}
        return status
