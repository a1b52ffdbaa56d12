"""Ends a process when its parent ends, however that happens: a pipe whose other end closes with the parent.

The link also reports a vanished peer (`unix`), and a healthy engine then stops by itself. The pipe is for an engine
that cannot: one that is loading, or stuck in a native call. The kernel closes a dead process's descriptors, so a
blocked read returns at once, also after kill -9. This needs no polling and works on every Unix.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable


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
