"""The step log's file: mapped into the engine's memory, so that a step neither waits for a disk nor makes a system
call, and what was written outlives the engine however that ends.

FILE is of the engine's last start; those of the starts before are kept as FILE.1 and so on, up to `NUM_KEPT`. A file
holds lengths and times, no ids and no texts; its mode is 0600.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import replace

from ..core.step_records import MAGIC, SIZE, LogFacts, StepWriter
from .older import keep_older

NUM_KEPT = 3

log = logging.getLogger(__name__)


@contextlib.contextmanager
def step_file(path: str, facts: LogFacts) -> Iterator[StepWriter | None]:
    """Record into a new file at `path`, which stays. None, with a line in the log, where it cannot be made.
    facts: but for pid and times."""
    try:
        memory = _make(path)
    except OSError as error:
        log.warning("Steps are not recorded: %s cannot be written: %s.", path, error)
        yield None
        return
    began_s = time.monotonic()
    facts = replace(facts, pid=os.getpid(), began_s=began_s, unix_s=time.time() - began_s)
    yield StepWriter(memory, facts)


def _make(path: str) -> mmap.mmap:
    _refuse_others(path)
    keep_older(path, NUM_KEPT)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, SIZE)  # a step must not find the disk full
        return mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _refuse_others(path: str) -> None:
    """Raises OSError where the file is there and is no step log: it may be something dear that was named by mistake."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise FileExistsError(errno.EEXIST, "something that is no step log has this name")
