"""What this machine offers a process: CPUs it may use and memory it may take, containers' limits included.

Reads /proc and the cgroup file systems (versions 1 and 2); decides nothing. Every reader takes the root folder, so that
tests can hand in a machine of their own.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

from .processors import num_fast_cores, read_processors

CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "neon",
    "asimddp",
    "i8mm",
)

_NO_LIMIT = 2**62
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """num_cpus        CPUs this process may run on (affinity mask)
    cpu_quota          CPUs' worth of time the container grants; None: no limit
    memory_available   bytes the kernel could hand out without swapping
    cgroup_headroom    bytes left under the tightest memory limit above this process; None: no limit
    cpu_model, cpu_features    for `doctor`; features in the kernel's spelling
    num_sharing     engines that divide the usable cores and memory equally
    num_cores       fast cores among those CPUs, whose hardware threads and slow cores count apart; None: not known"""

    num_cpus: int
    cpu_quota: float | None
    memory_available: int
    cgroup_headroom: int | None
    cpu_model: str = ""
    cpu_features: tuple[str, ...] = ()
    num_sharing: int = 1
    num_cores: int | None = None

    @property
    def granted_cores(self) -> int:
        """Of all that share them: never more than the container's quota keeps running all the time."""
        cores = self.num_cores or self.num_cpus
        return max(1, min(cores, math.floor(self.cpu_quota) if self.cpu_quota is not None else cores))

    @property
    def usable_cores(self) -> int:
        return max(1, self.granted_cores // self.num_sharing)

    @property
    def usable_memory(self) -> int:
        limits = [self.memory_available]
        if self.cgroup_headroom is not None:
            limits.append(self.cgroup_headroom)
        return min(limits) // self.num_sharing


def read_machine(root: Path = Path("/")) -> MachineFacts:
    model, features = _cpu(root)
    processors = read_processors(root)
    return MachineFacts(
        num_cpus=len(processors),
        cpu_quota=_cpu_quota(root),
        memory_available=_memory_available(root),
        cgroup_headroom=_cgroup_headroom(root),
        cpu_model=model,
        cpu_features=features,
        num_cores=num_fast_cores(processors),
    )


def left_of(machine: MachineFacts, taken_bytes: int) -> MachineFacts:
    """What there is beside engines that may take so much."""
    headroom = machine.cgroup_headroom
    return replace(
        machine,
        memory_available=max(0, machine.memory_available - taken_bytes),
        cgroup_headroom=None if headroom is None else max(0, headroom - taken_bytes),
    )


@dataclass(frozen=True, slots=True)
class MemoryState:
    """available_bytes  that could be had now without swapping, container limits included
    stalled_s        for how long some process has waited for memory, ever; 0 where the system does not tell"""

    available_bytes: int
    stalled_s: float


class MemoryReader:
    """Reads it again and again, of the files that were there at first: a tenth of a millisecond each time."""

    def __init__(self, root: Path = Path("/")) -> None:
        groups = _groups(root, "memory")
        self._root = root
        self._limits = [
            (group / limit, group / use, group / "memory.stat", cache_key)
            for group in groups
            for limit, use, cache_key in _MEMORY_FILES
            if _limit(group / limit) is not None
        ]
        stalls = (*(group / "memory.pressure" for group in groups[:1]), root / "proc/pressure/memory")
        self._stalls = next((file for file in stalls if _stalled_s(file) is not None), None)

    def read(self) -> MemoryState:
        headrooms = [_memory_available(self._root)]
        headrooms += [headroom for files in self._limits if (headroom := _headroom(*files)) is not None]
        return MemoryState(min(headrooms), (_stalled_s(self._stalls) if self._stalls is not None else None) or 0.0)


def _stalled_s(file: Path) -> float | None:
    for word in (_read(file) or "").partition("\n")[0].split():
        if word.startswith("total="):
            return int(word[6:]) / 1e6
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _memory_available(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return 4 * 1024**3


def _cpu(root: Path) -> tuple[str, tuple[str, ...]]:
    model, flags = platform.machine(), set()
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    if "asimd" in flags:
        flags.add("neon")
    return model, tuple(name for name in CPU_FEATURES if name in flags)


def _groups(root: Path, controller: str) -> list[Path]:
    """This process's cgroup folder for a controller and all folders above it, innermost first (v2, else v1)."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, inside = line.split(":", 2)
        if number == "0" and (root / "sys/fs/cgroup/cgroup.controllers").exists():
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = Path(inside.lstrip("/")).parts
        return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return []


def _cpu_quota(root: Path) -> float | None:
    quotas = []
    for group in _groups(root, "cpu"):
        limit = (_read(group / "cpu.max") or "").split()
        if len(limit) == 2 and limit[0] != "max":
            quotas.append(int(limit[0]) / int(limit[1]))
        quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """Processes of this one's cgroup that the kernel has killed for want of memory so far; where no cgroup tells, of
    the whole system; 0 where nothing does."""
    group = next(iter(_groups(root, "memory")), root)
    for file in (group / "memory.events", group / "memory.oom_control", root / "proc/vmstat"):
        for line in (_read(file) or "").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0


def _cgroup_headroom(root: Path) -> int | None:
    """Of the tightest limit."""
    found = (
        _headroom(group / limit, group / use, group / "memory.stat", cache_key)
        for group in _groups(root, "memory")
        for limit, use, cache_key in _MEMORY_FILES
    )
    return min((headroom for headroom in found if headroom is not None), default=None)


def _headroom(limit_file: Path, use_file: Path, stat_file: Path, cache_key: str) -> int | None:
    """Limit minus use, where file cache that the kernel would drop under pressure does not count as used."""
    limit = _limit(limit_file)
    use = None if limit is None else _read_int(use_file)
    if limit is None or use is None:
        return None
    cache = 0
    for line in (_read(stat_file) or "").splitlines():
        if line.startswith(f"{cache_key} "):
            cache = int(line.split()[1])
    return max(0, limit - use + cache)


def _limit(file: Path) -> int | None:
    limit = _read_int(file)
    return None if limit is None or limit >= _NO_LIMIT else limit
