"""`--idle-command`: the server's side of an outside job, which a process of its own keeps (`idle_keeper`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys

from .idle_keeper import GRACE_S

_MORE_S = 2.0
_log = logging.getLogger(__name__)


class IdleCommand:
    """control.slo.idle_job.Job. Make it inside the loop; the command starts when it is first run. `close` ends it."""

    def __init__(self, command: str) -> None:
        self.outcome = ""
        self._group = 0
        self._is_wanted = False
        control_fd, self._control = os.pipe()
        self._report, report_fd = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.cli.idle_keeper", str(control_fd), str(report_fd), command],
                stdin=subprocess.DEVNULL,
                pass_fds=(control_fd, report_fd),
                start_new_session=True,
            )
        finally:
            os.close(control_fd)
            os.close(report_fd)
        self._said = b""
        self._has_begun = False
        asyncio.get_running_loop().add_reader(self._report, self._hear)

    def run(self) -> None:
        self._is_wanted = True
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control, b"r")
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._is_wanted = False
        self._signal(signal.SIGSTOP)

    async def close(self) -> None:
        """SIGTERM for its process group, and SIGKILL some seconds later; waits for that."""
        asyncio.get_running_loop().remove_reader(self._report)
        os.close(self._control)
        os.close(self._report)
        try:
            await asyncio.to_thread(self._keeper.wait, GRACE_S + _MORE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _signal(self, number: int) -> None:
        if self._group and not self.outcome:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, number)

    def _hear(self) -> None:
        """The keeper tells the number of the group, and later how the command ended."""
        data = os.read(self._report, 4096)
        if not data:
            asyncio.get_running_loop().remove_reader(self._report)
            self._signal(signal.SIGKILL)
            self.outcome = self.outcome or "is gone, and so is the process that kept it"
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            if not self._group:
                self._group = int(line)
                if not self._is_wanted:
                    self._signal(signal.SIGSTOP)
            else:
                self.outcome = line.decode()
        if self.outcome:
            _log.warning("The idle command %s. It is not started again.", self.outcome)
