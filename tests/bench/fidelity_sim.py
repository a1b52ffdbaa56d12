"""The simulated half of the fidelity measurement: each held-out load again, as fast as the slices beside it were.

Nothing here is fitted to a held-out load. A slice's slowness is how many times as long as by the calibration its steps
took, as the server's own step log has them; that of a load is the mean of the slices before and after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fidelity_cases import BEYOND, REPEATS_LIMIT, Case, Load, Setting

from tokenmill.bench.load.fidelity import Fidelity, compare
from tokenmill.bench.load.recorded_load import RecordedLoad, recorded_load
from tokenmill.bench.stats import VERDICT_CONFIDENCE, can_decide, paired_ratio
from tokenmill.core.step_records import read_steps
from tokenmill.plan.fit.logs import speed_factor
from tokenmill.plan.fit.observed import Observed, observed
from tokenmill.sim.calibrated import Calibrated

Json = dict[str, Any]
Simulate = Callable[[RecordedLoad, float], Json]
"""(load, slowness) -> the simulated run."""
Slowness = Callable[[Json, int], float]
"""(run of a slice, turn) -> how many times as long as calibrated the machine took."""

FIGURES = {
    "ttft_mean": "ttft_s.mean",
    "ttft_p99": "ttft_s.p99",
}
NUM_TRIES = 8


@dataclass(frozen=True)
class Verdict:
    """One bar: the error's size, what two live runs differ by, the stated share, and what is allowed."""

    what: str
    size: float
    live_to_live: float | None
    stated: float
    allowed: float

    @property
    def is_kept(self) -> bool:
        return self.size <= self.allowed


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text())
    return found


def logged(cost_model: Calibrated, folder: Path) -> Slowness:
    """By the step logs of the turns of a case."""
    turns: dict[int, list[Observed]] = {}

    def slowness(run: Json, turn: int) -> float:
        if turn not in turns:
            logs = [read_steps(path.read_bytes(), path.name) for path in logs_of(folder, turn)]
            turns[turn] = [each for log in logs for each in observed(log, logs)]
        begin_s = run["client"]["clock_start_s"]
        end_s = begin_s + max(row["end_s"] for row in run["requests"] if row["end_s"] is not None)
        return speed_factor(cost_model, [each for each in turns[turn] if begin_s <= each.step.ended_s < end_s])

    return slowness


def logs_of(folder: Path, turn: int) -> list[Path]:
    """One of each engine."""
    alone = folder / f"steps-r{turn}.log"
    return [alone] if alone.exists() else sorted(folder.glob(f"{alone.name}.w*"))


def factors_of(case: Case, folder: Path, turns: Sequence[int], slowness: Slowness) -> dict[str, float]:
    """Slowness of every slice, by its file's name; kept in the folder."""
    path = folder / "slowness.json"
    found: dict[str, float] = read(path) if path.exists() else {}
    for turn in turns:
        for number in range(len(case.loads) + 1):
            name = f"slice-{number}-r{turn}"
            if name not in found:
                found[name] = slowness(read(folder / f"{name}.json"), turn)
                print(f"  {case.name} {name}: {found[name]:.3f}", flush=True)
                path.write_text(json.dumps(found, indent=1))
    return found


def turns_of(case: Case, folder: Path) -> list[int]:
    """Turns whose files are all there."""
    turns = []
    for turn in range(100):
        names = [f"load-{load.name}-r{turn}" for load in case.loads]
        names += [f"slice-{number}-r{turn}" for number in range(len(case.loads) + 1)]
        if not all((folder / f"{name}.json").exists() for name in names):
            break
        turns.append(turn)
    return turns


def judge(case: Case, load: Load, number: int, folder: Path, simulate: Simulate, slowness: Slowness) -> Fidelity | None:
    """All turns of one load against their simulations; None where there is no turn."""
    turns = turns_of(case, folder)
    if not turns:
        return None
    factors = factors_of(case, folder, turns, slowness)
    live = [read(folder / f"load-{load.name}-r{turn}.json") for turn in turns]
    speed = [fmean(factors[f"slice-{n}-r{turn}"] for n in (number, number + 1)) for turn in turns]
    simulated = [simulate(recorded_load(run), factor) for run, factor in zip(live, speed, strict=True)]
    return compare(f"{case.name}, {load.name} % of capacity", live, simulated, speed)


def verdicts(case: Case, fidelity: Fidelity) -> list[Verdict]:
    """The bars that errors have. Of throughput there is none: below capacity both sides have what was offered."""
    found = []
    error = fidelity.request("e2el_s")
    if error is not None:
        found.append(_verdict("E2EL, median of requests", error.median_size, error.live_to_live, case.bars["e2e"]))
    for name, metric in FIGURES.items():
        figure = fidelity.figure(metric)
        if figure is not None:
            found.append(_verdict(name.replace("_", " "), figure.size, figure.live_to_live, case.bars[name]))
    return found


def _verdict(what: str, size: float, live_to_live: float | None, bar: float) -> Verdict:
    return Verdict(what, size, live_to_live, bar, max(bar, REPEATS_LIMIT * (live_to_live or 0.0)))


def load_shown(fidelity: Fidelity, simulate: Simulate) -> list[float]:
    """For each live run, the load at which the simulation shows its mean TTFT, over the load that it had."""
    found = []
    for live, factor in zip(fidelity.live, fidelity.speed, strict=True):
        recorded, wanted = recorded_load(live), live["ttft_s"]["mean"]
        low, high = 0.7, 1.4
        for _ in range(NUM_TRIES):
            middle = (low * high) ** 0.5
            shown = simulate(at_rate(recorded, middle), factor)["ttft_s"]["mean"]
            low, high = (middle, high) if shown < wanted else (low, middle)
        found.append((low * high) ** 0.5)
    return found


def load_verdict(shares: Sequence[float]) -> Verdict:
    return Verdict(
        "load that shows the live TTFT", fmean(abs(share - 1) for share in shares), None, *2 * (BEYOND["load"],)
    )


def at_rate(recorded: RecordedLoad, factor: float) -> RecordedLoad:
    """The same requests, so many times as fast."""
    schedule = recorded.load.schedule
    assert schedule.request_rate is not None, schedule
    faster = replace(schedule, request_rate=schedule.request_rate * factor)
    return replace(recorded, load=replace(recorded.load, schedule=faster))


@dataclass(frozen=True)
class Pair:
    """Two settings: ratio of the metric, second over first, live and simulated. is_decided: live, by `bench compare`'s
    rule."""

    first: str
    second: str
    live: float
    simulated: float
    is_decided: bool

    @property
    def is_alike(self) -> bool:
        return (self.live > 1) == (self.simulated > 1)


@dataclass(frozen=True)
class Order:
    """medians: of each setting, live and simulated. chosen, best: of the simulation, and live. regret: how far the
    chosen one's live median is from the best. repeat_error: median distance of single runs from their median."""

    metric: str
    medians: dict[str, tuple[float, float]]
    pairs: list[Pair]
    chosen: str
    best: str
    regret: float
    repeat_error: float


def put_in_order(
    comparison: Json, settings: Sequence[Setting], simulate: Callable[[Setting, RecordedLoad], Json]
) -> Order:
    """Settings by live medians and by simulated ones. The metric is the comparison's primary one."""
    metric: str = comparison["primary_metric"]
    higher = metric.endswith("_per_s")
    live: dict[str, list[float]] = {}
    shown: dict[str, list[float]] = {}
    for setting in settings:
        runs = [run for run in comparison["runs"] if run["name"] == setting.name]
        live[setting.name] = [_value(run, metric) for run in runs]
        shown[setting.name] = [_value(simulate(setting, recorded_load(run)), metric) for run in runs]
        print(f"  {setting.name}: {median(live[setting.name]):.4g}, {median(shown[setting.name]):.4g}", flush=True)
    medians = {name: (median(live[name]), median(shown[name])) for name in live}
    pairs = []
    for first, second in combinations(live, 2):
        found = paired_ratio(live[first], live[second], VERDICT_CONFIDENCE)
        is_decided = can_decide(len(live[first])) and found.p_value <= 1 - VERDICT_CONFIDENCE
        pairs.append(Pair(first, second, found.ratio, medians[second][1] / medians[first][1], is_decided))
    pick = max if higher else min
    chosen, best = pick(medians, key=lambda name: medians[name][1]), pick(medians, key=lambda name: medians[name][0])
    offs = [abs(value / medians[name][0] - 1) for name, values in live.items() for value in values]
    regret = abs(medians[chosen][0] / medians[best][0] - 1)
    return Order(metric, medians, pairs, chosen, best, regret, median(offs))


def _value(run: Json, metric: str) -> float:
    name, _, part = metric.partition(".")
    return float(run[name][part] if part else run[name])
