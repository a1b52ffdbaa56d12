"""The zygote: the process that loads a model's weights once, and forks the engines that use them.

    python -P -m tokenmill.cli.zygote_process CONTROL

    front end                                 zygote
    Launch as JSON on standard input  ----->  loads and packs, with one thread
    CONTROL (inherited socket)        <-----  {"error": ...} and its end, if loading fails
      a Launch, and three descriptors ----->  fork: an engine process that says Ready on its link
      (report, lifeline, heartbeat)   <-----  {"worker", "pid"} and a descriptor of the process
                                      <-----  {"pid", "status", "peak_bytes"} when it has ended
                                              CONTROL closes: the front end has gone; so has the zygote

Weights lie in mappings of their own, which are write-protected before the first fork. So they stay one copy however
many engines there are, and keep their huge pages, and a new engine needs no load. What it writes it makes after the
fork: KV pool, program, threads, link. A fork takes only the thread that calls it along, and locks as they are;
therefore no other thread may exist here, which is checked each time.

Engines end with the front end (their lifelines), not with the zygote: they outlive one that was killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import TokenmillError
from ..node.memory import private_bytes
from .engine_process import Launch, begin, ready_of, run
from .supervisor import peak_bytes

if TYPE_CHECKING:
    from ..core.events import Ready
    from ..node.load import Engine, Loaded

MAX_MESSAGE = 65536
NUM_FDS = 3


def main(control_fd: int) -> int:
    control = socket.socket(fileno=control_fd)
    launch = begin()
    os.dup2(2, 1)
    try:
        loaded, base_bytes = _load(launch, control)
    except TokenmillError as error:
        _tell(control, {"error": error.message})
        return 2
    _Zygote(control, loaded, base_bytes).run()
    return 0


def _load(launch: Launch, control: socket.socket) -> tuple[Loaded, int]:
    """And what the process took before. Raises ConfigError and BadCheckpoint; ends the process where the front end has
    gone meanwhile."""
    from ..formats.checkpoint import open_checkpoint
    from ..node.load import load_model
    from ..node.machine import read_machine
    from ..node.processors import as_asked
    from .models import progress_bar

    base_bytes = private_bytes()
    hung_up = select.poll()
    hung_up.register(control, 0)  # its end alone, not what it sends
    with progress_bar(f"loading {launch.model}") as show:

        def note(done: int, total: int) -> None:
            if hung_up.poll(0):
                os._exit(1)
            if show is not None:
                show(done, total)

        checkpoint = open_checkpoint(launch.path)
        loaded = load_model(
            checkpoint, launch.options, launch.machine or read_machine(), as_asked(1), note, Path(launch.cache_dir)
        )
    loaded.ops.seal()
    _import_all()
    gc.collect()
    gc.freeze()  # a collection writes into every object that it walks, and so unshares it
    return loaded, base_bytes


def _import_all() -> None:
    """What engines need, once for all of them."""
    from ..engine import build, journal, recorders  # noqa: F401
    from ..net import journal as journal_file  # noqa: F401
    from ..net import mapped_files, unix  # noqa: F401

    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401


class _Zygote:
    def __init__(self, control: socket.socket, loaded: Loaded, base_bytes: int) -> None:
        self._base_bytes = base_bytes
        self._control = control
        self._loaded = loaded
        self._woken_fd, self._wake_fd = os.pipe()
        for fd in (self._woken_fd, self._wake_fd):
            os.set_blocking(fd, False)

    def run(self) -> None:
        """Until the front end goes."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_fd, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken_fd], [], [])
            if self._woken_fd in ready:
                os.read(self._woken_fd, 4096)
                self._reap()
            if self._control.fileno() in ready:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, NUM_FDS)
                if not data:
                    return
                self._fork(Launch.from_json(data), *fds)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = ended
                told = {"pid": pid, "status": os.waitstatus_to_exitcode(status), "peak_bytes": peak_bytes(usage)}
                _tell(self._control, told)

    def _fork(self, launch: Launch, report_fd: int, lifeline_fd: int, heartbeat_fd: int) -> None:
        num_threads = len(os.listdir("/proc/self/task"))
        assert num_threads == 1, f"{num_threads} threads where a fork would take one along"
        pid = os.fork()
        if pid == 0:
            self._work(launch, report_fd, lifeline_fd, heartbeat_fd)
        for fd in (report_fd, lifeline_fd, heartbeat_fd):
            os.close(fd)
        process_fd = os.pidfd_open(pid)
        _tell(self._control, {"worker": launch.worker, "pid": pid}, process_fd)
        os.close(process_fd)

    def _work(self, launch: Launch, report_fd: int, lifeline_fd: int, heartbeat_fd: int) -> None:
        """In the new process, which ends here."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._woken_fd)
            os.close(self._wake_fd)
            told = replace(launch, lifeline_fd=lifeline_fd, heartbeat_fd=heartbeat_fd)
            status = run(told, report_fd, lambda: self._make(told))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _make(self, launch: Launch) -> tuple[Engine, Ready]:
        from ..node.load import make_engine

        engine = make_engine(self._loaded, Path(launch.cache_dir), launch.queue_bytes)
        return engine, ready_of(engine, launch, self._base_bytes)


def _tell(control: socket.socket, what: Mapping[str, str | int], *fds: int) -> None:
    with contextlib.suppress(OSError):  # it has gone, and is heard of next
        socket.send_fds(control, [json.dumps(what).encode()], fds)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
