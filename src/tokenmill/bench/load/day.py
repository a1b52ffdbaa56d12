"""A day made of a slice of a trace: its gaps again and again, faster by day and slower by night, and its lengths drawn
anew.

    rate(t) = mean rate of the slice * (1 + SWING * cos(2 pi (t - PEAK_S) / DAY_S))       t: seconds after midnight, UTC

The mean over 24 hours is the slice's. Each pass over the slice begins at another of its gaps, which the seed draws, and
goes round: bursts stay as they were recorded, only stretched by the hour's rate. Lengths of prompt and answer are drawn
together, a recorded request's pair with replacement (a bootstrap; Efron, 1979). Of a day this is a model, not a
recording: the swing is our choice, between half the mean at two in the night and one and a half of it at two in the
afternoon, and no request knows of another.

Times and lengths come from an iterator, which holds the slice and nothing of the day.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import Path

from ...core.errors import ConfigError
from .datasets import read_lines
from .plan import Call, Drawn, Message, Plan, generator
from .trace_rows import AZURE_COLUMNS, Arrival, Notes, arrivals, azure_row, csv_rows
from .traces import Fit

DAY_S = 86400.0
SWING = 0.5
PEAK_S = 14 * 3600.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")
_CLOSE_S, _MOST_STEPS = 1e-7, 50


def read_duration(text: str) -> float:
    """24h, 90m, 3600s or 3600 -> seconds. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    duration_s = float(found[1]) * _UNITS_S[found[2] or "s"] if found else 0.0
    if not 0 < duration_s < math.inf:
        raise ValueError(f"must be a time such as 24h, 90m or 600s, got {text!r}.")
    return duration_s


def day_of(path: Path, num: int, seed: int, fit: Fit, duration_s: float, start_s: float = 0.0) -> Plan:
    """The first `num` requests of a day made of an Azure trace. Raises ConfigError."""
    calls = []
    for i, row in enumerate(islice(arrivals_of_day(_slice(path, fit.notes), seed, duration_s, start_s, path), num)):
        parts, output_len = fit.cut([Drawn(f"request/{i}", fit.length(row.input_len))], fit.length(row.output_len))
        calls.append(Call(i, (Message("user", parts),), output_len, delay_s=row.time_s, session=f"request-{i}"))
    facts = {"name": "azure day", "path": str(path), "day_s": duration_s, "start_s": start_s, "swing": SWING}
    return Plan(tuple(calls), seed, facts | fit.facts(), True, fit.notes.remarks)


def num_in_day(path: Path, seed: int, duration_s: float, start_s: float = 0.0) -> int:
    """Requests of it. Raises ConfigError."""
    return sum(1 for _ in arrivals_of_day(_slice(path, Notes()), seed, duration_s, start_s, path))


def _slice(path: Path, notes: Notes) -> list[Arrival]:
    if "TIMESTAMP" not in [column.strip() for column in next(read_lines(path), "").split(",")]:
        raise ConfigError(
            f"--day wants an Azure trace: {path} has no column TIMESTAMP.",
            param="day",
        )
    return arrivals(csv_rows(path, AZURE_COLUMNS), azure_row, path, notes, sys.maxsize)


def mean_time_s(time_s: float) -> float:
    """The integral of the rate from midnight on, in seconds of the mean rate."""
    turn = 2 * math.pi / DAY_S
    return time_s + SWING / turn * (math.sin(turn * (time_s - PEAK_S)) + math.sin(turn * PEAK_S))


def arrivals_of_day(
    rows: Sequence[Arrival], seed: int, duration_s: float, start_s: float = 0.0, path: object = "The trace"
) -> Iterator[Arrival]:
    """Requests from `start_s` after midnight on, for so long, by time from 0 on. Raises ConfigError for a slice that
    has no rate."""
    if not 0 <= start_s < math.inf:
        raise ConfigError(
            f"--trace-start must be at least 0 seconds after midnight, got {start_s}.", param="trace_start"
        )
    span_s = rows[-1].time_s - rows[0].time_s if rows else 0.0
    if span_s <= 0:
        raise ConfigError(f"{path} has no two times that differ: --day cannot tell its rate.", param="day")
    rng = generator(seed, "day")
    return _arrivals(rows, rng, duration_s, start_s)


def _arrivals(rows: Sequence[Arrival], rng: random.Random, duration_s: float, start_s: float) -> Iterator[Arrival]:
    begin_s = mean_time_s(start_s)
    time_s, end_s = start_s, start_s + duration_s
    for mean_s in _mean_times(rows, rng):
        time_s = _time_at(begin_s + mean_s, time_s)
        if time_s >= end_s:
            return
        drawn = rows[rng.randrange(len(rows))]
        yield Arrival(time_s - start_s, drawn.input_len, drawn.output_len)


def _mean_times(rows: Sequence[Arrival], rng: random.Random) -> Iterator[float]:
    """Times at the mean rate, without end. The gap that closes the circle is the mean one."""
    gaps_s = [after.time_s - before.time_s for before, after in pairwise(rows)]
    gaps_s.append(sum(gaps_s) / len(gaps_s))
    period_s, now_s = sum(gaps_s), 0.0
    for nth in count(1):
        first = rng.randrange(len(gaps_s))
        for place in range(first, first + len(gaps_s)):
            yield now_s
            now_s += gaps_s[place % len(gaps_s)]
        now_s = nth * period_s  # rounding does not add up


def _time_at(mean_s: float, time_s: float) -> float:
    """When the integral of the rate is `mean_s`, by Newton's method from `time_s` on, which is before it."""
    turn = 2 * math.pi / DAY_S
    for _ in range(_MOST_STEPS):
        step_s = (mean_s - mean_time_s(time_s)) / (1 + SWING * math.cos(turn * (time_s - PEAK_S)))
        time_s += step_s
        if abs(step_s) < _CLOSE_S:
            break
    return time_s
