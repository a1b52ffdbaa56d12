"""Parts of an adapter's files, for workers on other machines (see core.files). What a worker may ask for is what the
engine of this machine would read: two files by name, and where the adapter must lie in a folder, only if they do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..core.events import ADAPTER_FILES, PART_BYTES


class NoPart(Exception):
    """With a sentence for whoever asked for the adapter."""


def read_part(path: str, inside: str, name: str, offset: int) -> tuple[int, bytes]:
    """(size of the file, its bytes from `offset` on, at most PART_BYTES). Blocks for a read. Raises NoPart."""
    if name not in ADAPTER_FILES or offset < 0:
        raise NoPart(f"An adapter has no file {name[:100]!r}.")
    file = Path(path) / name
    try:
        if inside and not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(inside)):
            raise NoPart(f"{path} does not lie inside {inside}, the only folder that adapters are taken from.")
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise NoPart(f"{file} is not a file.")
            return found.st_size, os.pread(fd, PART_BYTES, offset)
        finally:
            os.close(fd)
    except OSError as error:
        raise NoPart(
            f"{path} has no {name} that can be read ({error.strerror}): no LoRA adapter in PEFT's format."
        ) from None
