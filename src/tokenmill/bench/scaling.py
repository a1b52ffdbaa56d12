"""`tokenmill bench scaling`: what a step would take with more threads than this machine has, by a simulated schedule.

A step is a chain of phases, each of independent units of work, so its length is the critical path: what is done between
phases by one thread, the way from one phase to the next, and of each phase the time to its last unit. The units are
those that the kernels really cut for so many threads, each timed on one; the schedule is that of the thread team
(native/src/team.h): a thread does its own run of units, then helps others with theirs. A cache line that several cores
write goes from one to the next, which takes each of them `line_s`.

What is not in it: cores that share a cache or a clock, and memory, which each thread would read at the speed at which
one does here, unless `bandwidth` says what there is.

Knows operations only through what `cli` hands in.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from .report import console_beside, write_json

SCHEMA = 1
COUNTS = (1, 2, 4, 8, 16, 32, 64)
LINE_NS = 60.0
"""A line of a cache from one core to another, within a socket."""

LINES_AT_ONCE = 8
"""That a core fetches, and cores that a line reaches, while one goes from a core to another."""

GROUP_THREADS = 8
"""Of the team: those that count off their units in one line."""


@dataclass(frozen=True, slots=True)
class Phase:
    """units_s: of each unit. before_s: what one thread did since the phase before, or since the beginning of the step.
    num_bytes: of weights that it reads."""

    operation: str
    before_s: float
    units_s: Sequence[float]
    num_bytes: int = 0


@dataclass(slots=True)
class Schedule:
    """Seconds of a step with so many threads: between phases; on the way from one to the next; in units, if all threads
    had equal shares; what the last unit takes longer; what memory does. by_operation: of all that belongs to phases."""

    num_threads: int
    between_s: float = 0.0
    handing_s: float = 0.0
    shared_s: float = 0.0
    waiting_s: float = 0.0
    memory_s: float = 0.0
    by_operation: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.between_s + self.handing_s + self.shared_s + self.waiting_s + self.memory_s


def schedule(phases: Sequence[Phase], num_threads: int, line_s: float, bandwidth: float = 0.0) -> Schedule:
    """phases: of the step as it is cut for so many threads. bandwidth: bytes a second that all of them can read; 0: as
    many as they would."""
    found = Schedule(num_threads)
    for phase in phases:
        handing_s = 0.0 if num_threads == 1 else line_s * (2 + num_threads / LINES_AT_ONCE)
        busy_s = span(phase.units_s, num_threads, 0.0 if num_threads == 1 else line_s)
        shared_s = sum(phase.units_s) / num_threads
        least_s = phase.num_bytes / bandwidth if bandwidth else 0.0
        found.between_s += phase.before_s
        found.handing_s += handing_s
        found.shared_s += shared_s
        found.waiting_s += busy_s - shared_s
        found.memory_s += max(0.0, least_s - busy_s)
        before_s = found.by_operation.get(phase.operation, 0.0)
        found.by_operation[phase.operation] = before_s + handing_s + max(busy_s, least_s)
    return found


def span(units_s: Sequence[float], num_threads: int, line_s: float) -> float:
    """From the beginning of a phase to the end of its last unit and the word of it. All begin at once. Taking up a unit
    of one's own costs nothing; looking through the others' runs, taking one of theirs, and counting off what is done,
    in the thread's group and then among groups, go by lines that others write."""
    total = len(units_s)
    runs = [[total * t // num_threads, total * (t + 1) // num_threads] for t in range(num_threads)]
    left = [0] * (1 + (num_threads - 1) // GROUP_THREADS)  # units of each group that are not done
    for thread, (begin, end) in enumerate(runs):
        left[thread // GROUP_THREADS] += end - begin
    free_s, root_free_s = [0.0] * len(left), 0.0  # when each line can be had
    done = [0] * num_threads  # of its own run, and not counted off
    threads = [(0.0, thread) for thread in range(num_threads)]  # when each looks for its next unit

    def count_off(now_s: float, of: int, num_done: int) -> float:
        nonlocal root_free_s
        group = of // GROUP_THREADS
        now_s = free_s[group] = max(now_s, free_s[group]) + line_s
        left[group] -= num_done
        if not left[group]:
            now_s = root_free_s = max(now_s, root_free_s) + line_s
        return now_s

    while threads:
        now_s, thread = heapq.heappop(threads)
        if _has(runs[thread]):
            done[thread] += 1
            heapq.heappush(threads, (now_s + units_s[_take(runs[thread])], thread))
            continue
        if done[thread]:
            now_s = count_off(now_s, thread, done[thread])
            done[thread] = 0
            heapq.heappush(threads, (now_s, thread))
            continue
        turns = (turn % num_threads for turn in range(thread + 1, thread + num_threads))
        helped = next((turn for turn in turns if _has(runs[turn])), None)
        if helped is not None:
            now_s += line_s * (1 + (helped - thread) % num_threads / LINES_AT_ONCE)
            now_s = count_off(now_s + units_s[_take(runs[helped])], helped, 1)
            heapq.heappush(threads, (now_s, thread))
    return root_free_s


def _take(run: list[int]) -> int:
    run[0] += 1
    return run[0] - 1


def _has(run: list[int]) -> bool:
    return run[0] < run[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine that is imagined")
    said = f"a cache line to another core (default: {LINE_NS:g})"
    group.add_argument("--line-ns", type=float, default=LINE_NS, metavar="NS", help=said)
    said = "what its memory gives (default: as much as threads would read)"
    group.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S", help=said)
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure; -: to standard output")


def show(args: argparse.Namespace, steps: Mapping[str, Mapping[int, Sequence[Phase]]], facts: Mapping[str, str]) -> int:
    """steps: phases by number of threads, 1 among them, of each kind of step. Exit code 0."""
    console = console_beside(args.json, width=None if sys.stdout.isatty() else 150)
    written = []
    for step, by_count in steps.items():
        line_s, bandwidth = args.line_ns / 1e9, args.bandwidth * 1e9
        found = [schedule(phases, count, line_s, bandwidth) for count, phases in sorted(by_count.items())]
        console.print(_table(step, found))
        console.print(_operations(step, found[0], found[-1]))
        written += [{"step": step, **asdict(one), "step_s": one.step_s} for one in found]
    for name, value in facts.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    given = {"line_ns": args.line_ns, "bandwidth_gb_s": args.bandwidth}
    write_json(
        args.json, {"schema": SCHEMA, "kind": "scaling", "facts": dict(facts), **given, "steps": written}, indent=2
    )
    return 0


def _table(step: str, found: Sequence[Schedule]) -> Table:
    table = Table(
        "threads", "ms", "times as fast", "between phases", "handed on", "shared", "last unit", "memory", title=step
    )
    for one in found:
        parts = (one.between_s, one.handing_s, one.shared_s, one.waiting_s, one.memory_s)
        shares = (f"{part / one.step_s:.0%}" for part in parts)
        table.add_row(str(one.num_threads), f"{1e3 * one.step_s:.3f}", f"{found[0].step_s / one.step_s:.1f}", *shares)
    return table


def _operations(step: str, one: Schedule, many: Schedule) -> Table:
    table = Table(
        "operation", "ms, 1 thread", f"ms, {many.num_threads}", "times as fast", title=f"{step}, by operation"
    )
    for name, seconds in sorted(many.by_operation.items(), key=lambda item: -item[1]):
        before_s = one.by_operation.get(name, 0.0)
        table.add_row(name, f"{1e3 * before_s:.3f}", f"{1e3 * seconds:.3f}", f"{before_s / seconds:.1f}")
    return table
