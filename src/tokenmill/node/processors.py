"""Which processors of this machine threads should take, and how many: cores and their hardware threads, fast and slow
cores, NUMA nodes.

A step of few rows is bound by memory, which often fewer threads keep busy than there are cores; one of many rows by
arithmetic, to which a second hardware thread of a core or a slow core adds little or even harms, as all wait for the
last. Nobody can tell from a list of processors, so where there is more than one good number of threads the engine's own
steps are timed with each as it starts, and steps of few rows may get another than those of many (as prefill and decode
do in Sandwich, arXiv 2507.18454). No result depends on the number of threads.

Threads are given places only where cores differ or memory does: those of the fast cores come first, node by node, then
the slow cores, then second hardware threads. Each may move among the processors of its node and kind. Memory is where
the thread is that writes it first; a thread packs the same share of a matrix that it takes up first in a step, so
weights lie mostly near their users, by pages. Neither copies of weights for each node are made nor are pages bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FAST = 0.8
"""A core with less of the speed of the fastest is a slow one. Within a kind, the highest clocks differ by a tenth."""

SHARED_BY = 8
"""From so many cores on, half of them may keep the memory busy; from twice as many on, a quarter."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A hardware thread. core: the lowest number of those of its core. node: of its memory. speed: of its core, on a
    scale of this machine; all are 1 where the system does not tell."""

    number: int
    core: int
    node: int = 0
    speed: float = 1.0


def read_processors(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> tuple[Processor, ...]:
    """Those that this process may use, by number. allowed: these; default: the affinity mask, within which a
    container's cpuset always is."""
    numbers = sorted(allowed_processors() if allowed is None else allowed)
    system = root / "sys/devices/system"
    nodes = {
        number: int(folder.name[4:])
        for folder in sorted((system / "node").glob("node[0-9]*"))
        for number in _numbers(folder / "cpulist")
    }
    speeds = _speeds(root, numbers)
    found = []
    for number in numbers:
        topology = system / f"cpu/cpu{number}/topology"
        together = _numbers(topology / "core_cpus_list") or _numbers(topology / "thread_siblings_list") or [number]
        found.append(Processor(number, min(together), nodes.get(number, 0), speeds[number]))
    return tuple(found)


def allowed_processors() -> set[int]:
    """Numbers of those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _speeds(root: Path, numbers: Sequence[int]) -> dict[int, float]:
    """By what the system tells of all of them: kinds of core (Intel), their capacity (ARM), or their highest clock."""
    slow = _numbers(root / "sys/devices/cpu_atom/cpus")
    if slow and _numbers(root / "sys/devices/cpu_core/cpus"):
        return {number: 0.5 if number in slow else 1.0 for number in numbers}
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = {number: _text(root / f"sys/devices/system/cpu/cpu{number}" / file) for number in numbers}
        if numbers and all(text.isdigit() and int(text) > 0 for text in texts.values()):
            return {number: float(text) for number, text in texts.items()}
    return dict.fromkeys(numbers, 1.0)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf8", errors="replace").strip()
    except OSError:
        return ""


def _numbers(file: Path) -> list[int]:
    """Of a list as the kernel writes it: 0-3,8. Empty where there is none."""
    found: list[int] = []
    for part in _text(file).split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.extend(range(int(first), int(last if last.isdigit() else first) + 1))
    return found


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """Numbers of threads worth trying, rising, and the one that is taken where nothing is measured. places: of each of
    the most threads, the processors that it may run on; empty: threads are left to the system. about: what there is."""

    counts: tuple[int, ...]
    default: int
    places: tuple[tuple[int, ...], ...] = ()
    about: str = ""

    @property
    def most(self) -> int:
        return self.counts[-1]


def as_asked(num_threads: int) -> ThreadOptions:
    """No choice."""
    return ThreadOptions((num_threads,), num_threads)


def num_fast_cores(processors: Sequence[Processor]) -> int:
    """What threads are made for where nothing is measured: one for each."""
    fast = _fast(processors)
    return max(1, len({each.core for each in processors if each.number in fast}))


def thread_options(processors: Sequence[Processor], quota: float | None = None) -> ThreadOptions:
    """quota: processors' worth of time that a container grants. More threads than that would be stopped in the middle
    of a step, all at once, until the next period."""
    firsts = {each.core: each.number for each in reversed(processors)}
    fast = _fast(processors)

    def order(each: Processor) -> tuple[bool, bool, int, int]:
        return firsts[each.core] != each.number, each.number not in fast, each.node, each.number

    ordered = sorted(processors, key=order)
    most = max(1, min(len(ordered), int(quota) if quota is not None else len(ordered)))
    # Where one kind of processor ends and the next begins.
    ends = [
        at + 1
        for at, each in enumerate(ordered)
        if at + 1 == len(ordered) or order(each)[:3] != order(ordered[at + 1])[:3]
    ]
    default = num_fast_cores(processors)
    parts = [default // part for part in (2, 4) if default >= SHARED_BY * part // 2]
    counts = sorted({min(count, most) for count in (*ends, default, *parts) if count >= 1} or {1})
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for each in ordered:
        by_kind.setdefault((each.node, each.number in fast), []).append(each.number)
    places: tuple[tuple[int, ...], ...] = ()
    if len(by_kind) > 1:
        places = tuple(tuple(by_kind[each.node, each.number in fast]) for each in ordered[: counts[-1]])
    return ThreadOptions(tuple(counts), min(default, most), places, describe(processors, quota))


def describe(processors: Sequence[Processor], quota: float | None = None) -> str:
    """'8 cores with 16 hardware threads, 4 slow cores, 2 NUMA nodes'."""
    cores = {each.core: each for each in reversed(processors)}
    fast = _fast(processors)
    slow = [core for core, each in cores.items() if each.number not in fast]
    said = [_count(len(cores) - len(slow), "fast core" if slow else "core")]
    if len(processors) > len(cores):
        said[0] += f" with {len([each for each in processors if each.core not in slow])} hardware threads"
    if slow:
        said.append(_count(len(slow), "slow core"))
    if (num_nodes := len({each.node for each in processors})) > 1:
        said.append(_count(num_nodes, "NUMA node"))
    if quota is not None and quota < len(processors):
        said.append(f"of which the container grants {quota:g}")
    return ", ".join(said)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _fast(processors: Sequence[Processor]) -> set[int]:
    """Numbers of those of fast cores."""
    least = FAST * max((each.speed for each in processors), default=0.0)
    return {each.number for each in processors if each.speed >= least}


MEASURED_ROWS = (1, 32, 8)
"""Steps that are timed, in this order."""

BUDGET_S = 0.4
"""For all of them together."""

REPEATS = 3
WORTH = 0.03
"""More threads must save as much of the time, or they are left to others."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """limits: steps of at most so many rows take so many threads, rising; those of more take num_threads. measured: the
    seconds of a step by its rows and threads, where something was measured."""

    num_threads: int
    limits: tuple[tuple[int, int], ...] = ()
    measured: tuple[tuple[int, int, float], ...] = ()

    def __str__(self) -> str:
        few = (f"{threads} for steps of at most {rows} row{'s' if rows > 1 else ''}" for rows, threads in self.limits)
        return ", ".join((str(self.num_threads), *few))


def choose_threads(
    options: ThreadOptions, time_step: Callable[[int, int], float], clock: Callable[[], float], most_rows: int
) -> ThreadPlan:
    """time_step: seconds of a step of so many rows with so many threads. most_rows: that a step can have. Where the
    time for measuring runs out, what was not measured is as by default. Takes BUDGET_S and one step more."""
    best: dict[int, int] = {}
    measured: list[tuple[int, int, float]] = []
    stop_s = clock() + BUDGET_S
    for rows in MEASURED_ROWS:
        if rows > most_rows:
            continue
        seconds: dict[int, float] = {}
        for count in sorted(options.counts, key=lambda count: (count != options.default, count)):
            times: list[float] = []
            while len(times) <= REPEATS and clock() < stop_s:
                times.append(time_step(rows, count))
            if len(times) <= REPEATS:  # the first of them warms up
                break
            seconds[count] = min(times[1:])
        best[rows] = _best(seconds, options.default) if len(seconds) == len(options.counts) else options.default
        measured.extend((rows, count, seconds[count]) for count in sorted(seconds))
    limits: list[tuple[int, int]] = []
    many = best.pop(max(best)) if best else options.default
    for rows in sorted(best, reverse=True):
        if best[rows] != (limits[-1][1] if limits else many):
            limits.append((rows, best[rows]))
    return ThreadPlan(many, tuple(reversed(limits)), tuple(measured))


def _best(seconds: dict[int, float], default: int) -> int:
    """The fewest that are about as fast as the fastest."""
    least = min(seconds.values(), default=0.0)
    return next((count for count in sorted(seconds) if seconds[count] <= (1 + WORTH) * least), default)
