"""`simulate CLUSTER.toml --against LIVE.json ...`: the loads of live runs, simulated, and how far off the figures are.

The load is not described a second time: the live result says it, and its digest proves it (bench.load.recorded_load).
How a load is simulated is handed in; this file knows results only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bench.load.body import CHAT_APIS
from ..bench.load.fidelity import Fidelity, compare, runs_in
from ..bench.load.material import Vocabulary
from ..bench.load.recorded_load import RecordedLoad, recorded_load
from ..bench.result import SCHEMA, Run
from ..cluster.gateway import Gateway
from ..core.cost import CostModel, Work
from ..core.errors import ConfigError
from ..sim.calibrated import Calibrated
from ..sim.deployment import Deployment
from ..sim.service import Service, ServiceReport
from .play import About, simulate
from .prompts import Frame

Json = dict[str, Any]
Simulate = Callable[[RecordedLoad, float], Run]
"""(the load, by how much every step takes longer than calibrated) -> the run of it."""


def hold_against(
    paths: Sequence[Path],
    simulated: Simulate,
    speed: Sequence[float],
    name: str,
    read_vocabulary: Callable[[str], Vocabulary] | None = None,
) -> Fidelity:
    """Simulate the load of each live run and compare. speed: for each run by how much longer the machine took than
    when it was calibrated; one for all; or none, which is 1. read_vocabulary: of a model whose tokenizer made the
    load's text. Raises ConfigError."""
    live = [run for path in paths for run in runs_in(_read(path))]
    factors = list(speed) * len(live) if len(speed) == 1 else list(speed) or [1.0] * len(live)
    if len(factors) != len(live):
        raise ConfigError(
            f"--speed-factor needs one number, or one for each of the {len(live)} live runs; got {len(factors)}.",
            param="speed_factor",
        )
    if not all(0 < factor < 1e6 for factor in factors):
        raise ConfigError("--speed-factor must be above 0.", param="speed_factor")
    loads = [recorded_load(run, read_vocabulary) for run in live]
    # Repeats of one load at one speed are one simulation: it is deterministic.
    made: dict[tuple[Any, ...], Json] = {}
    others = []
    for load, factor in zip(loads, factors, strict=True):
        key = (*load.identity, factor)
        if key not in made:
            made[key] = simulated(load, factor).to_json()
        others.append(made[key])
    return compare(name, live, others, factors if speed else ())


def on_deployment(
    deployment: Deployment,
    facts: Json,
    set_up: Callable[[Gateway], None] = lambda gateway: None,
    warnings: Callable[[ServiceReport], Sequence[str]] = lambda report: (),
    frame: Frame | None = None,
) -> Simulate:
    """Simulates a load on a service of its own each time. facts: of the deployment, for results; set_up: chooses
    policies of the gateway; warnings: what a reader of the figures should know; frame: of the chat template that the
    live server rendered messages by."""

    def run(recorded: RecordedLoad, factor: float) -> Run:
        slower = slowed(deployment, factor)
        about = About(
            endpoint={**facts, "speed_factor": factor},
            warnings=lambda service: warnings(service.report),
            digest_of=lambda plan, load: recorded.digest,
            api=recorded.body.api if recorded.body.api in CHAT_APIS else "completions",
            frame=frame,
        )
        found = simulate(lambda loop, seed: Service(slower, loop, seed=seed, set_up=set_up), recorded.answered, about)
        return found.run

    return run


def slowed(deployment: Deployment, factor: float) -> Deployment:
    """The same with every step `factor` times as long, and what a calibrated front end computes."""
    workers = tuple(replace(each, cost_model=_slowed(each.cost_model, factor)) for each in deployment.workers)
    cores = deployment.parts.cores
    if factor != 1.0 and isinstance(cores.front, Calibrated):
        cores = replace(cores, front=cores.front.scaled(factor))
    return replace(deployment, workers=workers, parts=replace(deployment.parts, cores=cores))


def _slowed(cost_model: CostModel, factor: float) -> CostModel:
    if factor == 1.0:
        return cost_model
    scaled = getattr(cost_model, "scaled", None)
    found: CostModel = Slower(cost_model, factor) if scaled is None else scaled(factor)
    return found


@dataclass(frozen=True, slots=True)
class Slower:
    """A cost model whose steps take `factor` times as long as those of another."""

    cost_model: CostModel
    factor: float

    def predict(self, work: Work) -> float:
        return self.factor * self.cost_model.predict(work)


def _read(path: Path) -> Json:
    try:
        result = json.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"--against {path} cannot be read: {error.strerror}.", param="against") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--against {path} is no JSON: {error}.", param="against") from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no result of tokenmill bench that this version reads.", param="against")
    return result
