"""Statistics of repeated runs, one report in three forms (terminal, Markdown, JSON), and where results are written.

Repeats of one figure become median and range. Engines are compared by the ratio of their medians, with the range of
the ratios of runs that followed one another: on a machine that changes speed, those are what can be believed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from .machine import Interference

STANDARD_OUTPUT = Path("-")


def write_json(path: Path | None, plain: dict[str, Any], indent: int | None = None) -> None:
    """Nothing where there is no path. NaN and infinity are programming errors."""
    if path is None:
        return
    text = json.dumps(plain, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf8")


def console_beside(path: Path | None, width: int | None = None) -> Console:
    """For tables: standard error where the JSON takes standard output."""
    return Console(stderr=path == STANDARD_OUTPUT, width=width)


_SECRET = ("--api-key", "--greedy-key", "--refused-key", "--header")


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The words of a command line, the values of secret options replaced by '...'. Doing it twice changes nothing."""
    shown = list(argv)
    for i, word in enumerate(shown):
        if word.startswith(tuple(f"{option}=" for option in _SECRET)):
            shown[i] = word.partition("=")[0] + "=..."
        elif i and shown[i - 1] in _SECRET:
            shown[i] = "..."
    return shown


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Summary:
    median: float
    low: float
    high: float

    def show(self, spec: str) -> str:
        """'1.52 [1.40-1.61]' for the format spec '.2f'; the range is left out where there is none."""
        spread = f" [{self.low:{spec}}-{self.high:{spec}}]" if self.high > self.low else ""
        return f"{self.median:{spec}}{spread}"


def summarise(values: Sequence[float]) -> Summary:
    assert values, "nothing was measured"
    return Summary(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one load, larger is better. `runs`: engine -> its values in the order of the repeats, so that
    values of equal index were measured one after the other. The first engine is the one under test."""

    load: str
    quantity: str
    runs: dict[str, list[float]]
    interference: Interference | None = None

    def best_peer(self) -> str | None:
        """Of the other engines, the one with the highest median."""
        peers = list(self.runs)[1:]
        return max(peers, key=lambda name: median(self.runs[name])) if peers else None

    def ratio(self) -> Summary | None:
        """Ratio of medians to the best peer; low and high: of the ratios repeat by repeat."""
        peer = self.best_peer()
        if peer is None:
            return None
        own, other = next(iter(self.runs.values())), self.runs[peer]
        pairs = [a / b for a, b in zip(own, other, strict=True)]
        return Summary(median(own) / median(other), min(pairs), max(pairs))


@dataclass(frozen=True, slots=True)
class Report:
    """facts: section -> name -> value, printed as they are. bandwidth: GB/s before and after. clock: whose seconds the
    figures are by: "wall", or "cpu", the engine's processor time."""

    facts: dict[str, dict[str, str]]
    bandwidth: tuple[float, float]
    figures: list[Figure] = field(default_factory=list)
    clock: str = "wall"

    @property
    def is_contaminated(self) -> bool:
        return any(figure.interference is not None and figure.interference.is_contaminated for figure in self.figures)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the table."""
        engines = list(dict.fromkeys(name for figure in self.figures for name in figure.runs))
        header = ["load", "tokens/s" if self.clock == "wall" else "tokens/CPU s", *engines]
        header += ["ratio to the best peer"] if len(engines) > 1 else []
        rows = []
        for figure in self.figures:
            runs = figure.runs
            row = [figure.load, figure.quantity]
            row += [summarise(runs[name]).show(".1f") if name in runs else "-" for name in engines]
            ratio = figure.ratio()
            if len(engines) > 1:
                row += [f"{ratio.show('.2f')} of {figure.best_peer()}" if ratio is not None else "-"]
            rows.append([*row, _verdict(figure.interference)])
        return [*header, "machine"], rows

    def to_markdown(self) -> str:
        header, rows = self.cells()
        lines = [markdown_row(header), markdown_row(["---"] * len(header)), *map(markdown_row, rows), ""]
        lines += [f"- {line}" for line in self.notes()]
        return "\n".join(lines) + "\n"

    def to_table(self) -> Table:
        header, rows = self.cells()
        table = Table()
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < 2 or i == len(header) - 1 else "right")
        for row in rows:
            table.add_row(*row)
        return table

    def notes(self) -> list[str]:
        """What must be read beside the figures."""
        notes = [
            f"{section}: " + "; ".join(f"{k} {v}" for k, v in facts.items()) for section, facts in self.facts.items()
        ]
        notes.append("memory read, all threads: {:.1f} GB/s before, {:.1f} GB/s after".format(*self.bandwidth))
        notes += [
            f"{load}: {state}"
            for load, state in {f.load: f.interference for f in self.figures}.items()
            if state is not None and state.is_contaminated
        ]
        return notes

    def to_json(self) -> dict[str, Any]:
        figures = []
        for figure in self.figures:
            ratio = figure.ratio()
            figures.append(
                asdict(figure)
                | {
                    "summaries": {name: asdict(summarise(values)) for name, values in figure.runs.items()},
                    "best_peer": figure.best_peer(),
                    "ratio": None if ratio is None else asdict(ratio),
                }
            )
        before, after = self.bandwidth
        return {
            "schema": SCHEMA,
            "kind": "engine",
            "facts": self.facts,
            "bandwidth_gb_per_s": {"before": before, "after": after},
            "is_contaminated": self.is_contaminated,
            "clock": self.clock,
            "figures": figures,
        }


def _verdict(state: Interference | None) -> str:
    if state is None:
        return "not known"
    return f"CONTAMINATED {state.other_cores + state.steal_cores:.2f} cores" if state.is_contaminated else "clean"


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
