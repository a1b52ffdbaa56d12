"""The folder of the disk tier: one process has it at a time, and reads at its start what is in the extents."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ....core.block import BlockKey
from ....core.tiers import TierEntry
from ....core.units import format_bytes
from .extent import ENTRY_BYTES, PAGE_BYTES, PARTIAL, SUFFIX, BadExtent, Entry, Extent, read_own
from .io import data_spans, open_data, write_entries
from .space import DiskSpace, give_back, place_of

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
    Those who share it go on where the file system has no locks. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & stat.S_IWOTH:
        log.warning("Everyone on this machine may write to %s, and so decide what prompts become.", folder)
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        if is_shared and not is_taken:
            return file
        owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
        os.close(file)
        if not is_taken:
            raise
        raise OSError(
            f"{folder} is used by another KV store{f' (process {owner})' if owner else ''}. Give each a folder of its"
            " own, or have the servers of this machine share one KV store."
        ) from None
    os.truncate(file, 0)
    if not is_shared:
        os.pwrite(file, b"%d\n" % os.getpid(), 0)
    return file


def open_extents(space: DiskSpace) -> Opened:
    """Read what the extents hold, and bring them within the bytes that they may take. Raises OSError where the folder
    cannot be read at all; a file that cannot be used stays until its room is needed."""
    opened = Opened()
    for path in space.folder.glob(f"*{SUFFIX}{PARTIAL}"):
        path.unlink(missing_ok=True)
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
