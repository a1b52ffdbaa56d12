"""`tokenmill bench rows`: how much longer a step takes that computes several rows of one sequence, as one that verifies
drafts does.

Steps of all numbers of rows are run in each round, in an order drawn anew, so that whatever else the machine does meets
all of them alike. The fifth percentile of the rounds is reported, since what others do only ever makes a step longer.
Knows steps only through what `cli` hands in; times nothing itself.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from rich.table import Table

from ..core.speculation import MOST_DRAFTS
from . import machine
from .engine import stream_counts
from .load.options import positive
from .report import console_beside, write_json

SCHEMA = 1
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
ROUNDS = 100
CONTEXT = 256
SEED = 0


@dataclass(frozen=True, slots=True)
class RowTimes:
    """seconds: of a step with so many rows of a sequence, by round."""

    num_rows: int
    seconds: Sequence[float]

    @property
    def low_s(self) -> float:
        """The fifth percentile."""
        return quantiles(self.seconds, n=20, method="inclusive")[0] if len(self.seconds) > 1 else self.seconds[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--rows",
        type=row_counts,
        default=ROWS,
        metavar="N,N",
        help=f"rows of a sequence in a step, beside 1 (default: {','.join(map(str, ROWS))})",
    )
    group.add_argument(
        "--context", type=positive, default=CONTEXT, metavar="TOKENS", help=f"before the rows (default: {CONTEXT})"
    )
    group.add_argument("--rounds", type=positive, default=ROUNDS, metavar="N", help=f"(default: {ROUNDS})")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value; -: to standard output")


def row_counts(text: str) -> tuple[int, ...]:
    """The numbers of --rows, with 1, which the others are compared with."""
    counts = stream_counts(text)
    if max(counts, default=1) > 1 + MOST_DRAFTS:
        raise argparse.ArgumentTypeError(f"must be at most {1 + MOST_DRAFTS} each, got {text}")
    return tuple(sorted({1, *counts}))


def run(args: argparse.Namespace, step: Callable[[int], float], facts: Mapping[str, str]) -> int:
    """`step(rows)` runs one with so many rows, all at the same positions, and gives its seconds. Exit code 0."""
    before = machine.read_cpu_time([])
    found = measure(step, args.rows, args.rounds)
    state = machine.interference(before, machine.read_cpu_time([]))
    one_s = found[0].low_s
    table = Table("rows", "ms", "of one row", "a row", title=f"a sequence of {args.context} tokens before them")
    for each in found:
        seconds = each.low_s
        cells = (1e3 * seconds, seconds / one_s, seconds / one_s / each.num_rows)
        table.add_row(
            str(each.num_rows), *(f"{cell:.{digits}f}" for cell, digits in zip(cells, (3, 2, 2), strict=True))
        )
    console = console_beside(args.json)
    console.print(table)
    notes = {**machine.environment(), **facts, "rounds": str(args.rounds), "other work while it ran": str(state)}
    for name, value in notes.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    result = {
        "schema": SCHEMA,
        "kind": "rows",
        "environment": machine.environment(),
        "facts": dict(facts),
        "argv": sys.argv[1:],
        "context": args.context,
        "steps": [
            {
                "rows": each.num_rows,
                "low_s": each.low_s,
                "of_one_row": each.low_s / one_s,
                "seconds": list(each.seconds),
            }
            for each in found
        ],
    }
    write_json(args.json, result, indent=1)
    return 0


def measure(step: Callable[[int], float], counts: Sequence[int], num_rounds: int) -> list[RowTimes]:
    """By number of rows, in the order given, after a round that warms up."""
    rng, seconds = random.Random(SEED), {count: list[float]() for count in counts}
    for number in range(-1, num_rounds):
        for count in rng.sample(counts, len(counts)):
            spent_s = step(count)
            if number >= 0:
                seconds[count].append(spent_s)
    return [RowTimes(count, values) for count, values in seconds.items()]
