"""A day made of a slice of a trace: how many requests, when, and how long."""

from __future__ import annotations

import argparse
import random
from bisect import bisect
from itertools import pairwise
from pathlib import Path

import pytest

from tokenmill.bench.load.options import add_serve_arguments, make_load
from tokenmill.bench.load.schedule import (
    DAY_S,
    PEAK_S,
    SWING,
    diurnal_arrivals,
    diurnal_plan,
    mean_time_s,
    num_in_diurnal_plan,
    read_duration,
)
from tokenmill.bench.load.trace_rows import Arrival
from tokenmill.bench.load.traces import Fit
from tokenmill.core.errors import ConfigError


def slice_of(num: int, mean_gap_s: float = 10.0) -> list[Arrival]:
    rng, now_s, rows = random.Random(1), 0.0, []
    for _ in range(num):
        input_len = rng.randint(10, 2000)
        rows.append(Arrival(now_s, input_len, input_len + 1))
        now_s += rng.expovariate(1 / mean_gap_s)
    return rows


def write(folder: Path, num: int = 50) -> Path:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for row in slice_of(num):
        seconds = f"{int(row.time_s // 60):02d}:{row.time_s % 60:09.6f}"
        lines.append(f"2023-11-16 18:{seconds},{row.input_len},{row.output_len}")
    path = folder / "azure.csv"
    path.write_text("\n".join(lines), "utf8")
    return path


def test_a_day_has_the_slices_rate_on_average_and_the_hours_rate_at_each() -> None:
    rows = slice_of(500)
    rate = len(rows) / (rows[-1].time_s * len(rows) / (len(rows) - 1))
    day = list(diurnal_arrivals(rows, 0, DAY_S))
    times_s = [each.time_s for each in day]
    assert all(a <= b for a, b in pairwise(times_s)) and times_s[0] >= 0 and times_s[-1] < DAY_S
    assert abs(len(day) / (rate * DAY_S) - 1) < 0.01
    hour_s = 3600.0
    for at_s, share in ((PEAK_S - hour_s, 1 + SWING), ((PEAK_S - DAY_S / 2) % DAY_S - hour_s, 1 - SWING)):
        num = bisect(times_s, at_s + 2 * hour_s) - bisect(times_s, at_s)
        assert abs(num / (2 * hour_s * rate) - share) < 0.15, (num, share)


def test_lengths_are_pairs_of_the_slice_drawn_anew() -> None:
    rows = slice_of(300)
    day = list(diurnal_arrivals(rows, 3, DAY_S))
    pairs = {(row.input_len, row.output_len) for row in rows}
    assert {(each.input_len, each.output_len) for each in day} == pairs
    mean = sum(row.input_len for row in rows) / len(rows)
    assert abs(sum(each.input_len for each in day) / len(day) / mean - 1) < 0.03
    lengths = [each.input_len for each in day]
    assert lengths[: len(rows)] != lengths[len(rows) : 2 * len(rows)]


def test_gaps_are_those_of_the_slice_at_the_hours_rate() -> None:
    """In seconds of the mean rate they are the recorded ones again, in their order."""
    rows = slice_of(40)
    gaps_s = [b.time_s - a.time_s for a, b in pairwise(rows)]
    found = [mean_time_s(each.time_s) for each in diurnal_arrivals(rows, 0, 3600.0)]
    seen = [b - a for a, b in pairwise(found)]
    first = min(range(len(gaps_s)), key=lambda place: abs(gaps_s[place] - seen[0]))
    num = min(10, len(gaps_s) - first)
    assert seen[:num] == pytest.approx(gaps_s[first : first + num], abs=1e-5)


def test_a_seed_decides_and_a_part_of_the_day_has_its_rate() -> None:
    rows = slice_of(200, 1.0)
    first, again, other = (list(diurnal_arrivals(rows, seed, 7200.0)) for seed in (0, 0, 1))
    assert first == again != other
    night, noon = (sum(1 for _ in diurnal_arrivals(rows, 0, 3600.0, start_s)) for start_s in (7200.0, PEAK_S))
    assert noon > 2 * night


def test_nothing_of_the_day_is_held() -> None:
    """The first requests of a year come at once."""
    year = diurnal_arrivals(slice_of(20), 0, 365 * DAY_S)
    assert len([next(year) for _ in range(5)]) == 5


def test_gaps_of_hours_end_too() -> None:
    rows = [Arrival(0.0, 1, 1), Arrival(9 * 3600.0, 1, 1), Arrival(22 * 3600.0, 1, 1)]
    times_s = [each.time_s for each in diurnal_arrivals(rows, 0, 10 * DAY_S)]
    assert all(a < b for a, b in pairwise(times_s)) and abs(len(times_s) - 3 * 10 * DAY_S / (33 * 3600.0)) < 2


def test_the_flag_plans_the_day(tmp_path: Path) -> None:
    """Without --num-prompts all of it, as many as were counted; with it the first."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    path = write(tmp_path)
    flags = ["--url", "http://h", "--dataset-name", "trace", "--dataset-path", str(path), "--day", "6h"]
    load = make_load(parser.parse_args(flags), flags, None)
    plan = load.schedule.apply(load.make_plan(load.num_prompts, 0, None))
    assert len(plan.calls) == load.num_prompts == num_in_diurnal_plan(path, 0, 6 * 3600.0) > 500
    assert plan.calls[-1].delay_s > 5.9 * 3600 and plan.has_times
    assert plan == diurnal_plan(path, 10**9, 0, Fit(), 6 * 3600.0)
    assert load.make_plan(7, 0, None).calls == plan.calls[:7]
    assert plan.facts["name"] == "azure day"


def test_durations_are_read_with_their_unit() -> None:
    assert [read_duration(text) for text in ("24h", "90m", "600s", "60", "1.5h", "1d")] == [
        86400,
        5400,
        600,
        60,
        5400,
        DAY_S,
    ]
    for text in ("", "0h", "-1h", "24 hours", "nan", "1w"):
        with pytest.raises(ValueError, match="24h, 90m or 600s"):
            read_duration(text)


def test_what_cannot_be_a_day_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no two times that differ"):
        diurnal_arrivals([Arrival(5.0, 1, 1)] * 3, 0, 60.0)
    with pytest.raises(ConfigError, match="--trace-start must be at least 0"):
        diurnal_arrivals(slice_of(3), 0, 60.0, -1.0)
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n3,4\n", "utf8")
    with pytest.raises(ConfigError, match="has no column TIMESTAMP"):
        diurnal_plan(path, 5, 0, Fit(), 60.0)
