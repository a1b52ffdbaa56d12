"""The process that keeps an outside job (`--idle-command`): starts it, and ends it when the server is gone.

    python -P -m tokenmill.cli.idle_keeper CONTROL REPORT COMMAND

CONTROL and REPORT are inherited descriptors. The first byte on CONTROL starts COMMAND with the shell, in a process
group of its own, whose number is told as a line on REPORT. From then on the server stops and continues the group by
signals itself, which is quicker than asking here. The group's number stays taken until this process ends, because what
has ended is not reaped before: so no signal reaches a stranger. How the command ended is told as a second line.

When CONTROL closes, however the server ended, the group gets SIGTERM and SIGCONT, and GRACE_S later SIGKILL. When the
command ends, what it left in its group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_TICK_S = 0.02


def main(control: int, report: int, command: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(control, 1):
        return
    wake_fd, woken_fd = os.pipe()
    os.set_blocking(woken_fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_prepare
    )
    _tell(report, str(process.pid))
    is_told = False
    while True:
        ready, _, _ = select.select([control, wake_fd], [], [])
        if wake_fd in ready:
            os.read(wake_fd, 4096)
            outcome = _outcome(process.pid)
            if outcome and not is_told:
                is_told = True
                _signal(process.pid, signal.SIGKILL)
                _tell(report, outcome)
        if control in ready and not os.read(control, 4096):
            break
    if not is_told:
        _end(process.pid)
    process.wait()


def _prepare() -> None:
    """In the job: it ends with this process, and handles signals as a shell's child does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(group: int) -> None:
    _signal(group, signal.SIGTERM)
    _signal(group, signal.SIGCONT)
    deadline = time.monotonic() + GRACE_S
    while not _outcome(group) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _outcome(pid: int) -> str:
    """How it ended, which does not reap it; "": it has not."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return ""
    if found.si_code == os.CLD_EXITED:
        return f"ended with status {found.si_status}"
    return f"was ended by {signal.Signals(found.si_status).name}"


def _tell(report: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(report, f"{line}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
