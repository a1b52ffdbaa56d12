"""Which process is which: ids are used again, by other processes of the same boot and by the same ones of the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def host_id() -> str:
    """Equal for processes that see each other: of one boot of one machine, and in one space of process ids. "" where
    that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        return ""
    return f"{boot} {space}" if boot else ""


def process_start(pid: int) -> str | None:
    """When the process started, in words or numbers of the system's; None: there is none, or it has ended and is only
    not forgotten yet. Linux counts from its boot, which is told behind a space."""
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{fields[19]} {host_id()}"
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, start = told.stdout.strip().partition(" ")
    return start.strip() if start and not state.startswith("Z") else None


def name_process() -> str:
    """The name of this process, for `has_ended`."""
    return f"{os.getpid()} {process_start(os.getpid())}"


def has_ended(name: str) -> bool:
    """Whether the process of that name has ended. False also where that cannot be told: it may be another machine's."""
    pid, _, start = name.partition(" ")
    host = start.partition(" ")[2]
    return bool(host) and host == host_id() and process_start(int(pid)) != start
