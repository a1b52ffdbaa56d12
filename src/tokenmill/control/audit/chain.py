"""The form and the files of an audit log: entries of which each names the hash of the one before it, and signed heads.

An entry is one line of JSON: `seq` counts from 1, `time` is UTC, `prev` is the SHA-256 of the line before (of 64 zeros
before the first), then what happened. So the hash of the last line, the head, stands for all lines. A head is one line
too: `seq` and `hash` of an entry, `time`, the key's id and its Ed25519 signature over the first three.

The files are FILE, those that it was before it grew too large (FILE.000001, ...), and FILE.heads. Several processes may
write one log: each holds the lock of FILE.lock while it writes, and looks first where others have left the end. A line
that a crash has cut off is taken out, and an entry tells of it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..signing import Signer, Verifier

HEADS = ".heads"
"""What the file of heads is called besides the log's name."""


class Tip(NamedTuple):
    """An entry's number and the hash of its line."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


START = Tip(0, "0" * 64)


def shown_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def line_after(tip: Tip, time_s: float, event: Mapping[str, Any]) -> bytes:
    """The entry that goes behind `tip`, without its line's end."""
    entry = {"seq": tip.seq + 1, "time": shown_time(time_s), "prev": tip.hash, **event}
    return json.dumps(entry, separators=(",", ":")).encode()


def is_begun(line: bytes, tip: Tip) -> bool:
    """Whether `line` is the beginning of an entry behind `tip`, whatever its time is."""
    begin, time, rest = line_after(tip, 0.0, {})[:-1].partition(shown_time(0.0).encode())
    at = len(begin), len(begin) + len(time)
    timeless = (line[: at[0]] + time + line[at[1] :])[: len(line)]
    return (begin + time + rest).startswith(timeless[: at[1] + len(rest)])


def tip_of(seq: int, line: bytes) -> Tip:
    return Tip(seq, hashlib.sha256(line).hexdigest())


def head_of(tip: Tip, time_s: float, signer: Signer) -> dict[str, Any]:
    head = {"seq": tip.seq, "hash": tip.hash, "time": shown_time(time_s), "key": signer.key_id}
    return head | {"signature": base64.b64encode(signer.sign(_signed(head))).decode()}


def is_signed(head: Mapping[str, Any], keys: Mapping[str, Verifier]) -> bool:
    """Whether a head was signed with one of `keys`, which go by their ids."""
    try:
        key, signature = keys.get(head["key"]), base64.b64decode(head["signature"], validate=True)
        return key is not None and key.holds(signature, _signed(head))
    except (KeyError, TypeError, ValueError):
        return False


def _signed(head: Mapping[str, Any]) -> bytes:
    return f"tokenmill audit head\n{head['seq']}\n{head['hash']}\n{head['time']}\n".encode()


_TAIL_BYTES = 1 << 16
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_MODE = 0o600


class Damaged(Exception):
    """The log is not as its writers left it."""


def files_of(path: Path) -> list[Path]:
    """All files with entries, the oldest first."""
    name = re.compile(re.escape(path.name) + r"\.\d{6,}")
    older = (each for each in path.parent.iterdir() if name.fullmatch(each.name))
    return [*sorted(older, key=lambda each: int(each.suffix[1:])), *([path] if path.exists() else [])]


class Segments:
    """Appends to the log at `path`. All of its methods but `held` and `close` are for who holds the lock."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.tip = START
        self.mended: dict[str, Any] | None = None  # what a crash had cut off, until it is told
        self._max_bytes = max_bytes
        self._fd = -1
        self._size_bytes = -1
        self._lock = os.open(path.with_name(path.name + ".lock"), _FLAGS, _MODE)
        self._heads = os.open(path.with_name(path.name + HEADS), _FLAGS, _MODE)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def find_end(self) -> None:
        """Look where the log ends now, and take out what a crash has left of a line. Raises OSError, and Damaged: then
        the log stays as it is."""
        try:
            here = os.stat(self.path)
            is_same = self._fd >= 0 and here.st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            is_same = False
        if is_same and here.st_size == self._size_bytes:
            return
        if not is_same:
            if self._fd >= 0:
                os.close(self._fd)
            self._size_bytes = -1
            self._fd = os.open(self.path, _FLAGS, _MODE)
        size = os.fstat(self._fd).st_size
        _, half = _end_of(self._fd, size)
        empty = {self.path: len(half)}
        ends = [each for each in reversed(files_of(self.path)) if each.stat().st_size > empty.get(each, 0)]
        if ends:
            self.tip = _last_tip(ends[0])
        if half:
            self._drop(half, size - len(half))
        self._size_bytes = size - len(half)

    def check_heads(self) -> None:
        """Raises Damaged where the log ends before its newest head: then entries have been taken away."""
        line, _ = _end_of(self._heads, os.fstat(self._heads).st_size)
        try:
            seq = int(json.loads(line)["seq"]) if line else 0
        except (ValueError, KeyError, TypeError):
            raise Damaged(f"{self.path}{HEADS} does not end with a head.") from None
        if self.tip.seq < seq:
            raise Damaged(f"{self.path} ends at entry {self.tip.seq}, before its signed head at {seq}.")

    def append(self, lines: Sequence[bytes], tip: Tip) -> None:
        """Entries that end with `tip`. Raises OSError; then nothing of them is there."""
        try:
            _write(self._fd, b"".join(line + b"\n" for line in lines))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_bytes)
            raise
        self._size_bytes = os.fstat(self._fd).st_size
        self.tip = tip

    def append_head(self, head: dict[str, Any]) -> None:
        size = os.fstat(self._heads).st_size
        _, half = _end_of(self._heads, size)  # of a head that a crash has cut off
        os.ftruncate(self._heads, size - len(half))
        _write(self._heads, json.dumps(head, separators=(",", ":")).encode() + b"\n")
        os.fsync(self._heads)

    def sync(self) -> None:
        os.fsync(self._fd)

    def is_full(self) -> bool:
        return self._size_bytes >= self._max_bytes

    def rotate(self) -> str:
        """Begin a new file; the name that the old one has now."""
        self.sync()
        older = files_of(self.path)[:-1]
        number = int(older[-1].suffix[1:]) + 1 if older else 1
        name = f"{self.path.name}.{number:06d}"
        os.rename(self.path, self.path.with_name(name))
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.find_end()
        return name

    def close(self) -> None:
        for fd in (self._fd, self._heads, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._heads = self._lock = -1

    def _drop(self, half: bytes, begin: int) -> None:
        """Take out what begins at `begin`, behind the last whole line: but only what is no part of what a head covers,
        and what the writer of the next entry would have begun with."""
        self.check_heads()
        if not is_begun(half, self.tip):
            raise Damaged(f"{self.path} ends with {len(half)} bytes that are no beginning of entry {self.tip.seq + 1}.")
        os.ftruncate(self._fd, begin)
        self.mended = {"bytes": len(half), "sha256": hashlib.sha256(half).hexdigest()}


def _last_tip(path: Path) -> Tip:
    with path.open("rb") as file:
        line, _ = _end_of(file.fileno(), os.fstat(file.fileno()).st_size)
    try:
        return tip_of(int(json.loads(line)["seq"]), line)
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{path} does not end with an entry.") from None


def _end_of(fd: int, size: int) -> tuple[bytes, bytes]:
    """The last line, without its end, and what follows that end; b"" for what is not there."""
    length = _TAIL_BYTES
    while True:
        lines, _, half = os.pread(fd, length, max(0, size - length)).rpartition(b"\n")
        if b"\n" in lines or length >= size:
            return lines.rpartition(b"\n")[2], half
        length *= 2


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
