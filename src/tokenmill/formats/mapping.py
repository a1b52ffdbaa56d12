"""Maps a file read-only into memory, with failures as `BadCheckpoint`."""

from __future__ import annotations

import mmap
from pathlib import Path

from ..core.errors import BadCheckpoint


def map_file(path: Path) -> memoryview:
    """The file's bytes, mapped and not read. The mapping lives as long as the view or any slice of it."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise BadCheckpoint(f"{path} is empty.") from None
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error
