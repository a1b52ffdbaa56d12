"""The inside of `code`: gives up rights, then runs the program it was handed. Started as a script of its own.

Reads one JSON object from standard input: `program`, `folder` (its working directory), `report_fd`, and the fields of
CodeLimits. Writes two lines to report_fd: the protections that took hold, as JSON, before the program runs; then
"passed", or "failed" and the exception. Imports nothing of tokenmill and nothing outside the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

_CLONE_NEWNET, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x40000000, 0x08000000, 0x10000000
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 1 << 2
_NOBODY = 65534

# Landlock's system calls have these numbers on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_ASK_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
# Write to a file (bit 1), remove a folder or file (4, 5), make anything (6 to 12): what the first version knows.
_LANDLOCK_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_LANDLOCK_TRUNCATE = 1 << 14
_LANDLOCK_SCOPE_SIGNALS = 1 << 1


def main() -> None:
    job = json.load(sys.stdin)
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    held = restrict(libc, job)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    os.write(job["report_fd"], json.dumps(held).encode() + b"\n")
    try:
        exec(compile(job["program"], "program.py", "exec", dont_inherit=True), {"__name__": "__main__"})
        line = "passed"
    except BaseException as error:
        line = "failed " + f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
    os.write(job["report_fd"], line.encode("utf-8", "replace") + b"\n")
    # Threads or exit handlers of the program must not keep the process alive.
    os._exit(0)


def restrict(libc: Any, job: dict[str, Any]) -> list[str]:
    """Give up rights, in the order that each step needs those it still has. Returns what took hold."""
    held = []
    if isolate_network(libc):
        held.append("no network")
    keep = 0
    if os.geteuid() == 0:
        keep = become_nobody(libc, job["folder"])
        held.append("user nobody, who may read all files" if keep else "user nobody")
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if set_capabilities(libc, keep) and not keep:
        held.append("no capabilities")
    return held + confine(libc, job["folder"]) + limit(job)


def isolate_network(libc: Any) -> bool:
    """Into a network (and IPC) namespace of its own; without root, through a user namespace where that is allowed."""
    flags = _CLONE_NEWNET | _CLONE_NEWIPC
    return libc.unshare(flags) == 0 or libc.unshare(flags | _CLONE_NEWUSER) == 0


def become_nobody(libc: Any, folder: str) -> int:
    """From root. Returns the one capability to keep: to read, where the interpreter lies in a private folder."""
    os.chown(folder, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    return 0 if os.access(os.__file__, os.R_OK) else _CAP_DAC_READ_SEARCH


def set_capabilities(libc: Any, keep: int) -> bool:
    """All but those in the bit set `keep` are dropped."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable of the first 32 capabilities, then of the others.
    return libc.capset(header, (ctypes.c_uint32 * 6)(keep, keep, 0, 0, 0, 0)) == 0


def confine(libc: Any, folder: str) -> list[str]:
    """Landlock: writing, making and removing files only beneath `folder`; signals only to itself."""

    class Ruleset(ctypes.Structure):
        _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))

    call = libc.syscall
    version = call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_ASK_VERSION)
    if version < 1:
        return []
    writes = _LANDLOCK_WRITES | (_LANDLOCK_TRUNCATE if version >= 3 else 0)
    wanted = Ruleset(writes, 0, _LANDLOCK_SCOPE_SIGNALS if version >= 6 else 0)
    # Older kernels know shorter forms and take a longer one if the rest is zero.
    ruleset = call(_LANDLOCK_CREATE, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)), 0)
    parent_fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = PathBeneath(writes, parent_fd)
        added = call(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0) == 0
        if not added or call(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
            return []
    finally:
        os.close(parent_fd)
        os.close(ruleset)
    return ["writes only in its own folder", *(["signals only to itself"] if version >= 6 else [])]


def limit(job: dict[str, Any]) -> list[str]:
    limits = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: job["num_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    held = [
        f"{job['cpu_s']} s CPU, {job['wall_s']:g} s wall clock",
        f"{job['memory_bytes'] >> 20} MiB memory",
        f"files of {job['file_bytes'] >> 10} KiB, {job['num_files']} open",
    ]
    return [*held, "no further processes"]


if __name__ == "__main__":
    main()
