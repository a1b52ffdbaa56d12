"""Rows of trace files as they are found in the wild: what cannot be used is left out and counted, never guessed.

A file of recorded requests has rows without a field, with null, with a time that is none, out of order, and lengths
of nothing. Each such row is left out, under its reason, or put right and counted; a trace of which nothing is left is
refused in one line. Times count from the earliest of the rows that are used, so a slice of a trace begins at once.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...text.files import read_lines

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")

Row = dict[str, Any]

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request. ids: names of the blocks its prompt begins with, where the trace has some."""

    time_s: float
    input_len: int
    output_len: int
    ids: tuple[str, ...] = ()


class UnusableRow(ValueError):
    """Its text is the reason."""


class Notes:
    """What was done to the rows of a trace, by what was done, with the number of rows."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, what: str, num: int = 1) -> None:
        self._counts[what] += num

    @property
    def counts(self) -> dict[str, int]:
        return {what: num for what, num in self._counts.items() if num}

    @property
    def remarks(self) -> tuple[str, ...]:
        return tuple(f"The trace: {num} {what}." for what, num in self.counts.items())


def arrivals(rows: Iterable[Row], read: Callable[[Row], Arrival], path: Path, notes: Notes, num: int) -> list[Arrival]:
    """The first num rows that can be used, by time, from 0 on. Raises ConfigError where there is none."""
    found: list[Arrival] = []
    for row in rows:
        if len(found) == num:
            break
        try:
            found.append(read(row))
        except UnusableRow as reason:
            notes.add(f"rows were left out: {reason}")
    if not found:
        reasons = "; ".join(f"{num} {what}" for what, num in notes.counts.items()) or "it is empty"
        raise ConfigError(f"{path} has no row that can be used: {reasons}.", param="dataset_path")
    notes.add("rows came before their time and were sorted", sum(b.time_s < a.time_s for a, b in pairwise(found)))
    found.sort(key=lambda arrival: arrival.time_s)
    start_s = found[0].time_s
    return [replace(arrival, time_s=arrival.time_s - start_s) for arrival in found]


def mooncake_row(row: Row) -> Arrival:
    """timestamp in ms, input_length, output_length; hash_ids may be missing or null."""
    ids = row.get("hash_ids") or ()
    if not isinstance(ids, list | tuple):
        raise UnusableRow("hash_ids is no list")
    lengths = length_of(row, "input_length"), length_of(row, "output_length")
    return Arrival(number_of(row, "timestamp") / 1000.0, *lengths, tuple(map(str, ids)))


def azure_row(row: Row) -> Arrival:
    """TIMESTAMP (wall clock, up to 100 ns), ContextTokens, GeneratedTokens."""
    # A time zone, which all rows share, is left out.
    stamp = _STAMP.match(str(row.get("TIMESTAMP")).strip())
    try:
        whole = datetime.fromisoformat(stamp[1]) if stamp else None
    except ValueError:
        whole = None
    if stamp is None or whole is None:
        raise UnusableRow("TIMESTAMP is no time")
    time_s = (whole - datetime(1970, 1, 1)).total_seconds() + float(stamp[2] or 0.0)
    return Arrival(time_s, length_of(row, "ContextTokens"), length_of(row, "GeneratedTokens"))


def length_pair(row: Row) -> Arrival:
    return Arrival(0.0, length_of(row, "num_prefill_tokens"), length_of(row, "num_decode_tokens"))


def number_of(row: Row, name: str) -> float:
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UnusableRow(f"{name} is no number")
    return number


def length_of(row: Row, name: str) -> int:
    number = number_of(row, name)
    if number < 1:
        raise UnusableRow(f"{name} is below 1")
    return int(number)


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Rows of a file that has at least these columns. Raises ConfigError."""
    reader = csv.DictReader(read_lines(path), skipinitialspace=True)
    try:
        there = [str(name).strip() for name in reader.fieldnames or ()]
        missing = [name for name in columns if name not in there]
        if missing:
            raise ConfigError(
                f"{path} has no column {missing[0]}; its columns are {', '.join(there)}.", param="dataset_path"
            )
        for row in reader:
            yield {str(name).strip(): value for name, value in row.items()}
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}, is no CSV: {error}.", param="dataset_path") from None
