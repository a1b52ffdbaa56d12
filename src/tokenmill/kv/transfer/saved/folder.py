"""A folder of extents: the KV blocks of one model that outlive the process.

Extents are written once and never changed; when they are more than the folder may hold, the oldest go. A file that
cannot be used is told of in one line and left alone, for it may be another model's. Nothing here runs on a thread of
its own; one thread at a time may `save`, while others do all else. Several processes may share a folder: one at a time
writes, and each knows of the extents that were there when it last looked (`refresh`) and of those that it wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ....core.block import BlockKey
from ....core.units import format_bytes
from .extent import PARTIAL, BadExtent, Extent, StoredBlock, open_extent, write_extent

log = logging.getLogger(__name__)

SUFFIX = ".kv"


class KVFolder:
    """block_bytes: of each KV group. max_bytes: what the extents of this model may take together; a single extent may
    be larger. `num_saved`, `num_read`, `saving_s`, `reading_s`: blocks that were written and read, and the time that
    it took."""

    def __init__(self, path: Path, numerics_id: str, block_bytes: Sequence[int], max_bytes: int) -> None:
        self.path = path
        self.num_saved = self.num_read = 0
        self.saving_s = self.reading_s = 0.0
        self._numerics_id = numerics_id
        self._block_bytes = tuple(block_bytes)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # of the three below
        self._extents: list[Extent] = []  # oldest first
        self._holder: dict[tuple[int, BlockKey], Extent] = {}
        self._unusable: set[Path] = set()

    def open(self) -> None:
        """Make the folder if need be, and read what its extents hold. Raises OSError where it cannot be used."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & stat.S_IWOTH:
            log.warning("Everyone on this machine may write to %s, and so decide what prompts become.", self.path)
        with self._only_writer():
            for path in self.path.glob(f"{self._stem}-*{SUFFIX}{PARTIAL}"):
                path.unlink(missing_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes have written since the last look, and let go of what they have deleted. Costs a
        listing of the folder, and reading the index of each file that is new. Raises OSError."""
        with self._lock:
            known = {extent.path for extent in self._extents} | self._unusable
        listed = set(self.path.glob(f"*{SUFFIX}"))
        opened = {path: self._open(path) for path in sorted(listed - known)}
        with self._lock:
            for extent in [each for each in self._extents if each.path in known - listed]:
                self._remove(extent)
            present = {extent.path for extent in self._extents}
            for path, extent_or_none in opened.items():
                if extent_or_none is None:
                    self._unusable.add(path)
                elif path not in present:
                    self._add(extent_or_none)
            self._extents.sort(key=lambda extent: extent.path.name)

    def holds(self, wanted: Sequence[tuple[int, BlockKey]]) -> list[bool]:
        """Which of these blocks by (group, key) are here."""
        with self._lock:
            return [one in self._holder for one in wanted]

    @property
    def keys(self) -> tuple[tuple[BlockKey, ...], ...]:
        """Of each KV group, the keys of the blocks that are here."""
        groups: tuple[list[BlockKey], ...] = tuple([] for _ in self._block_bytes)
        for group, key in self._holder:
            groups[group].append(key)
        return tuple(tuple(keys) for keys in groups)

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._extents)

    def describe(self) -> str:
        """'12 blocks (4.0 MiB) in /path'."""
        return f"{len(self._holder)} blocks ({format_bytes(self.num_bytes)}) in {self.path}"

    def summary(self) -> str:
        """What was written and read so far, in one line."""
        return (
            f"saved {self.num_saved} KV blocks in {self.saving_s:.2f} s and read {self.num_read} in"
            f" {self.reading_s:.2f} s; now {self.describe()}"
        )

    def read(self, wanted: Sequence[tuple[int, BlockKey]]) -> list[bytes]:
        """The bytes of blocks by (group, key). Raises BadExtent and OSError where one of them cannot be had."""
        with self._lock:
            holders = {one: self._holder.get(one) for one in wanted}
        began_s = time.perf_counter()
        found: list[bytes] = []
        for holder, run in groupby(wanted, holders.__getitem__):
            if holder is None:
                raise BadExtent("is gone")
            found += holder.read(tuple(run))
        self.num_read += len(found)
        self.reading_s += time.perf_counter() - began_s
        return found

    def save(self, blocks: Sequence[StoredBlock]) -> None:
        """Write an extent of these blocks, then give up the oldest extents beyond what the folder may hold. Raises
        OSError; nothing that was whole is lost then."""
        began_s = time.perf_counter()
        with self._only_writer():
            path = self.path / f"{self._stem}-{self._next_number():08d}{SUFFIX}"
            extent = write_extent(path, self._numerics_id, self._block_bytes, blocks)
        self.num_saved += len(blocks)
        with self._lock:
            self._add(extent)
            while len(self._extents) > 1 and self.num_bytes > self._max_bytes:
                self._drop_oldest()
        self.saving_s += time.perf_counter() - began_s

    @property
    def _stem(self) -> str:
        return self._numerics_id[:16]

    @contextlib.contextmanager
    def _only_writer(self) -> Iterator[None]:
        """Waits while another process writes. Where the file system has no locks, nobody waits."""
        folder = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _next_number(self) -> int:
        """One more than that of the newest extent, whoever wrote it."""
        numbers = [path.stem.rpartition("-")[2] for path in self.path.glob(f"{self._stem}-*{SUFFIX}")]
        return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def _open(self, path: Path) -> Extent | None:
        try:
            return open_extent(path, self._numerics_id, self._block_bytes)
        except (BadExtent, OSError, ValueError) as error:
            log.warning("%s is not used: it %s.", path, error if isinstance(error, BadExtent) else "cannot be read")
            return None

    def _add(self, extent: Extent) -> None:
        self._extents.append(extent)
        for one in extent.locations:
            self._holder[one] = extent

    def _remove(self, extent: Extent) -> None:
        self._extents.remove(extent)
        for one in extent.locations:
            if self._holder.get(one) is extent:
                del self._holder[one]

    def _drop_oldest(self) -> None:
        extent = self._extents[0]
        self._remove(extent)
        extent.path.unlink(missing_ok=True)
