"""The heartbeat with which a process shows its parent that it makes progress: a byte through a pipe for every second in
which it did.

The link's messages show only ends of steps, and a step may take long. A process that is stopped, or in an endless loop,
sends nothing; one that is only slow does. The reader decides what silence means.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

PULSE_S = 1.0


def open_pulse() -> tuple[int, int]:
    """(read end for the parent, write end for the child, to be passed through `pass_fds`). Neither ever blocks."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


@contextlib.contextmanager
def beating(write_fd: int, progress: Callable[[], int | None]) -> Iterator[None]:
    """In the child: a byte, from a thread of its own, whenever `progress` gives another number than a second before.
    None: it cannot tell, and every second counts. It is not called after the end of the context."""
    ended = threading.Event()

    def watch() -> None:
        before = progress()
        while not ended.wait(PULSE_S):
            now = progress()
            if now is None or now != before:
                with contextlib.suppress(OSError):  # nobody has read for hours, or will
                    os.write(write_fd, b".")
            before = now

    thread = threading.Thread(target=watch, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def take_pulses(read_fd: int) -> bool:
    """In the parent: whether bytes have come since the last call."""
    try:
        return bool(os.read(read_fd, 4096))
    except BlockingIOError:
        return False
