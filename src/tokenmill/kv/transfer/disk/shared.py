"""A folder of extents that several processes share (`--kv-save`): the KV blocks of one model that outlive them.

Extents are written whole and never changed; when they are more than the folder may hold, the oldest go. A file that
cannot be used gets one line in the log and is left alone, for it may be another model's. Nothing here runs on a thread
of its own; one thread at a time may `save`, while others do all else. One process at a time writes, and each knows of
the extents that were there when it last looked (`refresh`) and of those that it wrote. A KV store whose disk tier is in
the folder has it alone (`folder.claim`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ....core.block import BlockKey
from ....core.units import format_bytes
from .extent import PARTIAL, SUFFIX, BadExtent, Extent
from .folder import claim
from .whole import StoredBlock, convert, open_extent, read_blocks, write_extents

log = logging.getLogger(__name__)


class SharedFolder:
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
        self._places: dict[tuple[int, BlockKey], tuple[Extent, int]] = {}
        self._unusable: set[Path] = set()

    def open(self) -> None:
        """Make the folder if need be, and read what its extents hold. Raises OSError where it cannot be used."""
        weakref.finalize(self, os.close, claim(self.path, is_shared=True))
        with self._only_writer():
            for path in self.path.glob(f"{self._numerics_id[:16]}-*{SUFFIX}{PARTIAL}"):
                path.unlink(missing_ok=True)
            convert(self.path, self._numerics_id, self._block_bytes)
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
            return [one in self._places for one in wanted]

    @property
    def keys(self) -> tuple[tuple[BlockKey, ...], ...]:
        """Of each KV group, the keys of the blocks that are here."""
        groups: tuple[list[BlockKey], ...] = tuple([] for _ in self._block_bytes)
        for group, key in self._places:
            groups[group].append(key)
        return tuple(tuple(keys) for keys in groups)

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._extents)

    def describe(self) -> str:
        """'12 blocks (4.0 MiB) in /path'."""
        return f"{len(self._places)} blocks ({format_bytes(self.num_bytes)}) in {self.path}"

    def summary(self) -> str:
        """What was written and read so far, in one line."""
        return (
            f"saved {self.num_saved} KV blocks in {self.saving_s:.2f} s and read {self.num_read} in"
            f" {self.reading_s:.2f} s; now {self.describe()}"
        )

    def read(self, wanted: Sequence[tuple[int, BlockKey]]) -> list[bytes]:
        """The bytes of blocks by (group, key). Raises BadExtent and OSError where one of them cannot be had."""
        with self._lock:
            places = [self._places.get(one) for one in wanted]
        began_s = time.perf_counter()
        found: list[bytes] = []
        if None in places:
            raise BadExtent("is gone")
        for extent, run in groupby(filter(None, places), lambda place: place[0]):
            found += read_blocks(extent, [slot for _, slot in run])
        self.num_read += len(found)
        self.reading_s += time.perf_counter() - began_s
        return found

    def save(self, blocks: Sequence[StoredBlock]) -> None:
        """Write extents of these blocks, then give up the oldest extents beyond what the folder may hold. Raises
        OSError; nothing that was whole is lost then."""
        began_s = time.perf_counter()
        with self._only_writer():
            made = write_extents(self.path, self._numerics_id, self._block_bytes, blocks)
        self.num_saved += len(blocks)
        with self._lock:
            for extent in made:
                self._add(extent)
            while len(self._extents) > len(made) and self.num_bytes > self._max_bytes:
                self._drop_oldest()
        self.saving_s += time.perf_counter() - began_s

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

    def _open(self, path: Path) -> Extent | None:
        try:
            return open_extent(path, self._numerics_id, self._block_bytes)
        except (BadExtent, OSError, ValueError) as error:
            log.warning("%s is not used: it %s.", path, error if isinstance(error, BadExtent) else "cannot be read")
            return None

    def _add(self, extent: Extent) -> None:
        self._extents.append(extent)
        for slot in range(extent.head.num_slots):
            if not extent.is_empty(slot):
                self._places[extent.groups[slot], extent.key(slot)] = extent, slot

    def _remove(self, extent: Extent) -> None:
        self._extents.remove(extent)
        for slot in range(extent.head.num_slots):
            one = extent.groups[slot], extent.key(slot)
            if self._places.get(one) == (extent, slot):
                del self._places[one]

    def _drop_oldest(self) -> None:
        extent = self._extents[0]
        self._remove(extent)
        extent.path.unlink(missing_ok=True)
