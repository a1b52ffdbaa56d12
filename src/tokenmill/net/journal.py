"""A journal's file, written by a thread, so that no step waits for a disk.

A file holds the record of one run of an engine, from its start. The file of the run before is kept as FILE.1, and so
on, up to `NUM_KEPT`. A file ends at `MAX_BYTES`, or when writing fails or is too slow; one log line says so, and the
engine continues. The file can be replayed up to its end. An engine that is killed loses the entries of the last tenth
of a second, and may leave half a line.

The file holds prompts and answers, so its mode is 0600.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


def rotate(path: str, num_kept: int) -> None:
    """FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on up to FILE.num_kept; the oldest goes. Raises OSError."""
    names = [path, *(f"{path}.{number}" for number in range(1, num_kept + 1))]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)


MAX_BYTES = 1 << 30
NUM_KEPT = 3
MAX_BEHIND = 20_000
"""Entries not yet written. An entry mostly refers to what the engine holds anyway."""

_REST_S = 0.1
_SIGN = 16
"""So many characters of the header tell a journal from other files."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def journal_file(path: str, header: str, line_of: Callable[[Any], str]) -> Iterator[Callable[[Any], None]]:
    """Begin a file with the line `header`; the context is a function that adds an entry, which may be called from one
    thread at a time and takes no longer than to note it. `line_of`: an entry as text without line ends. The end of the
    context waits for the last entry."""
    writer = _Writer(path, line_of)
    writer.begin(header)
    thread = threading.Thread(target=writer.run, name="journal", daemon=True)
    thread.start()
    try:
        yield writer.add
    finally:
        writer.ending.set()
        thread.join()


class _Writer:
    """`begin` first; then `add` by one thread and `run` by another."""

    def __init__(self, path: str, line_of: Callable[[Any], str]) -> None:
        self.ending = threading.Event()
        self._path = path
        self._line_of = line_of
        self._entries: deque[Any] = deque()
        self._fd = -1
        self._num_bytes = 0

    def begin(self, header: str) -> None:
        try:
            _refuse_others(self._path, header[:_SIGN])
            rotate(self._path, NUM_KEPT)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._write(header.encode() + b"\n")
        except OSError as error:
            self._end(f"it cannot be written: {error}")
        else:
            log.warning("The journal %s will hold all prompts and answers; only its owner may read it.", self._path)

    def add(self, entry: Any) -> None:
        if self._fd >= 0:
            self._entries.append(entry)

    def run(self) -> None:
        is_ending = False
        while self._fd >= 0 and not is_ending:
            is_ending = self.ending.wait(_REST_S)
            try:
                self._write_entries()
            except Exception as error:
                self._end(f"it cannot be written: {error}")
        if self._fd >= 0:
            os.close(self._fd)

    def _write_entries(self) -> None:
        for _ in range(len(self._entries)):
            line = self._line_of(self._entries.popleft()).encode() + b"\n"
            if self._num_bytes + len(line) > MAX_BYTES:
                self._end(f"it has reached {MAX_BYTES >> 20} MiB")
                return
            if len(self._entries) > MAX_BEHIND:
                self._end("writing it is slower than the engine")
                return
            self._write(line)

    def _write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def _end(self, why: str) -> None:
        log.error("The journal %s ends here: %s. The engine goes on.", self._path, why)
        fd, self._fd = self._fd, -1
        self._entries.clear()
        if fd >= 0:
            os.close(fd)


def _refuse_others(path: str, sign: str) -> None:
    """Raises OSError where the file is there and is no journal, which begins with `sign`: it may be something dear that
    was named by mistake."""
    if os.path.lexists(path):
        is_journal = False
        if stat.S_ISREG(os.lstat(path).st_mode):
            with open(path, encoding="latin1") as file:
                is_journal = sign.startswith(file.read(len(sign)))  # empty, where the disk was full
        if not is_journal:
            raise FileExistsError(errno.EEXIST, "something that is no journal has this name")
