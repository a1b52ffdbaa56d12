"""When requests are due: constant, Poisson or gamma arrivals, ramps, the times of a trace, or a day made of a trace.

`burstiness` means what it means in `vllm bench serve`: the shape of the gamma distribution the gaps are drawn from
(1: Poisson, below 1: bursts, above 1: more even, infinite: constant). Gaps are scaled afterwards so that num requests
at rate r take num / r seconds: two seeds then offer the same load. Pure: a seed decides everything.

A day repeats the gaps of a slice of a trace, faster by day and slower by night, and draws its lengths anew:

    rate(t) = mean rate of the slice * (1 + SWING * cos(2 pi (t - PEAK_S) / DAY_S))       t: seconds after midnight, UTC

The mean over 24 hours is the slice's. Each pass over the slice begins at another of its gaps, which the seed draws, and
wraps around: bursts stay as they were recorded, only stretched by the hour's rate. Lengths of prompt and answer are
drawn together, a recorded request's pair with replacement (a bootstrap; Efron, 1979). This is a model of a day, not a
recording: the swing is our choice, between half the mean at two in the night and one and a half of it at two in the
afternoon, and no request depends on another. Times and lengths come from an iterator, which holds the slice alone.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...text.files import read_lines
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


def diurnal_plan(path: Path, num: int, seed: int, fit: Fit, duration_s: float, start_s: float = 0.0) -> Plan:
    """The first `num` requests of a day made of an Azure trace. Raises ConfigError."""
    calls = []
    for i, row in enumerate(islice(diurnal_arrivals(_slice(path, fit.notes), seed, duration_s, start_s, path), num)):
        parts, output_len = fit.cut([Drawn(f"request/{i}", fit.length(row.input_len))], fit.length(row.output_len))
        calls.append(Call(i, (Message("user", parts),), output_len, delay_s=row.time_s, session=f"request-{i}"))
    facts = {"name": "azure day", "path": str(path), "day_s": duration_s, "start_s": start_s, "swing": SWING}
    return Plan(tuple(calls), seed, facts | fit.facts(), True, fit.notes.remarks)


def num_in_diurnal_plan(path: Path, seed: int, duration_s: float, start_s: float = 0.0) -> int:
    """Requests of it. Raises ConfigError."""
    return sum(1 for _ in diurnal_arrivals(_slice(path, Notes()), seed, duration_s, start_s, path))


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


def diurnal_arrivals(
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
