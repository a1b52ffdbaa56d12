"""When requests are due: constant, Poisson or gamma arrivals, ramps, and the times of a trace, stretched or squeezed.

`burstiness` means what it means in `vllm bench serve`: the shape of the gamma distribution the gaps are drawn from
(1: Poisson, below 1: bursts, above 1: more even, infinite: constant). Gaps are scaled afterwards so that num requests
at rate r take num / r seconds: two seeds then offer the same load. Pure: a seed decides everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...core.errors import ConfigError
from .plan import Plan, generator


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate moves from start to end over the requests, by equal steps ("linear") or ratios ("exponential")."""

    strategy: str
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise ConfigError(f"--ramp-up-strategy is linear or exponential, not {self.strategy}.", param="ramp_up")
        if not (0 < self.start_rps < math.inf and 0 < self.end_rps < math.inf):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0.", param="ramp_up")

    def rate(self, progress: float) -> float:
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Open loop: `request_rate` (inf: all at once), a `ramp`, or `use_trace_times`; `max_concurrency` caps requests in
    flight, which shows as lateness. Closed loop: `concurrency` sessions, each sending when its last request has ended;
    of the others only `speedup` and `stop_after_s` then matter. `speedup` divides a plan's own times, think times
    included. `stop_after_s`: nothing more becomes due after that."""

    request_rate: float | None = None
    burstiness: float = 1.0
    ramp: Ramp | None = None
    use_trace_times: bool = False
    speedup: float = 1.0
    concurrency: int | None = None
    max_concurrency: int | None = None
    stop_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0, got {self.request_rate}.", param="request_rate")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness must be above 0, got {self.burstiness}.", param="burstiness")
        if not 0 < self.speedup < math.inf:
            raise ConfigError(f"--speedup must be above 0, got {self.speedup}.", param="speedup")
        for name in ("concurrency", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.", param=name)

    @property
    def is_closed(self) -> bool:
        return self.concurrency is not None

    @property
    def is_paced(self) -> bool:
        """The schedule says when requests are due, not the server's answers."""
        has_rate = self.request_rate is not None and not math.isinf(self.request_rate)
        return not self.is_closed and (self.use_trace_times or self.ramp is not None or has_rate)

    def facts(self) -> dict[str, Any]:
        if self.is_closed:
            facts: dict[str, Any] = {"mode": "closed", "concurrency": self.concurrency}
            return facts | {"speedup": self.speedup, "stop_after_s": self.stop_after_s}
        facts = {"mode": "open", "max_concurrency": self.max_concurrency, "speedup": self.speedup}
        if self.use_trace_times:
            facts |= {"arrivals": "trace"}
        elif self.ramp is not None:
            facts |= {"arrivals": f"{self.ramp.strategy} ramp", "burstiness": self.burstiness}
            facts |= {"start_rps": self.ramp.start_rps, "end_rps": self.ramp.end_rps}
        else:
            facts |= {"arrivals": self._arrivals, "burstiness": _finite(self.burstiness)}
            facts |= {"request_rate": _finite(self.request_rate)}
        return facts | {"stop_after_s": self.stop_after_s}

    @property
    def _arrivals(self) -> str:
        if self.request_rate is None or math.isinf(self.request_rate):
            return "all at once"
        if math.isinf(self.burstiness):
            return "constant"
        return "poisson" if self.burstiness == 1.0 else "gamma"

    def apply(self, plan: Plan) -> Plan:
        """The plan with its roots due at this schedule's times (0 in a closed loop: slots decide), and think times
        divided by the speedup."""
        num = len(plan.roots)
        if self.speedup != 1.0:
            plan = plan.with_delays_scaled(1.0 / self.speedup)
        if self.is_closed:
            return plan.with_root_times([0.0] * num)
        if self.use_trace_times:
            if not plan.has_times:
                raise ConfigError("This dataset has no times of its own: give --request-rate.", param="request_rate")
            return plan
        return plan.with_root_times(self.arrival_times(num, plan.seed))

    def arrival_times(self, num: int, seed: int) -> list[float]:
        """num ascending offsets; the first is 0."""
        if self.ramp is not None:
            rates = [self.ramp.rate(i / max(1, num - 1)) for i in range(num)]
        elif self.request_rate is None or math.isinf(self.request_rate):
            return [0.0] * num
        else:
            rates = [self.request_rate] * num
        rng = generator(seed, "arrivals")
        gaps = [self._unit_gap(rng.gammavariate) / rate for rate in rates]
        wanted_s, drawn_s = sum(1.0 / rate for rate in rates), sum(gaps)
        gaps = [gap * wanted_s / drawn_s for gap in gaps]
        return list(accumulate(gaps[:-1], initial=0.0)) if num else []

    def _unit_gap(self, gamma: Any) -> float:
        """A gap of mean 1."""
        return 1.0 if math.isinf(self.burstiness) else float(gamma(self.burstiness, 1.0 / self.burstiness))


def _finite(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "inf" if value is not None and math.isinf(value) else value
