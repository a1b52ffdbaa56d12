"""The plots of load measurements: distributions, timelines, dots by request, curves over load, bars over repeats.

Takes runs as the JSON objects of docs/operate/benchmarking.md. Groups of runs (repeats, rates, endpoints) become curves
in the same plot; large runs are thinned, always in the same way, and the plot says so. Lengths of time are drawn in
milliseconds or seconds, whichever reads better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .page import LATENCIES, time_unit
from .plot import Axis, Estimate, Point, Series, cumulative, intervals, plot, short, thin

Json = dict[str, Any]
Dot = tuple[Point, str]
"""A place and its hover text."""

MAX_DOTS = 1500
MAX_SLICES = 240
MAX_CURVES = 6
"""Curves in one plot beyond which the eye gives up."""

_PERCENTILES = tuple((share, f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0))


def latency_curves(groups: Mapping[str, list[Json]]) -> list[str]:
    """Cumulative distributions of TTFT, TPOT, ITL and E2EL, one curve for each group of runs."""
    readers: dict[str, Callable[[Json], Iterable[float]]] = {
        "ttft_s": lambda row: [row["first_s"] - row["due_s"]],
        "tpot_s": _tpot,
        "itl_s": lambda row: (b - a for a, b in pairwise(row["event_s"] or ())),
        "e2el_s": lambda row: [row["last_s"] - row["due_s"]],
    }
    figures = []
    for field, read in readers.items():
        values = {
            name: [value for run in runs for row in run["requests"] if _answered(row) for value in read(row)]
            for name, runs in groups.items()
        }
        if not any(values.values()):
            continue
        unit = time_unit([max(map(max, filter(None, values.values())))])
        name = LATENCIES[field][0]
        series = [
            Series(group, [(value * unit.factor, share) for value, share in cumulative(each)])
            for group, each in values.items()
        ]
        spread = _is_wide([value for each in values.values() for value in each])
        x = Axis(f"{name}, {unit.name}", log=spread, low=None if spread else 0.0)
        figures.append(plot(name, x, Axis("share of values at or below", ticks=_PERCENTILES), series))
    return figures


def _tpot(row: Json) -> list[float]:
    num = row["output_tokens"] or 0
    return [(row["last_s"] - row["first_s"]) / (num - 1)] if num > 1 else []


def _answered(row: Json) -> bool:
    return row["ok"] and row["first_s"] is not None and row["last_s"] is not None


def _is_wide(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows the values better: their upper half spans more than a factor of 30."""
    ranked = sorted(value for value in values if value > 0)
    return bool(ranked) and ranked[-1] > 30 * ranked[len(ranked) // 2]


def timeline(run: Json) -> list[str]:
    slices, width_s = _merge(run["timeline"], run["timeline_bucket_s"])
    if not slices:
        return []

    def series(name: str, field: str, kind: str = "step") -> Series:
        per_s = 1.0 if field == "in_flight" else width_s
        points = [(each["t_s"], each[field] / per_s) for each in slices]
        return Series(name, [*points, (points[-1][0] + width_s, points[-1][1])], kind)

    time = Axis("time since the start, s", low=0.0, high=slices[-1]["t_s"] + width_s)
    requests = [series("due", "num_due"), series("answered", "num_ok")]
    if run["num_failed"]:
        requests.append(series("failed", "num_failed"))
    note = f"Slices of {short(width_s)} s."
    figures = [
        plot("Requests", time, Axis("requests/s", low=0.0), requests, note),
        plot("Output tokens", time, Axis("tokens/s", low=0.0), [series("output tokens", "output_tokens")], note),
        plot("Requests in flight", time, Axis("requests", low=0.0), [series("in flight", "in_flight")], note),
    ]
    answered = [row for row in run["requests"] if _answered(row)]
    dots, note = _dots(answered, "due_s", "first_s")
    figures.append(_scatter("TTFT over time", time, "TTFT", {"": dots}, note))
    return figures


def _merge(timeline: Sequence[Json], width_s: float) -> tuple[list[Json], float]:
    """At most MAX_SLICES slices: neighbours joined, counts added, in_flight averaged."""
    every = -(-len(timeline) // MAX_SLICES) if timeline else 1
    merged = []
    for start in range(0, len(timeline), every):
        part = timeline[start : start + every]
        joined: Json = {"t_s": part[0]["t_s"], "in_flight": sum(each["in_flight"] for each in part) / len(part)}
        for field in ("num_due", "num_ok", "num_failed", "output_tokens"):
            joined[field] = sum(each[field] for each in part)
        merged.append(joined)
    return merged, width_s * every


def scatters(groups: Mapping[str, list[Json]]) -> list[str]:
    """TTFT against input length, E2EL against output length."""
    figures = []
    for title, field, axis, name, end in (
        ("TTFT by input length", "input_tokens", "input tokens", "TTFT", "first_s"),
        ("E2EL by output length", "output_tokens", "output tokens", "E2EL", "last_s"),
    ):
        dots: dict[str, list[Dot]] = {}
        notes: list[str] = []
        for group, runs in groups.items():
            rows = [row for run in runs for row in run["requests"] if _answered(row) and row[field] is not None]
            dots[group], note = _dots(rows, field, end, MAX_DOTS // len(groups))
            notes += [note] if note else []
        if any(dots.values()):
            figures.append(_scatter(title, Axis(axis, low=0.0), name, dots, notes[0] if notes else ""))
    return figures


def _dots(rows: Sequence[Json], x: str, end: str, most: int = MAX_DOTS) -> tuple[list[Dot], str]:
    """(at most `most` rows as dots at field `x` and the time from due to field `end`, a note where some are left
    out)."""
    kept = thin(rows, most)
    dots = []
    for row in kept:
        lengths = f"{row['input_tokens']} in, {row['output_tokens']} out"
        text = f"request {row['index']}: {lengths}, due {row['due_s']:.2f} s"
        dots.append(((row[x], row[end] - row["due_s"]), text))
    return dots, "" if len(kept) == len(rows) else f"{len(kept)} of {len(rows)} requests, evenly chosen."


def _scatter(title: str, x: Axis, name: str, dots: Mapping[str, list[Dot]], note: str) -> str:
    """Of points whose y is in seconds."""
    unit = time_unit([point[1] for each in dots.values() for point, _ in each])
    series = [
        Series(
            group,
            [(point[0], point[1] * unit.factor) for point, _ in each],
            "dots",
            [f"{text}, {name} {short(point[1] * unit.factor)} {unit.name}" for point, text in each],
        )
        for group, each in dots.items()
    ]
    wide = _is_wide([point[1] for each in dots.values() for point, _ in each])
    return plot(title, x, Axis(f"{name}, {unit.name}", log=wide, low=None if wide else 0.0), series, note)


def load_curves(points: Sequence[float], runs: Sequence[Json], label: str, *, with_tradeoff: bool = True) -> list[str]:
    """Latency, throughput and goodput against load."""
    x = Axis(label, low=0.0)
    figures = []
    for field in ("ttft_s", "tpot_s", "e2el_s"):
        name = LATENCIES[field][0]
        known = [run[field][share] for run in runs for share in ("p50", "p99") if run[field][share] is not None]
        if not known:
            continue
        unit = time_unit([max(known)])
        series = [
            Series(
                share,
                [
                    (point, run[field][share] * unit.factor)
                    for point, run in zip(points, runs, strict=True)
                    if run[field][share] is not None
                ],
                "marked",
            )
            for share in ("p50", "p90", "p99")
        ]
        wide = _is_wide(known)
        figures.append(plot(name, x, Axis(f"{name}, {unit.name}", log=wide, low=None if wide else 0.0), series))
    rates = [
        Series(name, [(point, run[field]) for point, run in zip(points, runs, strict=True)], "marked")
        for name, field in (("answered", "requests_per_s"), ("met the SLO", "goodput_requests_per_s"))
    ]
    if not any(run["slo"]["objectives"] for run in runs):
        rates.pop()
    tokens = [(point, run["output_tokens_per_s"]) for point, run in zip(points, runs, strict=True)]
    figures.append(plot("Requests", x, Axis("requests/s", low=0.0), rates))
    figures.append(plot("Output tokens", x, Axis("tokens/s", low=0.0), [Series("output tokens", tokens, "marked")]))
    if with_tradeoff:
        pairs = [(run["output_tokens_per_s"], run["tpot_s"]["p50"]) for run in runs if run["tpot_s"]["p50"] is not None]
        series = [Series("TPOT p50", [(rate, tpot * 1e3) for rate, tpot in pairs], "marked")]
        axes = Axis("output tokens/s", low=0.0), Axis("TPOT p50, ms", low=0.0)
        figures.append(plot("TPOT against throughput", *axes, series, "Points in the order of the load."))
    return figures


def repeat_bars(
    title: str, axis: str, by_name: Mapping[str, list[Json]], colours: Mapping[str, int], read: Callable[[Json], Any]
) -> str:
    """Median over repeats of each endpoint, from its least to its most, with every repeat."""
    rows = []
    for name, runs in by_name.items():
        values = sorted(value for run in runs if (value := read(run)) is not None)
        if values:
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            rows.append(
                Estimate(f"{name}: {short(middle)}", middle, values[0], values[-1], colours[name], tuple(values))
            )
    return intervals(title, Axis(axis, low=0.0), rows, note="Median, least and most over repeats; a ring per repeat.")


def few(groups: Mapping[str, list[Json]]) -> dict[str, list[Json]]:
    """At most MAX_CURVES groups, evenly chosen."""
    return {name: groups[name] for name in thin(list(groups), MAX_CURVES)}
