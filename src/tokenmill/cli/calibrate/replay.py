"""Fits a law of steps to what clients saw of a server, whose steps nobody sees: the loads of its runs are simulated,
and the law is changed until the simulated requests take as long as the live ones did.

A simulation says which steps a request waited for and what they had to do, so its time is a sum over those steps that
the law's coefficients enter linearly. Where it differs from the live one, least squares say what the coefficients
should be; with them other steps are made, so this is done again, a few times. The law with the least errors is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...bench.load.fidelity import Fidelity, compare
from ...bench.load.recorded_load import RecordedLoad
from ...core.cost import Work
from ...core.least_squares import non_negative
from ...core.step_records import Machine
from ...sim.calibrated import Calibrated, Curve, Kind, Line, kind_of, shares
from ...sim.cluster_file import read_deployment
from ...sim.loop import VirtualLoop
from ...sim.service import Service
from ...sim.worker_file import Sources
from ..simulate.play import About, simulate

Json = dict[str, Any]
Matrix = NDArray[np.float64]

TOKEN_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NUM_ROUNDS = 12
_PART = 0.8
"""Of the way from a simulated time to the live one that a round goes: what it changes changes the steps, too."""
_FAR, _NEAR = 3.0, 0.05
"""Relative errors count as at most so many times the median amount, or this, whichever is more."""
_SURE = 1e-4
"""See core.least_squares.non_negative."""


@dataclass(frozen=True, slots=True)
class Live:
    """A run of a live server: its result, its load, and the file that it is of."""

    name: str
    result: Json
    load: RecordedLoad


class Replay(NamedTuple):
    """A load, simulated. begins, ends, works: of its steps, in their order; start_s: of the run, by their clock."""

    result: Json
    begins: Matrix
    ends: Matrix
    works: list[Work]
    start_s: float


class Fit(NamedTuple):
    """law, and what it says of each run that it was fitted to."""

    law: Calibrated
    errors: tuple[Fidelity, ...]


class _Steps:
    """A `sim.trace.Trace`."""

    def __init__(self) -> None:
        self.all: list[tuple[float, float, Work]] = []

    def step(self, worker: str, work: Work, begin_s: float, end_s: float) -> None:
        self.all.append((begin_s, end_s, work))

    def carried(self, source: str, destination: str, num_bytes: int, begin_s: float, end_s: float) -> None:
        pass


def replay(law: Calibrated, live: Live, tables: Mapping[str, Any]) -> Replay:
    """The load on a service with this law. tables: of a cluster's file, of which any name of a calibration is it."""

    def shape(name: str) -> Any:
        raise AssertionError(name)

    deployment = read_deployment(tables, Sources(lambda name: law, shape))
    steps = _Steps()

    def watch(loop: VirtualLoop, service: Service) -> None:
        service.trace = steps

    about = About(digest_of=lambda plan, load: live.load.digest)
    found = simulate(lambda loop, seed: Service(deployment, loop, seed=seed), live.load.answered, about, watch=watch)
    result = found.run.to_json()
    begins, ends = (np.array([each[i] for each in steps.all], dtype=np.float64) for i in (0, 1))
    return Replay(result, begins, ends, [each[2] for each in steps.all], found.run.client.clock_start_s)


def errors_of(law: Calibrated, live: Live, tables: Mapping[str, Any]) -> Fidelity:
    return compare(live.name, [live.result], [replay(law, live, tables).result])


def fit(lives: Sequence[Live], machine: Machine, tables: Mapping[str, Any], num_rounds: int = NUM_ROUNDS) -> Fit:
    """The law of a server that these runs were made on."""
    law = _first(lives, machine)
    best: Fit | None = None
    least = float("inf")
    for _ in range(num_rounds):
        replays = [replay(law, live, tables) for live in lives]
        errors = tuple(
            compare(live.name, [live.result], [each.result]) for live, each in zip(lives, replays, strict=True)
        )
        score = fmean(score_of(each) for each in errors)
        if score < least:
            least, best = score, Fit(_with_seen(law, replays), errors)
        law = _next(law, lives, replays)
    assert best is not None, num_rounds
    return best


def score_of(fidelity: Fidelity) -> float:
    """Of a run: the sizes of the errors of its requests, and of its means."""
    sizes = [each.median_size for each in fidelity.requests]
    means = [figure.size for name in ("ttft_s", "tpot_s", "e2el_s") if (figure := fidelity.figure(f"{name}.mean"))]
    return fmean([*sizes, *means])


def times_of(result: Json) -> dict[int, tuple[float, float, float]]:
    """Index of a request that was answered -> when it was sent, its first token and its last came."""
    return {
        row["index"]: (row["sent_s"], row["first_s"], row["last_s"])
        for row in result["requests"]
        if row["ok"] and None not in (row["sent_s"], row["first_s"], row["last_s"])
    }


def _first(lives: Sequence[Live], machine: Machine) -> Calibrated:
    """Where the search begins: the shortest times between tokens, and of a token of a prompt."""
    between, reading = [], []
    for live in lives:
        times = times_of(live.result)
        for row in live.result["requests"]:
            sent_s, first_s, last_s = times.get(row["index"], (0.0, 0.0, 0.0))
            if last_s > first_s and (row["output_tokens"] or 0) > 1:
                between.append((last_s - first_s) / (row["output_tokens"] - 1))
            if first_s > sent_s and row["input_tokens"]:
                reading.append((first_s - sent_s) / row["input_tokens"])
    step_s = float(np.quantile(between, 0.1)) if between else 0.0
    return _law(machine, [step_s, 0.0, 0.0, 0.0, float(np.quantile(reading, 0.05)), 0.0], [0.0])


def _law(machine: Machine, found: Sequence[float], knots: Sequence[float], num: int = 0) -> Calibrated:
    step_s, position_s, context_s, row_s, *slopes, front_s = found
    rows, none = Curve([0.0], [row_s]), Curve([0.0], [0.0])
    front = Line(front_s, 0.0, num)
    return Calibrated(machine, step_s, position_s, context_s, Curve(knots, slopes), rows, none, front=front)


def _next(law: Calibrated, lives: Sequence[Live], replays: Sequence[Replay]) -> Calibrated:
    """The law with which these steps would take the requests as long as live, but for what is not to be had."""
    most = max(work.num_tokens for each in replays for work in each.works)
    counts = {int(work.num_tokens) for each in replays for work in each.works}
    knots = [0.0, *(float(low) for low, high in pairwise(TOKEN_KNOTS) if low and any(low < n <= high for n in counts))]
    knots = [each for each in knots if each < most] or [0.0]
    parts = [_observations(law, live, each, knots) for live, each in zip(lives, replays, strict=True)]
    quantities, wanted, measured = (np.concatenate([part[i] for part in parts]) for i in range(3))
    found = _solve(quantities, wanted, measured)
    return _law(law.machine, found, knots, len(measured))


def _observations(law: Calibrated, live: Live, seen: Replay, knots: Sequence[float]) -> tuple[Matrix, Matrix, Matrix]:
    """Of spans of requests, from sending to the first token and from there to the last: the sums that coefficients
    multiply, what these should come to, and how long it was live."""
    real, made = times_of(live.result), times_of(seen.result)
    indexes = [index for index in real if index in made]
    spans, lasted, is_first = [], [], []
    for index in indexes:
        for i in (0, 1):
            low, high = made[index][i : i + 2]
            took_s = real[index][i + 1] - real[index][i]
            if high > low and took_s > 0:
                spans.append((low + seen.start_s, high + seen.start_s))
                lasted.append(took_s)
                is_first.append(i == 0)
    each_step = np.array(
        [[1.0, w.num_positions, w.num_context, w.num_rows, *shares(knots, w.num_tokens)] for w in seen.works]
    )
    took = np.array([law.predict(work) for work in seen.works])
    lows, highs = np.array(spans).T
    sums = _between(seen, np.concatenate((each_step, took[:, None]), axis=1), lows, highs)
    first, measured = np.array(is_first, dtype=np.float64), np.array(lasted)
    simulated = highs - lows
    # What the simulation took beside steps and front end (messages, idle moments) stays as it is.
    beside = simulated - sums[:, -1] - first * law.front.base_s
    wanted = np.maximum(simulated + _PART * (measured - simulated) - beside, 0.0)
    return np.concatenate((sums[:, :-1], first[:, None]), axis=1), wanted, measured


def _between(seen: Replay, quantities: Matrix, lows: Matrix, highs: Matrix) -> Matrix:
    """Sums of quantities of steps within spans of time; of a step within it in part, that part."""
    times = np.stack((seen.begins, seen.ends), axis=1).ravel()
    after = np.cumsum(quantities, axis=0)
    heights = np.stack((after - quantities, after), axis=1).reshape(len(times), -1)
    columns = [np.interp(highs, times, each) - np.interp(lows, times, each) for each in heights.T]
    return np.stack(columns, axis=1)


def _solve(quantities: Matrix, wanted: Matrix, measured: Matrix) -> list[float]:
    """Coefficients, none of them negative, of least relative errors; those far beyond the usual count only so much."""
    scaled, goal = quantities / measured[:, None], wanted / measured
    products = (scaled.T @ scaled).tolist()
    sure = [_SURE] * quantities.shape[1]
    target = goal
    found = np.zeros(quantities.shape[1])
    for _ in range(6):
        found = np.array(non_negative(products, (scaled.T @ target).tolist(), sure))
        said = scaled @ found
        off = goal - said
        far = max(_NEAR, _FAR * float(np.median(np.abs(off))))
        target = said + np.clip(off, -far, far)
    coefficients: list[float] = found.tolist()
    return coefficients


def _with_seen(law: Calibrated, replays: Sequence[Replay]) -> Calibrated:
    """With the kinds of steps that its fit had."""
    contexts: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in replays:
        for work in each.works:
            contexts[kind_of(work)].append(work.num_context / max(1, work.num_rows))
    kinds = tuple(Kind(*key, len(found), min(found), max(found)) for key, found in sorted(contexts.items()))
    fields = {name: getattr(law, name) for name in ("step_s", "position_s", "context_s", "tokens", "rows", "drawn")}
    return Calibrated(law.machine, seen=kinds, front=law.front, **fields)
