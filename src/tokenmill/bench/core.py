"""`tokenmill bench core`: what a step costs outside of computing, by number of decoding rows.

`cli` measures and hands in plain numbers; this module says what they mean and shows them. Times are microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from . import machine
from .report import console_beside, write_json

SCHEMA = 1
ROWS = (1, 16, 64, 256)
STEPS = 2000
PARTS = ("plan", "commit", "plan + commit", "with shell", "with journal")


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Of one part, over the steps that decode `rows` rows.

    plan, commit   EngineCore's calls, one step in flight, as in the running engine
    with shell     a whole turn of the engine's loop, from one message of the engine to the next, without the executor
    with journal   the same while a journal is written beside it
    """

    rows: int
    part: str
    microseconds: Sequence[float]

    @property
    def low(self) -> float:
        """The tenth percentile: what it takes where nothing else runs."""
        return quantiles(self.microseconds, n=10)[0]

    @property
    def high(self) -> float:
        """The ninetieth percentile."""
        return quantiles(self.microseconds, n=10)[-1]

    @property
    def median(self) -> float:
        return median(self.microseconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--rows", type=_number, nargs="+", default=list(ROWS), metavar="N", help="sequences that decode at once"
    )
    group.add_argument("--steps", type=_number, default=STEPS, metavar="N", help=f"steps of each (default: {STEPS})")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure; -: to standard output")


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 100000, got {text!r}.")
    return int(text)


def show(args: argparse.Namespace, found: Sequence[CoreTimes]) -> int:
    """Print and write the table. Exit code 0."""
    notes = [f"{name}: {value}" for name, value in machine.hardware().items()]
    notes.append(f"commit: {machine.commit() or 'not a checkout'}; steps of each: {args.steps}")
    table = Table("rows", "part", "us, median", "10 %", "90 %")
    for one in found:
        table.add_row(str(one.rows), one.part, *(f"{time:.1f}" for time in (one.median, one.low, one.high)))
    console = console_beside(args.json)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    write_json(args.json, to_json(found, notes), indent=2)
    return 0


def to_json(found: Sequence[CoreTimes], notes: list[str]) -> dict[str, Any]:
    parts = [
        {"rows": one.rows, "part": one.part, "median": one.median, "low": one.low, "high": one.high} for one in found
    ]
    return {"schema": SCHEMA, "kind": "core", "notes": notes, "parts": parts}
