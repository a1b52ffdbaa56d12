"""Files that are mapped into the engine's memory: the flight recorder and the step log. A step neither waits for a disk
nor makes a system call, and what was written outlives the engine however that ends.

    FOLDER/engine-...flight   flight recorder of an engine that runs; its process holds a lock on it
    FOLDER/lost-...flight     of one that died; failed-...: as a step failed; asked-...: copied because somebody asked
    FILE, FILE.1, ...         step logs of the engine's last start and of `NUM_STEP_LOGS` before

An engine that ends in order takes its flight recorder along; the last `NUM_KEPT` of the others are kept. The files hold
lengths and times, the flight recorder ids and tenants too, neither has texts; their mode is 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..core.flight import SIZE, FlightWriter
from ..core.step_records import MAGIC, LogFacts, StepWriter
from ..core.step_records import SIZE as STEP_LOG_SIZE
from .journal import rotate

SUFFIX = ".flight"
NUM_KEPT = 8
_RUNNING = "engine-"
_PAUSE_S = 60.0
"""Between copies of failed steps."""

log = logging.getLogger(__name__)


class FlightFile:
    """An open one. `writer` writes into it; `keep_failed` copies it when a step has failed, at most once a minute."""

    def __init__(self, path: Path, writer: FlightWriter) -> None:
        self.writer = writer
        self._path = path
        self._copied_s = -_PAUSE_S

    def keep_failed(self, step: int) -> None:
        now = time.monotonic()
        if now - self._copied_s < _PAUSE_S:
            return
        self._copied_s = now
        kept = keep_copy(self._path, f"failed-step-{step}")
        if kept is not None:
            log.error("What the engine did before step %d failed is in %s.", step, kept)


@contextlib.contextmanager
def flight_file(path: str, model: str) -> Iterator[FlightFile | None]:
    """Record into the file at `path`, which is made, and goes when the context ends in order. None, with a line in the
    log, where it cannot be made."""
    try:
        fd = _make(path)
    except OSError as error:
        log.warning("The engine's steps are not recorded: %s cannot be written: %s.", path, error)
        yield None
        return
    # All of it is there from the start: a step must not wait for a disk, nor find it full.
    memory = mmap.mmap(fd, SIZE, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    began_s = time.monotonic()
    writer = FlightWriter(memory, pid=os.getpid(), began_s=began_s, unix_s=time.time() - began_s, model=model)
    try:
        yield FlightFile(Path(path), writer)
        Path(path).unlink(missing_ok=True)
    finally:
        os.close(fd)  # and with it goes the lock; the mapping stays for whoever still writes


def _make(path: str) -> int:
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, SIZE)
    except OSError:
        os.close(fd)
        Path(path).unlink(missing_ok=True)
        raise
    return fd


def new_path(folder: str, name: str) -> str:
    """For the engine that this process calls `name`."""
    return str(Path(folder) / f"{_RUNNING}{os.getpid()}-{name}{SUFFIX}")


def keep_copy(path: str | Path, why: str) -> Path | None:
    """A copy beside it that stays; None where it cannot be made."""
    kept = _kept_name(Path(path), why)
    try:
        shutil.copyfile(path, kept)
        os.chmod(kept, 0o600)
    except OSError as error:
        log.warning("The flight recorder's file %s cannot be copied: %s.", path, error)
        return None
    return kept


def keep_lost(path: str) -> Path | None:
    """Give the file of an engine that has died a name that stays; None where there is none."""
    kept = _kept_name(Path(path), "lost")
    try:
        os.rename(path, kept)
    except OSError:
        return None
    return kept


def prune(folder: str, num_kept: int = NUM_KEPT) -> None:
    """Remove all but the last files of engines that run no more."""
    with contextlib.suppress(OSError):
        idle = [path for path in Path(folder).glob(f"*{SUFFIX}") if not _is_in_use(path)]
        idle.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in idle[num_kept:]:
            path.unlink(missing_ok=True)


def _kept_name(path: Path, why: str) -> Path:
    stem = path.stem.removeprefix(_RUNNING)
    return path.with_name(f"{why}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{stem}{SUFFIX}")


def _is_in_use(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


NUM_STEP_LOGS = 3


@contextlib.contextmanager
def step_file(path: str, facts: LogFacts) -> Iterator[StepWriter | None]:
    """Record into a new file at `path`, which stays. None, with a line in the log, where it cannot be made.
    facts: but for pid and times."""
    try:
        memory = _make_step_log(path)
    except OSError as error:
        log.warning("Steps are not recorded: %s cannot be written: %s.", path, error)
        yield None
        return
    began_s = time.monotonic()
    facts = replace(facts, pid=os.getpid(), began_s=began_s, unix_s=time.time() - began_s)
    yield StepWriter(memory, facts)


def _make_step_log(path: str) -> mmap.mmap:
    _refuse_others(path)
    rotate(path, NUM_STEP_LOGS)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, STEP_LOG_SIZE)  # a step must not find the disk full
        return mmap.mmap(fd, STEP_LOG_SIZE, flags=mmap.MAP_SHARED)
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
