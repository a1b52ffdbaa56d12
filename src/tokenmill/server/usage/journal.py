"""The journal that one front end appends to: a record is one write to a file, made before its tokens are sent.

What is written outlives the process at once, and a loss of power once the system has put it on the disk; nothing waits
for that here. A file that has grown is followed by another. The process holds a lock on the file that it writes, so
that others know when it is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.units import MiB
from .record import MARK, Account, frame

SUFFIX = ".journal"
_MOST_UNWRITTEN = 16 * MiB
_log = logging.getLogger(__name__)


class Journal:
    """`open` it before use, `close` it after. folder: is there. max_bytes: of a file before the next is begun.

    num_bytes     written since it was opened
    num_failures  writes that the system refused; their records are written with the next that it takes
    """

    def __init__(self, folder: Path, wall_s: Callable[[], float], max_bytes: int = 4 * MiB) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._max_bytes = max_bytes
        self._numbers: dict[Account, int] = {}
        self._accounts: list[tuple[int, str, str, str]] = []
        self._untold: list[tuple[int, str, str, str]] = []
        self._unwritten = b""
        self._failure = ""
        self._file = -1
        self._size = 0
        self.num_bytes = 0
        self.num_failures = 0

    def open(self) -> None:
        """Raises OSError."""
        self._begin()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def number_of(self, account: Account) -> int:
        """By which entries name the account."""
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = len(self._numbers)
            told = (number, *account)
            self._accounts.append(told)
            self._untold.append(told)
        return number

    def append(self, entries: Sequence[Sequence[object]]) -> None:
        """One record. `entries`: record.Entry or sequences like it. Never fails: what cannot be written now is kept, as
        long as that is not too much."""
        data = frame(self._wall_s(), entries, self._untold)
        if self._untold:
            self._untold = []
        self._write(self._unwritten + data if self._unwritten else data)

    def why_not(self) -> str:
        """Why no more calls may come, whose records memory might not hold; "": they may. Tries to write what waits."""
        if len(self._unwritten) > _MOST_UNWRITTEN // 2:
            self._write(self._unwritten)
        return self._failure if len(self._unwritten) > _MOST_UNWRITTEN // 2 else ""

    def _write(self, data: bytes) -> None:
        try:
            num_written = os.write(self._file, data)
        except OSError as error:
            self._keep(data, error)
            return
        self._size += num_written
        self.num_bytes += num_written
        self._unwritten = data[num_written:]
        if self._size >= self._max_bytes and not self._unwritten:
            self._rotate()

    def _keep(self, data: bytes, error: OSError) -> None:
        if not self.num_failures:
            _log.error("The usage journal in %s cannot be written: %s.", self._folder, error.strerror)
        self.num_failures += 1
        self._failure = error.strerror or str(error)
        if len(data) <= _MOST_UNWRITTEN:
            self._unwritten = data
        else:  # the record is lost, and the accounts that it named first
            self._untold = list(self._accounts)

    def _rotate(self) -> None:
        full = self._file
        try:
            self._begin()
        except OSError as error:  # the full file goes on
            self._keep(b"", error)
            self._size = 0
            return
        os.close(full)
        self._untold = list(self._accounts)

    def _begin(self) -> None:
        """Locked before it has the name by which others find it."""
        path = self._folder / f"{int(self._wall_s() * 1000):013d}-{secrets.token_hex(8)}{SUFFIX}"
        begun = path.with_suffix(".begun")
        file = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, MARK)
            os.rename(begun, path)
        except OSError:
            os.close(file)
            begun.unlink(missing_ok=True)
            raise
        self._file, self._size = file, len(MARK)


def is_over(path: Path) -> bool:
    """Whether nobody writes a journal's file any more."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False
    finally:
        os.close(file)
