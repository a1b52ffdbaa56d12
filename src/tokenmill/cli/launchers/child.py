"""Keeps one `tokenmill worker` running on the machine that this is called on.

Needs the standard library alone, so that whatever places processes on machines can carry it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

LIFELINE_VARIABLE = "TOKENMILL_LIFELINE_FD"
"""Set by whoever starts a worker and wants it to end when its own process does: a pipe's inherited read end."""

FIRST_DELAY_S, LONGEST_DELAY_S, SETTLED_S = 0.5, 30.0, 60.0
REFUSED_STATUS = 2
"""Of a worker that cannot be started like this, or is not wanted: to start it again would change nothing."""

RUNNING, WAITING, FAILED = "running", "waiting", "failed"
_NUM_LINES = 40


class WorkerChild:
    """Starts the process, and again when it has ended, at growing intervals while it does not live for a minute. It
    ends with this process.

    arguments  of `tokenmill worker`
    env        over this process's own environment
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._arguments = list(arguments)
        self._env = dict(env)
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._num_starts = 0
        self._why = ""
        threading.Thread(target=self._keep, name="worker-child", daemon=True).start()

    def status(self) -> dict[str, object]:
        """state: RUNNING, WAITING (for its next start) or FAILED (there is none). `log`: what it said last."""
        process = self._process
        is_running = process is not None and process.poll() is None
        state = RUNNING if is_running else FAILED if self._why else WAITING
        pid = process.pid if process is not None and is_running else 0
        return {"state": state, "pid": pid, "num_starts": self._num_starts, "why": self._why, "log": list(self._lines)}

    def _keep(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            started_s = time.monotonic()
            status = 0
            try:
                status = self._run()
            except OSError as error:  # there is no memory for a process, or no descriptor
                self._lines.append(f"No process can be started now: {error}")
            if status == REFUSED_STATUS:
                self._why = self._lines[-1] if self._lines else "The worker was refused."
                return
            if time.monotonic() - started_s > SETTLED_S:
                delay_s = FIRST_DELAY_S
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _run(self) -> int:
        """One life; its exit status."""
        read_fd, write_fd = os.pipe()  # which closes with this process, however that ends
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.cli.main", "worker", *self._arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **self._env, LIFELINE_VARIABLE: str(read_fd)},
                pass_fds=(read_fd,),
                start_new_session=True,
            )
            self._num_starts += 1
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self._lines.append(line.rstrip())
            return process.wait()
        finally:
            os.close(read_fd)
            os.close(write_fd)
