"""What the machine is, and whether it was ours alone while we measured.

Reads /proc; where there is none, says so instead of guessing. A figure taken while others used the processor is
reported as contaminated, and memory bandwidth is probed before and after, because virtual machines change speed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import __version__

CONTAMINATED_CORES = 0.12
"""Processor use by others, in cores, above which a figure is not to be trusted."""

PROBE_BYTES = 128 << 20
PROBE_ROUNDS = 4
_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")


class RunTime(NamedTuple):
    """Seconds of one run of an engine. cpu_s: of all processors, by its process; None where that cannot be told."""

    wall_s: float
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of processor time so far. `busy_s`: everybody's. `own_s`: this process and those it measures.
    `steal_s`: taken by other guests of the same host."""

    at_s: float
    busy_s: float
    own_s: float
    steal_s: float


@dataclass(frozen=True, slots=True)
class Interference:
    """What others used between two readings, in cores."""

    other_cores: float
    steal_cores: float

    @property
    def is_contaminated(self) -> bool:
        return self.other_cores + self.steal_cores > CONTAMINATED_CORES

    def __str__(self) -> str:
        verdict = "CONTAMINATED" if self.is_contaminated else "clean"
        return f"{verdict}: {self.other_cores:.2f} cores used by others, {self.steal_cores:.2f} by other guests"


def read_cpu_time(pids: Iterable[int] = (), proc: Path = Path("/proc")) -> CpuTime | None:
    """Processor time now; `pids` are measured processes beside this one. Children that have ended count as our own.
    None where /proc/stat does not exist."""
    try:
        fields = [int(value) for value in (proc / "stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    tick = os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4]) + sum(_process_ticks(proc, pid) for pid in pids) / tick
    return CpuTime(time.perf_counter(), (user + nice + system + irq + softirq) / tick, own, steal / tick)


def interference(before: CpuTime | None, after: CpuTime | None) -> Interference | None:
    if before is None or after is None:
        return None
    wall = after.at_s - before.at_s
    other = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return Interference(max(0.0, other / wall), (after.steal_s - before.steal_s) / wall)


def _process_ticks(proc: Path, pid: int) -> int:
    """User and system time of a process: fields 14 and 15 of its stat line, counted after the name in brackets."""
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def usable_cpus() -> list[int]:
    """Numbers of the processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def environment() -> dict[str, str]:
    """What a result says of the machine and the program that it came from."""
    return {**hardware(), "tokenmill": __version__, "commit": commit() or "not a checkout"}


def peak_memory(pid: int | None = None, proc: Path = Path("/proc")) -> int | None:
    """Most bytes a process has held in memory at once; ours by default. None where there is no /proc."""
    try:
        lines = (proc / str(pid or "self") / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def read_bandwidth(num_threads: int) -> float:
    """GB/s at which num_threads threads read memory, each its own 128 MiB (numpy sums let go of the interpreter)."""
    arrays = [np.ones(PROBE_BYTES // 8, dtype=np.int64) for _ in range(num_threads)]

    def read(array: np.ndarray) -> None:
        for _ in range(PROBE_ROUNDS):
            array.sum()

    threads = [threading.Thread(target=read, args=(array,)) for array in arrays]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_threads * PROBE_ROUNDS * PROBE_BYTES / (time.perf_counter() - start) / 1e9


def hardware(proc: Path = Path("/proc")) -> dict[str, str]:
    """Processor, the instruction sets that matter to kernels, cores, operating system."""
    model, flags = platform.machine(), set()
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return {
        "processor": model,
        "instruction sets": " ".join(name for name in _FEATURES if name in flags) or platform.machine(),
        "cores": str(os.cpu_count() or 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def commit() -> str | None:
    """The checkout this package runs from, with a mark if it has changes; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout.strip() or None
