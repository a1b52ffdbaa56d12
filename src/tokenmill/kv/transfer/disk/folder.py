"""A folder of extents: one KV store has it alone as its disk tier and writes its slots again (`open_extents`), or any
number of processes share it and change no extent once it is written (`SharedFolder`). A lock keeps the two apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ....core.block import BlockKey
from ....core.tiers import TierEntry
from ....core.units import format_bytes
from .extent import ENTRY_BYTES, PAGE_BYTES, SUFFIX, BadExtent, Entry, Extent, read_own
from .io import data_spans, open_data, write_entries
from .space import DiskSpace, give_back, place_of
from .whole import StoredBlock, convert, open_extent, read_blocks, remove_partial, write_extents

log = logging.getLogger(__name__)

_LOCK = "lock"


@dataclass
class Opened:
    """entries: oldest first. seq: the largest there was. num_damaged: entries that were not as they were written."""

    entries: list[TierEntry] = field(default_factory=list)
    seq: int = 0
    num_damaged: int = 0
    num_unusable: int = 0


def claim(folder: Path, is_shared: bool = False) -> int:
    """Make the folder if need be, and have it alone, or with all others that share it, until the descriptor is closed.
    Those who share it go on where the file system has no locks, and where they may only read. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & stat.S_IWOTH:
        log.warning("Everyone on this machine may write to %s, and so decide what prompts become.", folder)
    access = os.O_RDONLY if is_shared else os.O_RDWR
    try:
        file = os.open(folder / _LOCK, access | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if not is_shared or error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        if is_shared and not is_taken:
            return file
        message = f"{folder} is used by {_holder(file)}."
        os.close(file)
        if not is_taken:
            raise
        raise OSError(message) from None
    if not is_shared:
        os.truncate(file, 0)
        os.pwrite(file, b"%d\n" % os.getpid(), 0)
    return file


def _holder(lock: int) -> str:
    """Who has a folder that cannot be had, and what to do: where it can be shared, others share it."""
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return "servers that have it as --kv-save without tiers. Stop them, or give the KV store a folder of its own"
    owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
    return (
        f"another KV store{f' (process {owner})' if owner else ''}. Give each a folder of its own, or have the servers"
        " of this machine share one KV store"
    )


def open_extents(space: DiskSpace) -> Opened:
    """Read what the extents hold, and bring them within the bytes that they may take. Raises OSError where the folder
    cannot be read at all; a file that cannot be used stays until its room is needed."""
    opened = Opened()
    remove_partial(space.folder, f"*{SUFFIX}")
    unusable: list[tuple[Path, str]] = []
    newest: dict[tuple[int, BlockKey], tuple[Extent, int, Entry]] = {}
    for path in sorted(space.folder.glob(f"*{SUFFIX}")):
        number = path.stem.rpartition("-")[2]
        space.next_number = max(space.next_number, int(number) + 1 if number.isdecimal() else 0)
        try:
            extent, packed = _open(space, path)
        except (BadExtent, OSError, ValueError) as error:
            unusable.append((path, str(error) if isinstance(error, BadExtent) else "cannot be read"))
            continue
        space.extents[extent.head.number] = extent
        _index(space, extent, packed, newest, opened)
        _note_backed(extent)
    _set_aside(space, unusable)
    for lost in space.shrink():
        newest = {block: at for block, at in newest.items() if at[0] is not lost}
    opened.num_unusable = len(unusable)
    kept = sorted(newest.values(), key=lambda at: at[2].seq)
    opened.seq = kept[-1][2].seq if kept else 0
    opened.entries = [TierEntry(entry.facts, place_of(extent, slot), entry.sum) for extent, slot, entry in kept]
    return opened


def _open(space: DiskSpace, path: Path) -> tuple[Extent, bytes]:
    head, packed = read_own(path, space.codec, space.numerics_id, space.block_bytes)
    return Extent(path, head, *open_data(path)), packed


def _index(
    space: DiskSpace,
    extent: Extent,
    packed: bytes,
    newest: dict[tuple[int, BlockKey], tuple[Extent, int, Entry]],
    opened: Opened,
) -> None:
    """Take in the entries of an extent. Damaged ones, and those of blocks that were saved anew, are cleared."""
    for slot, entry in space.codec.table(extent.head, packed):
        if entry is None:
            opened.num_damaged += 1
            _clear(extent, slot)
            continue
        other = newest.get(entry.facts.block)
        if other is not None and other[2].seq > entry.seq:
            _clear(extent, slot)
            continue
        if other is not None:
            _clear(other[0], other[1])
            space.free(other[0], other[1])
        newest[entry.facts.block] = extent, slot, entry
        extent.used[slot] = 1
        extent.put(slot, entry)
    extent.count()


def _clear(extent: Extent, slot: int) -> None:
    write_entries(extent, PAGE_BYTES + slot * ENTRY_BYTES, bytes(ENTRY_BYTES))


def _note_backed(extent: Extent) -> None:
    """Which slots have room in the file system: the file is asked. Room that was reserved and never written to is given
    back. Where the system does not tell, what holds nothing has none."""
    slot_bytes, num_slots = extent.head.slot_bytes, extent.head.num_slots
    for begin, end in data_spans(extent):
        first = (begin - extent.head.data_offset) // slot_bytes
        last = min(-(-(end - extent.head.data_offset) // slot_bytes), num_slots)
        extent.set_backed(first, last - first, True)
    surplus_bytes = os.fstat(extent.fd).st_blocks * 512 - extent.num_bytes
    if surplus_bytes < -extent.head.data_offset - slot_bytes:
        extent.set_backed(0, num_slots, False)
        for slot in range(num_slots):
            extent.set_backed(slot, 1, bool(extent.used[slot]))
    elif surplus_bytes >= slot_bytes:
        give_back(extent, is_backed=False)


def _set_aside(space: DiskSpace, unusable: list[tuple[Path, str]]) -> None:
    sizes: list[tuple[float, Path, int]] = []
    for path, _ in unusable:
        try:
            status = path.lstat()
        except OSError:
            continue
        sizes.append((status.st_mtime, path, status.st_blocks * 512))
    space.others = {path: size for _, path, size in sorted(sizes)}
    if unusable:
        reasons = Counter(reason for _, reason in unusable).most_common()
        log.warning(
            "%d files in %s are not used, and deleted once their %s are needed: %s.",
            len(unusable),
            space.folder,
            format_bytes(sum(space.others.values())),
            ", ".join(f"{count} {reason}" if count > 1 else f"one {reason}" for reason, count in reasons),
        )


class SharedFolder:
    """The KV blocks of one model in a folder that several processes share (`--kv-save`), and that outlive them.

    Extents are written whole and never changed; when they are more than the folder may hold, the oldest go. A file that
    cannot be used gets one line in the log and is left alone, for it may be another model's. Nothing here runs on a
    thread of its own; one thread at a time may `save`, while others do all else. One process at a time writes, and each
    knows of the extents that were there when it last looked (`refresh`) and of those that it wrote.

    block_bytes: of each KV group. max_bytes: what the extents of this model may take together; a single extent may
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
        self._release: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Make the folder if need be, and read what its extents hold. Raises OSError where it cannot be used."""
        self._release = weakref.finalize(self, os.close, claim(self.path, is_shared=True))
        with self._only_writer():
            remove_partial(self.path, f"{self._numerics_id[:16]}-*{SUFFIX}")
            convert(self.path, self._numerics_id, self._block_bytes)
        self.refresh()

    def close(self) -> None:
        """From now on a KV store may have the folder. May be called again."""
        self._release()

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
