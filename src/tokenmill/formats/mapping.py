"""Maps a file read-only into memory, with failures as `BadCheckpoint`."""

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
