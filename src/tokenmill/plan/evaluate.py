"""What a service would do under a load: `evaluate(config, load, slo)`, from a configuration to figures and a verdict.

The command line, notebooks and planners call this one function. A configuration that cannot be built, such as one whose
weights do not fit into memory, is a result like others; what is wrong in itself is a ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bench.load.goodput import judge, parse_goals
from ..bench.load.run import Load, Observe
from ..bench.result import Probe, Run
from ..core.errors import Infeasible
from ..sim.service import Service
from ..sim.trace import Trace
from .config import Config, read_config
from .doubts import doubts_of, fault_doubts
from .load import read_load
from .play import About, Simulated, simulate

ATTAINMENT = 0.9
"""Of requests that are to meet the objectives, where nobody says."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """infeasible: why there can be no such service, "" where there can. simulated: its run and the service it was made
    on, None where it is infeasible. probe: the verdict on the SLO; None without one, and of a lean load, which keeps no
    requests."""

    infeasible: str = ""
    simulated: Simulated[Service] | None = None
    probe: Probe | None = None

    @property
    def run(self) -> Run:
        """The figures, as `bench serve` tells them. Only of what is feasible."""
        assert self.simulated is not None, self.infeasible
        return self.simulated.run

    @property
    def service(self) -> Service:
        """What it was simulated on, after its end. Only of what is feasible."""
        assert self.simulated is not None, self.infeasible
        return self.simulated.service

    @property
    def meets_slo(self) -> bool:
        """Whether it is feasible, enough requests met all objectives, all percentiles are kept, and the queue did not
        grow meanwhile."""
        return self.probe is not None and self.probe.passed

    @property
    def cost_usd(self) -> float | None:
        """Of the hardware's hours that the run took; None where it is infeasible or no price is known."""
        return None if self.simulated is None else cost_usd(self.run)


def evaluate(
    config: Config | Path | str | Mapping[str, Any],
    load: Load | Mapping[str, Any] | None = None,
    slo: Mapping[str, float] | None = None,
    *,
    attainment: float = ATTAINMENT,
    name: str | None = None,
    about: About | None = None,
    observe: Observe | None = None,
    trace: Trace | None = None,
    repeat: int = 0,
) -> Evaluation:
    """Play a load to a service on virtual time. config: a cluster's file, its tables, or what `read_config` made of
    one; load: options of `tokenmill simulate` by their names, as in a load file (None: the configuration's own); slo:
    names of `--goodput`, such as ttft or ttft_p99, to milliseconds (None: the load's own); attainment: the share of
    requests that must meet the objectives. name: of the run; about: how its clients call, of a `Load`; observe: is
    called once a second of virtual time; trace: is told what happens. Raises ConfigError."""
    try:
        built = config if isinstance(config, Config) else read_config(config)
    except Infeasible as error:
        return Evaluation(error.message)
    if not isinstance(load, Load):
        table, folder = (built.deployment.load, built.folder) if load is None else (load, Path())
        load, about = read_load(table, folder, built.name)
    if slo is not None:
        objectives, goals = parse_goals([f"{key}:{limit_ms:g}" for key, limit_ms in slo.items()])
        load = replace(load, objectives=objectives, goals=goals)
    about = About(name=built.name) if about is None else about
    about = replace(about, endpoint={**about.endpoint, **built.facts}, doubts=_doubts)
    with built.policies.blamed():
        found = simulate(built.begin, load, about, observe=observe, repeat=repeat, name=name, trace=trace)
    return Evaluation("", found, _verdict(found.run, load, attainment))


def cost_usd(run: Run) -> float | None:
    """Dollars for the hardware's hours that a run took; None where no price is known."""
    price = run.endpoint.get("price_hour_usd")
    return price * run.duration_s / 3600 if price else None


def _doubts(service: Service) -> list[str]:
    return doubts_of(service.report) + fault_doubts(service)


def _verdict(run: Run, load: Load, attainment: float) -> Probe | None:
    if load.is_lean or not (load.objectives or load.goals):
        return None
    rate = load.schedule.request_rate
    if rate is None or math.isinf(rate):
        rate = run.requests_per_s
    return judge(rate, run, attainment, load.goals)
