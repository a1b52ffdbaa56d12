"""The blocks of a pool as bytes in this process, and the reading of those of another process on this machine.

`process_vm_readv` copies from one process's memory to another's in one go, without a pipe or a shared mapping, so that
pools stay private and in large pages. The kernel allows it to whom it allows ptrace: the same user, and under Yama's
ptrace_scope 1 or above nobody else's children; then `read_memory` raises MayNotRead and blocks go over a socket.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

_MOST_VECTORS = 512
"""Ranges of one system call; the kernel takes 1024."""


class CannotRead(Exception):
    """The other process's memory was not read; the message says why."""


class MayNotRead(CannotRead):
    """Nor will it be another time."""


class BlockMemory(NamedTuple):
    """Blocks of one KV group: `view` is all of their bytes, flat; `address` is where it begins."""

    view: memoryview
    address: int
    block_bytes: int

    def block(self, index: int) -> memoryview:
        return self.view[index * self.block_bytes : (index + 1) * self.block_bytes]


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def can_read_memory() -> bool:
    """Whether this system has the call at all."""
    return sys.platform == "linux" and hasattr(_libc(), "process_vm_readv")


def read_memory(pid: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Copy ranges (address there, address here, bytes) out of process `pid`; others may run meanwhile. Raises
    CannotRead where the process is gone or a range is not mapped, and MayNotRead."""
    for start in range(0, len(ranges), _MOST_VECTORS):
        part = ranges[start : start + _MOST_VECTORS]
        num = len(part)
        here = (_Range * num)(*[_Range(address, size) for _, address, size in part])
        there = (_Range * num)(*[_Range(address, size) for address, _, size in part])
        wanted = sum(size for *_, size in part)
        got = _libc().process_vm_readv(pid, here, num, there, num, 0)
        if got != wanted:
            number = ctypes.get_errno() if got < 0 else 0
            reason = os.strerror(number) if number else f"{got} of {wanted} bytes came"
            is_lasting = number in (errno.EPERM, errno.ENOSYS)
            raise (MayNotRead if is_lasting else CannotRead)(f"memory of process {pid} cannot be read: {reason}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "process_vm_readv"):
        vectors = ctypes.POINTER(_Range)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        libc.process_vm_readv.argtypes = (
            ctypes.c_int, vectors, ctypes.c_ulong, vectors, ctypes.c_ulong, ctypes.c_ulong,
        )  # fmt: skip
    return libc
