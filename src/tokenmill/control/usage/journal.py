"""The journal that one front end appends to: a record is one write to a file, made before its tokens are sent.

What is written outlives the process at once, and a loss of power once the system has put it on the disk; nothing waits
for that here. A file that has grown is followed by another. The process holds a lock on the file that it writes, so
that others know when it is over.

    file     mark (8 bytes) | frame | frame | ...
    frame    length of the record (4) | CRC-32 of it (4) | record
    record   msgpack: [seconds since the epoch, [entry, ...], [account, ...]]
    entry    [number of the account, calls, prompt tokens, cached ones among them, output tokens] and, where the same
             work may be told again after a crash, the name by which it counts once
    account  [number, tenant, key, model], before or with the first entry that uses the number in this file

A process that is killed leaves at most one frame that is not whole, as the last.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec

from ...core.units import MiB

MARK = b"tmusage1"
_HEAD = Struct("<II")
_MOST_BYTES = 1 << 20


class Account(NamedTuple):
    """On whose account work is done. `key`: the API key's id, "" where none is known; `model`: as answers name it."""

    tenant: str
    key: str
    model: str


class Counts(NamedTuple):
    calls: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0


class Entry(NamedTuple):
    account: int
    calls: int
    prompt: int
    cached: int
    output: int
    once: str = ""


class Record(NamedTuple):
    wall_s: float
    entries: tuple[Entry, ...]
    accounts: tuple[tuple[int, str, str, str], ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def frame(wall_s: float, entries: Iterable[Sequence[object]], accounts: Sequence[Sequence[object]] = ()) -> bytes:
    """One record as it is written."""
    body = _encode((wall_s, entries, accounts))
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


class Damaged(Exception):
    """What stands there was never written by a journal; `offset`: of its first byte."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def records(data: bytes, offset: int) -> Iterable[tuple[int, Record]]:
    """(offset behind it, record) of each whole frame of `data` from `offset` on, which is that of a frame. Raises
    Damaged; bytes at the end that are no whole frame are left for later."""
    while offset + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, offset)
        end = offset + _HEAD.size + length
        if length > _MOST_BYTES:
            raise Damaged(offset)
        if end > len(data):
            return
        body = data[offset + _HEAD.size : end]
        if zlib.crc32(body) != crc:
            raise Damaged(offset)
        try:
            record = _decode(body)
        except msgspec.DecodeError:
            raise Damaged(offset) from None
        yield end, record
        offset = end


SUFFIX = ".journal"
_MOST_UNWRITTEN = 16 * MiB
_log = logging.getLogger(__name__)


class Journal:
    """`open` it before use, `close` it after. folder: is there. max_bytes: of a file before the next is begun.

    One thread appends. What the system refuses waits, with all that comes after it, until `retry` has written it: a
    full disk costs who appends one write, and not a large one with each record. `retry` is for another thread.

    num_bytes     written since it was opened
    num_failures  writes that the system refused
    """

    def __init__(self, folder: Path, wall_s: Callable[[], float], max_bytes: int = 4 * MiB) -> None:
        self._folder = folder
        self._wall_s = wall_s
        self._max_bytes = max_bytes
        self._numbers: dict[Account, int] = {}
        self._accounts: list[tuple[int, str, str, str]] = []
        self._untold: list[tuple[int, str, str, str]] = []
        self._lock = threading.Lock()  # of the next two
        self._waiting: list[bytes] = []
        self._num_waiting = 0  # bytes, those that `retry` is writing too: while there are any, the file is its own
        self._failure = ""
        self._file = -1
        self._size = 0
        self.num_bytes = 0
        self.num_failures = 0

    def open(self) -> None:
        """Raises OSError."""
        self._begin()

    def close(self) -> None:
        """Write what waits, if that can be written; of what cannot the log tells."""
        if self._file < 0:
            return
        self.retry()
        if self._num_waiting:
            _log.error("%d bytes of usage could not be written and are lost: %s.", self._num_waiting, self._failure)
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
        with self._lock:
            if self._num_waiting + len(data) > _MOST_UNWRITTEN:  # the record is lost, and what it told first
                self._untold = list(self._accounts)
                return
            if self._untold:
                self._untold = []
            num_written = 0 if self._num_waiting else self._write(data)
            if num_written < len(data):
                self._waiting.append(data[num_written:])
                self._num_waiting += len(data) - num_written
            elif self._size >= self._max_bytes:
                self._rotate()

    def why_not(self) -> str:
        """Why no more calls may come, whose records memory might not hold; "": they may."""
        return self._failure if self._num_waiting > _MOST_UNWRITTEN // 2 else ""

    def retry(self) -> None:
        """Write what waits, until the system refuses it again."""
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            data = b"".join(waiting)
            num_written = self._write(data)
            with self._lock:
                self._num_waiting -= num_written
                if num_written < len(data):
                    self._waiting.insert(0, data[num_written:])
            if not num_written:
                return

    def _write(self, data: bytes) -> int:
        """How many bytes of `data` are written."""
        try:
            num_written = os.write(self._file, data)
        except OSError as error:
            self._tell(error)
            return 0
        self._size += num_written
        self.num_bytes += num_written
        return num_written

    def _tell(self, error: OSError) -> None:
        if not self.num_failures:
            _log.error("The usage journal in %s cannot be written: %s.", self._folder, error.strerror)
        self.num_failures += 1
        self._failure = error.strerror or str(error)

    def _rotate(self) -> None:
        full = self._file
        try:
            self._begin()
        except OSError as error:  # the full file goes on
            self._tell(error)
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
