"""The host memory of a KV store: one file in memory that its process and all its workers map.

Memory is taken page by page as slots are first written, and goes back to the system in holes (`free`). Nobody can make
the file shorter, so that a worker's mapping never faults, whatever becomes of the store. A worker that has mapped it
keeps what it sees until it lets go, also after the store has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
from functools import cache

PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: Linux 5.14, not named in the mmap module
_REMOVE = getattr(mmap, "MADV_REMOVE", None)


class SharedArena:
    """num_bytes  of the file, a multiple of the page's size"""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // PAGE) * PAGE
        self.fd = _make_file(self.num_bytes)
        self._map = _map(self.fd, self.num_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> SharedArena:
        """Another process's arena. `fd` is its own from now on. Raises ValueError where the file is not one."""
        if os.fstat(fd).st_size < num_bytes:
            raise ValueError(f"The KV store's memory has {os.fstat(fd).st_size} bytes instead of {num_bytes}.")
        arena = cls.__new__(cls)
        arena.num_bytes, arena.fd = num_bytes, fd
        arena._map = _map(fd, num_bytes)
        arena._view = memoryview(arena._map)
        return arena

    def view(self, offset: int, num_bytes: int) -> memoryview:
        assert 0 <= offset <= offset + num_bytes <= self.num_bytes, (offset, num_bytes, self.num_bytes)
        return self._view[offset : offset + num_bytes]

    def free(self, offset: int, num_bytes: int) -> None:
        """Give the memory of whole pages back; they read as zeros from now on, for everybody."""
        assert offset % PAGE == 0 and num_bytes % PAGE == 0, (offset, num_bytes)
        if num_bytes and _REMOVE is not None:
            with contextlib.suppress(OSError):  # a file system that knows no holes: the memory stays taken
                self._map.madvise(_REMOVE, offset, num_bytes)

    def commit(self, offset: int, num_bytes: int) -> bool:
        """Have these pages ready to be written, whatever they hold; the interpreter is free meanwhile. False where the
        system cannot."""
        if sys.platform != "linux":
            return False
        begin = offset // PAGE * PAGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + begin
        size = offset + num_bytes - begin
        return _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE) == 0

    @property
    def taken_bytes(self) -> int:
        """Memory that it takes now."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Views that others still hold stay valid; the memory goes when the last of them has gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._map.close()


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # large pages only where the system has them for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _make_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), num_bytes)
        return os.dup(file.fileno())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
