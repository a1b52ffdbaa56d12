"""How near a simulation comes: runs of one load, live and simulated, laid side by side.

Knows results as the JSON objects they are written as (docs/operate/benchmarking.md), not how either came about. Runs
are taken in pairs: live run i and the simulation of it, which has the same plan. An error is simulated / live - 1.
Beside each stands what two live runs of that load differ by, the least that any simulation could be asked for.

Requests are matched by their index in the plan; one that failed in either run is left out, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from statistics import fmean, median
from typing import Any

from ...core.errors import ConfigError
from ..result import SCHEMA
from .histogram import quantile

Json = dict[str, Any]

FIGURES = (
    *(f"{name}.{part}" for name in ("ttft_s", "tpot_s", "itl_s", "e2el_s") for part in ("mean", "p50", "p90", "p99")),
    "requests_per_s",
    "output_tokens_per_s",
    "mean_in_flight",
    "prefix_hit_share",
)
"""Compared, where both runs have them. prefix_hit_share is a share already: its error is a difference."""
OF_REQUESTS = ("ttft_s", "tpot_s", "e2el_s")
NUM_MOMENTS = 200
"""At which the queues are compared."""


@dataclass(frozen=True, slots=True)
class FigureError:
    """A figure over the pairs: means of both sides, the mean error with its sign, the mean of its size, and the mean
    size of the difference of two live runs (None for one)."""

    metric: str
    live: float
    simulated: float
    error: float
    size: float
    live_to_live: float | None


@dataclass(frozen=True, slots=True)
class RequestError:
    """Errors of single requests: of the size of the error the median, mean and p90, of its signed value the median.
    Each is the mean over the pairs. live_to_live: the median size of the difference between two live runs."""

    metric: str
    num: int
    median: float
    median_size: float
    mean_size: float
    p90_size: float
    live_to_live: float | None


@dataclass(frozen=True, slots=True)
class QueueError:
    """Requests in flight, or without a first token, over the time of the first pair. distance: the mean over its
    moments of the two curves' difference, as a share of the live mean."""

    name: str
    at_s: list[float]
    live: list[int]
    simulated: list[int]
    distance: float | None


@dataclass(frozen=True, slots=True)
class Fidelity:
    """speed: of each pair, how much slower than when calibrated the machine was taken to be (1: as fast). num_left_out:
    requests that failed in either run of a pair."""

    name: str
    figures: list[FigureError]
    requests: list[RequestError]
    queues: list[QueueError]
    num_matched: int
    num_left_out: int
    speed: list[float]
    warnings: list[str]
    live: list[Json]
    simulated: list[Json]

    def figure(self, metric: str) -> FigureError | None:
        return next((each for each in self.figures if each.metric == metric), None)

    def request(self, metric: str) -> RequestError | None:
        return next((each for each in self.requests if each.metric == metric), None)

    def to_json(self) -> Json:
        return {"schema": SCHEMA, "kind": "fidelity", **asdict(self)}


def runs_in(result: Json) -> list[Json]:
    """The runs of a result that have a simulation each: of `bench serve` with or without --repeats. Raises
    ConfigError."""
    kind = result.get("kind")
    if kind not in ("run", "repeats"):
        raise ConfigError(
            f"A simulation is held against what `bench serve` wrote for one load, not against a {kind}.",
            param="against",
        )
    return list(result["runs"]) if kind == "repeats" else [result]


def compare(name: str, live: Sequence[Json], simulated: Sequence[Json], speed: Sequence[float] = ()) -> Fidelity:
    """Live runs and the simulation of each. Raises ConfigError where a pair had different loads, or nothing in
    common succeeded."""
    assert len(live) == len(simulated) > 0, (len(live), len(simulated))
    pairs = list(zip(live, simulated, strict=True))
    for one, other in pairs:
        if one["dataset"]["digest"] != other["dataset"]["digest"]:
            raise ConfigError(
                "The live run and the simulation had different loads: their data set's digests"
                f" {str(one['dataset']['digest'])[:12]} and {str(other['dataset']['digest'])[:12]} differ.",
                param="against",
            )
    matched = [_matched(one, other) for one, other in pairs]
    if not all(matched):
        raise ConfigError("No request succeeded both live and simulated.", param="against")
    repeats = _repeats(live)
    return Fidelity(
        name,
        [figure for metric in FIGURES if (figure := _figure(metric, pairs, repeats)) is not None],
        [error for metric in OF_REQUESTS if (error := _request(metric, pairs, repeats)) is not None],
        [_queue("in flight", "end_s", *pairs[0]), _queue("without a first token", "first_s", *pairs[0])],
        num_matched=sum(map(len, matched)),
        num_left_out=sum(len(one["requests"]) - len(rows) for (one, _), rows in zip(pairs, matched, strict=True)),
        speed=list(speed),
        warnings=list(dict.fromkeys(text for one, other in pairs for text in (*one["warnings"], *other["warnings"]))),
        live=list(live),
        simulated=list(simulated),
    )


def value_of(run: Json, metric: str) -> float | None:
    """A figure of a run by its dotted name."""
    name, _, part = metric.partition(".")
    value = run.get(name)
    found = value.get(part) if part and isinstance(value, dict) else value
    return None if found is None else float(found)


def _repeats(live: Sequence[Json]) -> list[tuple[Json, Json]]:
    """Live runs of one load in both orders: those whose plans are the same, and when and by whom they were sent."""
    loads = [(run["dataset"]["digest"], {**run["schedule"], "repeat": 0}) for run in live]
    return [(live[a], live[b]) for a, b in permutations(range(len(live)), 2) if loads[a] == loads[b]]


def _off(metric: str, one: Json, other: Json) -> float | None:
    """By how much `other` is off, taking `one` for true."""
    true, value = value_of(one, metric), value_of(other, metric)
    if true is None or value is None:
        return None
    if metric.endswith("_share"):
        return value - true
    return value / true - 1 if true > 0 else None


def _figure(
    metric: str, pairs: Sequence[tuple[Json, Json]], repeats: Sequence[tuple[Json, Json]]
) -> FigureError | None:
    errors = [error for pair in pairs if (error := _off(metric, *pair)) is not None]
    if len(errors) < len(pairs):
        return None
    others = [abs(error) for pair in repeats if (error := _off(metric, *pair)) is not None]
    return FigureError(
        metric,
        fmean(value_of(one, metric) or 0.0 for one, _ in pairs),
        fmean(value_of(other, metric) or 0.0 for _, other in pairs),
        fmean(errors),
        fmean(map(abs, errors)),
        fmean(others) if others else None,
    )


def _matched(one: Json, other: Json) -> list[tuple[Json, Json]]:
    """Rows of one request that succeeded in both runs."""
    by_index = {row["index"]: row for row in other["requests"] if row["ok"]}
    return [(row, by_index[row["index"]]) for row in one["requests"] if row["ok"] and row["index"] in by_index]


def latency_of(row: Json, metric: str) -> float | None:
    """Of a row, as bench defines it; None where it has none."""
    first, last, due = row["first_s"], row["last_s"], row["due_s"]
    if metric == "ttft_s":
        return None if first is None else float(first - due)
    if metric == "e2el_s":
        return None if last is None else float(last - due)
    num = row["output_tokens"] or 0
    if first is None or last is None or num < 2 or last == first:
        return None
    return float(last - first) / (num - 1)


def request_errors(metric: str, one: Json, other: Json) -> list[float]:
    """Of each request that both runs have, with its sign, in the order of the plan."""
    errors = []
    for row, twin in _matched(one, other):
        true, value = latency_of(row, metric), latency_of(twin, metric)
        if true is not None and value is not None and true > 0:
            errors.append(value / true - 1)
    return errors


def _request(
    metric: str, pairs: Sequence[tuple[Json, Json]], repeats: Sequence[tuple[Json, Json]]
) -> RequestError | None:
    by_pair = [request_errors(metric, *pair) for pair in pairs]
    if not all(by_pair):
        return None
    sizes = [sorted(map(abs, errors)) for errors in by_pair]
    others = [median(map(abs, errors)) for pair in repeats if (errors := request_errors(metric, *pair))]
    return RequestError(
        metric,
        sum(map(len, by_pair)),
        fmean(map(median, by_pair)),
        fmean(map(median, sizes)),
        fmean(map(fmean, sizes)),
        fmean(quantile(each, 0.9) for each in sizes),
        fmean(others) if others else None,
    )


def _queue(name: str, until: str, one: Json, other: Json) -> QueueError:
    """Requests that have been sent and not yet come to `until`, at evenly spaced moments of the longer run."""
    end_s = max((row["end_s"] or 0.0 for run in (one, other) for row in run["requests"]), default=0.0)
    at_s = [end_s * (i + 0.5) / NUM_MOMENTS for i in range(NUM_MOMENTS)]
    live, simulated = (_levels(run["requests"], until, at_s) for run in (one, other))
    total = sum(live)
    distance = sum(abs(a - b) for a, b in zip(live, simulated, strict=True)) / total if total else None
    return QueueError(name, at_s, live, simulated, distance)


def _levels(rows: Sequence[Json], until: str, at_s: Sequence[float]) -> list[int]:
    edges: list[tuple[float, int]] = []
    for row in rows:
        end_s = row[until] if row[until] is not None else row["end_s"]
        if row["sent_s"] is not None and end_s is not None:
            edges += [(row["sent_s"], 1), (end_s, -1)]
    edges.sort()
    levels, level, place = [], 0, 0
    for moment in at_s:
        while place < len(edges) and edges[place][0] <= moment:
            level += edges[place][1]
            place += 1
        levels.append(level)
    return levels
