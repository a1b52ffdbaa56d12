"""Maps a file read-only into memory, with failures as `BadCheckpoint`, and gives up what of it has been read, so that
loading never holds a checkpoint twice.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from ..core.errors import BadCheckpoint

_POINTER = b"version https://git-lfs.github.com/spec/"


def map_file(path: Path) -> memoryview:
    """The file's bytes, mapped and not read. The mapping lives as long as the view or any slice of it."""
    try:
        with open(path, "rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise BadCheckpoint(f"{path} is empty.") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error
    refuse_pointer(path, bytes(view[: len(_POINTER)]))
    return view


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises BadCheckpoint where a file begins as what Git leaves in the place of a large one that it did not fetch."""
    if beginning.startswith(_POINTER):
        raise BadCheckpoint(
            f"{path} is not the file itself but a pointer of Git LFS: run `git lfs pull` in {path.parent}."
        )


def release(view: memoryview) -> None:
    """Give up the memory of a mapped file's bytes, whole pages of it: they can be read again, from the system's cache
    or the file. Nothing happens where `view` is of other memory, or the system has no such call."""
    mapping = view.obj
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = _address(view) - _address(memoryview(mapping))
    begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _address(view: memoryview) -> int:
    import numpy as np  # here, since front ends map files too and start without it

    return int(np.frombuffer(view, np.uint8).ctypes.data)
