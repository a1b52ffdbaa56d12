"""What a service would do under a load: `evaluate(config, load, slo)`, from a configuration to figures, warnings and a
verdict.

The command line, notebooks and planners call this one function. A configuration that cannot be built, such as one whose
weights do not fit into memory, is a result like others; what is wrong in itself is a ConfigError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..bench.load.goodput import judge, parse_goals
from ..bench.load.run import Load, Observe
from ..bench.result import Probe, Run
from ..core.errors import ConfigError, Infeasible
from ..sim.service import Service, ServiceReport
from ..sim.timed import Trace
from .config import Config, read_config
from .load import read_load
from .play import About, Simulated, simulate


def warnings_of(report: ServiceReport) -> list[str]:
    """What a reader of the figures should know: steps outside of what their cost model was measured on are
    extrapolated."""
    num_unseen, num_steps = sum(report.unseen.values()), sum(report.steps.values())
    if not num_unseen:
        return []
    (num_rows, num_tokens), num = max(report.unseen.items(), key=lambda each: each[1])
    return [
        f"Extrapolated: {num_unseen} of {num_steps} steps are outside of what was calibrated, most of them ({num}) of "
        f"up to {num_rows} rows and {num_tokens} tokens; calibrate with such a load."
    ]


def lines_of(service: Service) -> list[str]:
    """For people, one a line; none of parts that are not there."""
    told = (drafts_of(service), _faults(service), _spoilt(service), _links(service), _cores(service))
    return [line for line in told if line]


def fault_warnings(service: Service) -> list[str]:
    """For results: their figures are those of a service that was struck."""
    return [f"{line[0].upper()}{line[1:]}." for line in (_faults(service), _spoilt(service)) if line]


def drafts_of(service: Service) -> str:
    """Tokens a row as `bench speculation` tells them: in the mean, whether the row had drafts or none."""
    report = service.report
    if not report.num_draws:
        return ""
    right = f", {report.num_accepted / report.num_drafted:.1%} of them right" if report.num_drafted else ""
    tokens = 1 + report.num_accepted / report.num_draws
    return f"drafts: {report.num_drafted} verified{right}, {tokens:.2f} tokens a row"


def _faults(service: Service) -> str:
    counts = Counter(kind for _, kind, _ in service.report.faults)
    if not counts:
        return ""
    cold = service.parts.cold
    back = f"; {cold.num_starts} cold starts, {cold.taken_s / cold.num_starts:.1f} s each" if cold.num_starts else ""
    return f"faults: {', '.join(f'{kind} {num}' for kind, num in counts.items())}{back}"


def _spoilt(service: Service) -> str:
    num = service.report.num_spoilt
    return f"blocks from KV stores with other bytes, computed again: {num}" if num else ""


def _links(service: Service) -> str:
    links, duration_s = service.parts.shared_links, service.report.duration_s
    if links is None or not links.num_carried or not duration_s:
        return ""
    uses = [(use.carried_bytes / (use.bytes_s * duration_s), use.name) for use in links.use()]
    busiest = sorted(uses, reverse=True)[:3]
    told = ", ".join(f"{name} {share:.1%}" for share, name in busiest if share)
    return f"links: {links.num_carried} transfers, {links.carried_bytes / 1e9:.1f} GB; of their bandwidth {told}"


def _cores(service: Service) -> str:
    duration_s = service.report.duration_s
    made = (("front end", service.parts.front), ("clients", service.parts.clients))
    parts = [
        f"{name} {process.busy_s / duration_s:.1%}" for name, process in made if process is not None and duration_s
    ]
    return f"busy, each one process: {', '.join(parts)}" if parts else ""


ATTAINMENT = 0.9
"""Of requests that are to meet the objectives, where nobody says."""


@dataclass(frozen=True)
class Evaluation:
    """infeasible: why there can be no such service, "" where there can. simulated: its run and the service it was made
    on, None where it is infeasible. load, attainment: what was played, and the share of its requests that must meet its
    objectives."""

    infeasible: str = ""
    simulated: Simulated[Service] | None = None
    load: Load | None = None
    attainment: float = ATTAINMENT

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

    @cached_property
    def probe(self) -> Probe | None:
        """The verdict on the SLO; None without one, and where it is infeasible. Made of all requests when it is first
        asked for. Raises ConfigError of a lean load, which has kept none."""
        if self.simulated is None or self.load is None or not (self.load.objectives or self.load.goals):
            return None
        if self.load.is_lean:
            raise ConfigError("A lean load keeps no requests to judge: leave lean out.", param="lean")
        rate = self.load.schedule.request_rate
        if rate is None or math.isinf(rate):
            rate = self.run.requests_per_s
        return judge(rate, self.run, self.attainment, self.load.goals)

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
    attainment: float | None = None,
    name: str | None = None,
    about: About | None = None,
    observe: Observe | None = None,
    trace: Trace | None = None,
    repeat: int = 0,
) -> Evaluation:
    """Play a load to a service on virtual time. config: a cluster's file, its tables, or what `read_config` made of
    one; load: options of `tokenmill simulate` by their names, as in a load file (None: the configuration's own); slo:
    names of `--goodput`, such as ttft or ttft_p99, to milliseconds (None: the load's own); attainment: the share of
    requests that must meet the objectives (None: the load's own, else 0.9). name: of the run; about: how its clients
    call, of a `Load`; observe: is called once a second of virtual time; trace: is told what happens. Raises
    ConfigError."""
    try:
        built = config if isinstance(config, Config) else read_config(config)
    except Infeasible as error:
        return Evaluation(error.message)
    goodput = None if slo is None else [f"{key}:{limit_ms}" for key, limit_ms in slo.items()]
    share = ATTAINMENT
    if not isinstance(load, Load):
        table, folder = (built.deployment.load, built.folder) if load is None else (load, Path())
        load, about, share = read_load(table, folder, built.name, goodput)
    elif goodput is not None:
        objectives, goals = parse_goals(goodput)
        load = replace(load, objectives=objectives, goals=goals)
    share = share if attainment is None else attainment
    if not 0 < share <= 1:
        raise ConfigError(f"attainment is a share above 0 and up to 1, got {share}.", param="attainment")
    about = About(name=built.name) if about is None else about
    about = replace(about, endpoint={**about.endpoint, **built.facts}, warnings=_warnings)
    with built.policies.blamed():
        found = simulate(built.begin, load, about, observe=observe, repeat=repeat, name=name, trace=trace)
    return Evaluation("", found, load, share)


def cost_usd(run: Run) -> float | None:
    """Dollars for the hardware's hours that a run took; None where no price is known."""
    price = run.endpoint.get("price_hour_usd")
    return price * run.duration_s / 3600 if price else None


def _warnings(service: Service) -> list[str]:
    return warnings_of(service.report) + fault_warnings(service)
