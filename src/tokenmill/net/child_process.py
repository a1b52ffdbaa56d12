"""The pipes between a process and its child: the child's heartbeat, the end of the parent, what the child writes.

*Heartbeat*: a byte for every second in which the child made progress. The link's messages show only ends of steps, and
a step may take long. A process that is stopped, or in an endless loop, sends nothing; one that is only slow does. The
reader decides what silence means.

*Lifeline*: a pipe whose other end closes with the parent, however that ends. The link also reports a vanished peer
(`unix`), and a healthy engine then stops by itself; this is for one that cannot, because it is loading or stuck in a
native call. The kernel closes a dead process's descriptors, so a blocked read returns at once, also after kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

HEARTBEAT_S = 1.0


def open_heartbeat() -> tuple[int, int]:
    """(read end for the parent, write end for the child, to be passed through `pass_fds`). Neither ever blocks."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


@contextlib.contextmanager
def sending_heartbeats(write_fd: int, progress: Callable[[], int | None]) -> Iterator[None]:
    """In the child: a byte, from a thread of its own, whenever `progress` gives another number than a second before.
    None: it cannot tell, and every second counts. It is not called after the end of the context."""
    ended = threading.Event()

    def watch() -> None:
        before = progress()
        while not ended.wait(HEARTBEAT_S):
            now = progress()
            if now is None or now != before:
                with contextlib.suppress(OSError):  # nobody has read for hours, or will
                    os.write(write_fd, b".")
            before = now

    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def take_heartbeats(read_fd: int) -> bool:
    """In the parent: whether bytes have come since the last call."""
    try:
        return bool(os.read(read_fd, 4096))
    except BlockingIOError:
        return False


async def read_to_end(fd: int) -> bytes:
    """The bytes until nobody has the other end open any more; `fd` stays open."""
    loop = asyncio.get_running_loop()
    data, closed = bytearray(), loop.create_future()

    def read() -> None:
        part = os.read(fd, 65536)
        data.extend(part)
        if not part and not closed.done():
            closed.set_result(None)

    loop.add_reader(fd, read)
    try:
        await closed
    finally:
        loop.remove_reader(fd)
    return bytes(data)


def open_lifeline() -> tuple[int, int]:
    """(read end for the child, write end to be kept open by the parent). Pass the first through `pass_fds`, then close
    it in the parent; only the parent may hold the second."""
    return os.pipe()


def exit_when_parent_ends(read_fd: int, *, grace_s: float = 5.0, tell: Callable[[], object] | None = None) -> None:
    """In the child: `grace_s` seconds after the parent has ended, leave with status 1 if still running. tell: called
    at once, on another thread."""

    def watch() -> None:
        while os.read(read_fd, 1):
            pass
        if tell is not None:
            tell()
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
