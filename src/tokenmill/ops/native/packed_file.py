"""The file that packed weights are read from: one for a model, a kind of packing and what is kept in it.

    first page   magic, version, key, where the index lies, its checksum, bytes of the file
    ranges       packed matrices as they lie in memory, each of whole pages
    index        JSON: for each weight in the order of packing its shape, kinds and ranges with their checksums

It is written under another name, made durable, and renamed once it is whole. Checksums find accidents; who may write
to the folder may forge them, so the index is checked for what it would make the kernels read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .library import KINDS

PAGE = 4096
_MAGIC, _VERSION = b"tokenmill packed", 5
_HEAD = struct.Struct("<16sI64sQQQQ")
_MOST_INDEX_BYTES = 256 * 2**20
_ABANDONED_S = 10


class NotUsable(Exception):
    """Why a file cannot be used."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the file, of whole pages, and its checksum."""

    offset: int
    num_bytes: int
    sum: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Rows of one kind in a matrix: where its bytes begin in the matrix's range."""

    kind: str
    num_rows: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """parts: of each matrix; extents: of the matrices, of which a weight has one and a stack several of equal size.
    Without extents: it is not kept in the file."""

    num_cols: int
    parts: tuple[StoredPart, ...]
    extents: tuple[Extent, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)


Sum = Callable[[np.ndarray], int]


class Writer:
    """Writes a file `path` under another name, which is gone where the process ends before `finish`, or soon after."""

    def __init__(self, path: Path, key: str, sum_of: Sum) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        self._path, self._key, self._sum_of = path, key, sum_of
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._at = PAGE
        self._weights: list[StoredWeight] = []

    def write(self, data: np.ndarray) -> Extent:
        """uint8, of whole pages."""
        assert data.size % PAGE == 0, data.size
        extent = Extent(self._at, data.size, self._sum_of(data))
        self._put(data, self._at)
        self._at += data.size
        return extent

    def add(self, weight: StoredWeight) -> None:
        self._weights.append(weight)

    def finish(self) -> list[StoredWeight]:
        """The file is whole and in its place."""
        index = json.dumps([_as_json(weight) for weight in self._weights], separators=(",", ":")).encode()
        index += b" " * (-len(index) % 8)
        index_sum = self._sum_of(np.frombuffer(index, np.uint8))
        self._put(np.frombuffer(index, np.uint8), self._at)
        head = _HEAD.pack(_MAGIC, _VERSION, self._key.encode(), self._at, len(index), index_sum, self._at + len(index))
        self._put(np.frombuffer(head.ljust(PAGE, b"\0"), np.uint8), 0)
        os.fsync(self._file)
        os.rename(self._temporary, self._path)
        _sync_folder(self._path.parent)
        os.close(self._file)
        return self._weights

    def give_up(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        os.close(self._file)

    def _put(self, data: np.ndarray, at: int) -> None:
        left = memoryview(data.data)
        while left:
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done


def read_index(path: Path, key: str, sum_of: Sum) -> list[StoredWeight]:
    """What a file holds. Raises NotUsable, where it is not whole, is damaged where this can be seen so far, or is of
    another model; and OSError."""
    with open(path, "rb") as file:
        head = file.read(PAGE)
        if len(head) < PAGE:
            raise NotUsable("it is cut off")
        magic, version, its_key, at, num_bytes, index_sum, file_bytes = _HEAD.unpack_from(head)
        if magic != _MAGIC or version != _VERSION:
            raise NotUsable("it is not a file of packed weights of this version")
        if its_key != key.encode():
            raise NotUsable("it is of another model or packing")
        if os.fstat(file.fileno()).st_size != file_bytes or at + num_bytes != file_bytes or at % PAGE:
            raise NotUsable("it is cut off, or longer than it was written")
        if num_bytes > _MOST_INDEX_BYTES or num_bytes % 8:
            raise NotUsable("its index is damaged")
        file.seek(at)
        index = file.read(num_bytes)
    if len(index) != num_bytes or sum_of(np.frombuffer(index, np.uint8)) != index_sum:
        raise NotUsable("its index is damaged")
    try:
        return list(_weights(json.loads(index), at))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotUsable(f"its index is malformed ({error})") from error


def open_for_reading(path: Path) -> int:
    """A descriptor that reads past the system's cache, where the file system can."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    return os.open(path, flags)


def _as_json(weight: StoredWeight) -> list[Any]:
    parts = [[part.kind, part.num_rows, part.offset, part.num_bytes] for part in weight.parts]
    return [weight.num_cols, parts, [[each.offset, each.num_bytes, each.sum] for each in weight.extents]]


def _weights(found: Any, end: int) -> Iterator[StoredWeight]:
    """Raises ValueError for what kernels must not be given."""
    _demand(type(found) is list, "no list")
    for num_cols, stored_parts, stored_extents in found:
        parts = tuple(StoredPart(kind, *map(_count, numbers)) for kind, *numbers in stored_parts)
        extents = tuple(Extent(*map(_count, numbers)) for numbers in stored_extents)
        sizes = {extent.num_bytes for extent in extents}
        _demand(len(sizes) <= 1 and all(part.kind in KINDS for part in parts), "sizes or kinds")
        for extent in extents:
            _demand(extent.offset % PAGE == extent.num_bytes % PAGE == 0, "not of whole pages")
            _demand(extent.offset >= PAGE and 0 < extent.num_bytes <= end - extent.offset, "a range outside the file")
        for part in parts:
            _demand(part.offset % 64 == 0 and part.num_rows > 0, "a part's offset or rows")
            _demand(not extents or part.offset + part.num_bytes <= extents[0].num_bytes, "a part outside its range")
        yield StoredWeight(_count(num_cols), parts, extents)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no count")
    return value


def _demand(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def _sweep(folder: Path) -> None:
    """Remove what others began to write and did not end: nobody holds its lock, nor is about to."""
    for path in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(file).st_mtime > _ABANDONED_S:
                    os.unlink(path)
            finally:
                os.close(file)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
