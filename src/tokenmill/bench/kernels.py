"""`tokenmill bench kernels`: how near each operation comes to what the machine can do.

A case knows the bytes it must read and the operations it must do; the machine's limits are probed beside every run of
it, for a working set of the same size. The least time an operation can take is the larger of bytes / bandwidth and
operations / peak (Williams et al., the roofline); the share of the limit is that time over the measured one. Memory
bandwidth of virtual machines is bimodal, so its lowest and highest probe are reported with it.

Knows operations only through what `cli` hands in; times nothing itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich.table import Table

from . import machine
from .report import console_beside, markdown_row, write_json

SCHEMA = 1
REPEATS = 5
PROBE_BYTES = 64 << 20
"""Read per probe: small working sets are read this much over and over, larger ones twice."""

PROBE_TURNS = 100
LEAST_PROBED = 64 << 10
UNITS = ("int8", "f32", "bf16")
WIDE = 160
"""Columns of a table that does not go to a terminal."""

HEADER = ("operation", "shape", "rows", "us", "GB/s", "GOP/s", "limit GB/s", "limit GOP/s", "of limit", "bound by")


class Probed(Protocol):
    """What the machine reaches at best, by all threads together, per second; 0 where it cannot be told."""

    def probe(self, what: str, num_bytes: int = 0, rounds: int = 1) -> float:
        """`what`: 'read' (bytes, of a working set of num_bytes), or one of UNITS (operations)."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one shape.

    run          does it once for each of its `num_copies` (layers of a model, so that weights come from where they
                 would come from) and gives the seconds of all
    working_set  bytes that all copies read together, where that is not num_copies * num_bytes
    num_bytes    what one copy must read of weights, KV or logits, or move of rows
    num_ops      what one copy must do, a multiply-add being two, in arithmetic of a kind of UNITS
    """

    operation: str
    shape: str
    rows: int
    num_copies: int
    num_bytes: int
    num_ops: int
    unit: str
    run: Callable[[], float]
    working_set: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one copy, by repeat; bytes per second probed beside each; peak operations per second."""

    operation: str
    shape: str
    rows: int
    num_bytes: int
    num_ops: int
    seconds: list[float]
    bandwidths: list[float]
    peak: float

    @property
    def seconds_median(self) -> float:
        return median(self.seconds)

    @property
    def memory_s(self) -> float:
        """Least time for its bytes, at the median bandwidth."""
        bandwidth = median(self.bandwidths)
        return self.num_bytes / bandwidth if bandwidth else 0.0

    @property
    def compute_s(self) -> float:
        return self.num_ops / self.peak if self.peak else 0.0

    @property
    def share(self) -> float:
        """Of the limit: 1 is as fast as the machine can be."""
        return max(self.memory_s, self.compute_s) / self.seconds_median

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"

    def cells(self) -> list[str]:
        low, high = min(self.bandwidths) / 1e9, max(self.bandwidths) / 1e9
        return [
            self.operation,
            self.shape,
            str(self.rows),
            f"{self.seconds_median * 1e6:.1f}",
            f"{self.num_bytes / self.seconds_median / 1e9:.1f}",
            f"{self.num_ops / self.seconds_median / 1e9:.1f}",
            f"{low:.0f}-{high:.0f}",
            f"{self.peak / 1e9:.0f}",
            f"{self.share:.0%}",
            self.bound,
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--only", metavar="TEXT", default="", help="operations whose name or shape contains TEXT")
    group.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=f"runs of each (default: {REPEATS})")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")


def run(args: argparse.Namespace, cases: Iterable[Case], probed: Probed, facts: dict[str, str]) -> int:
    """Measure the cases, one after another; print and write the table. Exit code 0."""
    peaks = {unit: max(probed.probe(unit, 0, PROBE_TURNS) for _ in range(REPEATS)) for unit in UNITS}
    before = machine.read_cpu_time()
    found = []
    for case in cases:
        if args.only in f"{case.operation} {case.shape}":
            found.append(measure(case, probed, peaks, args.repeats))
            print(" ".join(found[-1].cells()), file=sys.stderr)
    state = machine.interference(before, machine.read_cpu_time())
    notes = [f"{name}: {value}" for name, value in (machine.hardware() | facts).items()]
    notes += [
        f"probed peaks, all threads: {peaks['int8'] / 1e12:.2f} TOP/s int8, {peaks['f32'] / 1e12:.2f} TFLOP/s f32, "
        f"{peaks['bf16'] / 1e12:.2f} bf16",
        f"commit: {machine.commit() or 'not a checkout'}; runs of each: {args.repeats}; medians",
        f"machine: {state or 'not known'}",
    ]
    table = Table(*HEADER)
    for one in found:
        table.add_row(*one.cells())
    console = console_beside(args.json, width=None if sys.stdout.isatty() else WIDE)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    if args.markdown is not None:
        args.markdown.write_text(to_markdown(found, notes))
    write_json(args.json, to_json(found, peaks, notes), indent=2)
    return 0


def measure(case: Case, probed: Probed, peaks: dict[str, float], num_repeats: int) -> Measured:
    """Runs and probes in turns, after one run that warms up."""
    working_set = max(LEAST_PROBED, case.working_set or case.num_bytes * case.num_copies)
    rounds = max(2, PROBE_BYTES // working_set)
    case.run()
    seconds, bandwidths = [], []
    for _ in range(num_repeats):
        bandwidths.append(probed.probe("read", working_set, rounds))
        seconds.append(case.run() / case.num_copies)
    return Measured(
        operation=case.operation,
        shape=case.shape,
        rows=case.rows,
        num_bytes=case.num_bytes,
        num_ops=case.num_ops,
        seconds=seconds,
        bandwidths=bandwidths,
        peak=peaks[case.unit],
    )


def to_markdown(found: list[Measured], notes: list[str]) -> str:
    lines = [markdown_row(HEADER), markdown_row(["---"] * len(HEADER)), *(markdown_row(one.cells()) for one in found)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def to_json(found: list[Measured], peaks: dict[str, float], notes: list[str]) -> dict[str, Any]:
    rows = [asdict(one) | {"share": one.share, "bound": one.bound} for one in found]
    return {"schema": SCHEMA, "kind": "kernels", "notes": notes, "peaks": peaks, "cases": rows}
