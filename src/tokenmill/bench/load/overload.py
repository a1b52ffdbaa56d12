"""`bench overload`: what servers do with more than they can serve in time.

The objectives are those of each request: a base and a multiple of what its prompt takes without load on the first
server, and a bound on the time of further tokens. They are sent with each request (field `slo`), which servers without
such a field ignore. For each server the highest rate that holds them is searched (`goodput`), and then a trace is
played at multiples of it, its own times scaled. Goodput is what met its objectives, by the time in which it was due.
A client and refusals take time of the cores that serve: where a second tenant that is always refused fills up each run
to as many calls a second as the highest multiple has, the rates are compared at equal cost.

Pure but for `measure_server`: what is measured comes in, figures come out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ...core.errors import MAX_RETRY_S, ConfigError, Unavailable
from ..result import SCHEMA, Distribution, Probe, RequestRow, Run
from . import goodput, measure
from .body import BodyWriter
from .histogram import describe
from .http import Client
from .plan import Call, Drawn, Message, Plan
from .retries import RetryPolicy
from .run import Load, Observe, run_load
from .schedule import Schedule
from .scrape import MAX_PAGE_BYTES, TIMEOUT_S
from .stream import Exchange
from .target import Target, send_one

LENGTHS = (32, 128, 512, 1024, 2048)
"""Prompts that are timed without load; others lie on lines between them."""
_TIMES = 3
PRESSED_S, CALM_S, CALM = 30.0, MAX_RETRY_S, 0.5
"""An overload is so long, and so long it is calm after it, at that part of the rate: until the last are back."""
HUNG = ("timeout", "interrupted")
REFUSED = "http_429"
_ERRORS = "tokenmill:ttft_prediction_error_ratio"
_SHADOW = "tokenmill:shadow_refusals_total"


@dataclass(frozen=True, slots=True)
class Objectives:
    """A first token within base_s and `factor` times what its prompt takes alone, further ones tpot_s each. `alone`:
    (tokens of a prompt, seconds to its first token), ascending; none where the factor is 0."""

    base_s: float
    factor: float
    tpot_s: float
    alone: tuple[tuple[int, float], ...]

    def alone_s(self, num_tokens: int) -> float:
        below, above = self.alone[0], self.alone[-1]
        for point in self.alone:
            if point[0] <= num_tokens:
                below = point
            else:
                above = point
                break
        if above[0] <= below[0]:
            return below[1] * num_tokens / max(1, below[0]) if num_tokens > below[0] else below[1]
        share = max(0.0, (num_tokens - below[0]) / (above[0] - below[0]))
        return below[1] + share * (above[1] - below[1])

    def ttft_s(self, num_tokens: int) -> float:
        return self.base_s + (self.factor * self.alone_s(num_tokens) if self.alone else 0.0)

    def field(self, call: Call) -> dict[str, int]:
        """The field `slo` of its body."""
        return {
            "ttft_ms": max(1, round(1e3 * self.ttft_s(call.input_tokens or 0))),
            "tpot_ms": max(1, round(1e3 * self.tpot_s)),
        }

    def judged(self, row: RequestRow) -> RequestRow:
        limit_s = self.ttft_s(row.wanted_input_tokens or 0)
        met = row.ok and measure.met(row, "ttft_s", limit_s) and measure.met(row, "tpot_s", self.tpot_s)
        return replace(row, met_slo=met)


@dataclass(frozen=True, slots=True)
class Level:
    """A run at `factor` times the highest rate that holds the objectives, or a probe for that rate.

    goodput_per_s        requests that met their objectives, by the seconds in which requests were due
    peak_share           of the goodput at the highest rate; None: there is none
    num_refused          answered with 429; num_hung: not over by the time limit; num_failed: any other error
    num_missed           answered in full, against their objectives
    prediction_error     of times to first tokens above 50 ms, the share that was mispredicted by at most so much of it
    shadow               with --admission shadow: what came of those that would have been refused
    """

    factor: float
    request_rate: float
    num_requests: int
    num_met: int
    num_missed: int
    num_refused: int
    num_hung: int
    num_failed: int
    goodput_per_s: float
    peak_share: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    prediction_error: dict[str, float]
    shadow: dict[str, float]


@dataclass(frozen=True, slots=True)
class RetryOutcome:
    """Of those refused in a short overload who obey Retry-After: num_returned came back once it was over, and
    num_entered of these were not refused again."""

    num_refused: int
    num_returned: int
    num_entered: int


@dataclass(frozen=True, slots=True)
class Served:
    """One server. request_rate: the highest that holds the objectives; 0: none did."""

    name: str
    endpoint: dict[str, Any]
    request_rate: float
    request_rate_low: float
    request_rate_high: float | None
    peak_per_s: float
    levels: list[Level]
    probes: list[tuple[float, float, bool]]
    warnings: list[str]
    returning: RetryOutcome | None = None


@dataclass(frozen=True, slots=True)
class Overload:
    objectives: Objectives
    dataset: dict[str, Any]
    servers: list[Served]
    argv: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "overload", **asdict(self)}


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """How a server is measured. least: requests of a probe or run. rate: the highest that holds the objectives, where
    that is known; 0: it is searched. refused: the server for a tenant that is always refused; None: there is none.
    measures_retries: whether it is also measured how those who are refused get in later."""

    limits: goodput.Search
    least: int
    probe_s: float
    run_s: float
    factors: tuple[float, ...]
    rate: float = 0.0
    refused: Target | None = None
    measures_retries: bool = False


def cut_prompts(plan: Plan, most: int) -> Plan:
    """The plan with prompts of at most so many tokens: their ends are cut off."""

    def cut(call: Call) -> Call:
        left, messages = most, []
        for message in call.messages:
            parts = []
            for part in message.parts:
                if isinstance(part, Drawn):
                    part = Drawn(part.key, min(part.num_tokens, left))
                    left -= part.num_tokens
                    if not part.num_tokens:
                        continue
                parts.append(part)
            messages.append(Message(message.role, tuple(parts)))
        return replace(call, messages=tuple(messages))

    return replace(plan, calls=tuple(map(cut, plan.calls)))


def at_rate(load: Load, rate: float, num: int, seed: int, max_prompt: int) -> Load:
    """The load at a rate, with the trace's own times, faster or slower."""

    def make(number: int, seed: int, given: float | None) -> Plan:
        plan = cut_prompts(load.make_plan(number, seed, rate), max_prompt)
        due = [call.delay_s for call in plan.roots]
        span_s = max(due, default=0.0) - min(due, default=0.0)
        if not plan.has_times or span_s <= 0:
            return Schedule(request_rate=rate).apply(plan)
        begin_s, scale = min(due), (len(due) - 1) / rate / span_s
        return plan.with_root_times([scale * (at_s - begin_s) for at_s in due])

    def timed(number: int, seed: int, given: float | None) -> Plan:
        return replace(make(number, seed, given), has_times=True)

    return replace(load, make_plan=timed, schedule=Schedule(use_trace_times=True), num_prompts=num, seed=seed)


def overloaded_at_first(load: Load, factor: float, rate: float, seed: int, max_prompt: int) -> Load:
    """The load at that factor of the rate for a while, then at half of the rate. Who is refused comes back once."""
    num_pressing = max(1, round(factor * rate * PRESSED_S))
    num = num_pressing + max(1, round(CALM * rate * CALM_S))

    def timed(number: int, seed: int, given: float | None) -> Plan:
        plan = cut_prompts(load.make_plan(number, seed, rate), max_prompt)
        num_calm = max(0, len(plan.roots) - num_pressing)
        pressing = Schedule(request_rate=factor * rate).arrival_times(len(plan.roots) - num_calm, seed)
        calm = Schedule(request_rate=CALM * rate).arrival_times(num_calm, seed)
        times = [*pressing, *[PRESSED_S + at_s for at_s in calm]]
        return replace(plan.with_root_times(times), has_times=True)

    schedule, retry_policy = Schedule(use_trace_times=True), RetryPolicy(1, obeys_s=MAX_RETRY_S)
    return replace(load, make_plan=timed, schedule=schedule, retry_policy=retry_policy, num_prompts=num, seed=seed)


def retry_outcome_of(rows: Sequence[RequestRow], pressed_s: float) -> RetryOutcome:
    """pressed_s: when the overload was over. Who comes back is heard of again with its first token or its refusal."""
    refused = [row for row in rows if row.num_refused or row.error == REFUSED]
    back = [row for row in refused if row.num_refused and (row.first_s or row.end_s or 0.0) > pressed_s]
    return RetryOutcome(len(refused), len(back), sum(row.ok for row in back))


async def time_alone(target: Target, load: Load) -> tuple[tuple[int, float], ...]:
    """What prompts take with nothing else there: the shortest of a few times each, never falling with length. Raises
    Unavailable where one fails."""
    client = Client(target.address, target.body.path, timeout_s=target.timeout_s, name="bench-alone")
    found: list[tuple[int, float]] = []
    try:
        for length in LENGTHS:
            times_s = []
            for number in range(_TIMES):
                part = Drawn(f"alone/{length}/{number}", length)
                call = Call(0, (Message("user", (part,)),), 2)
                material = load.make_material(load.seed + 104_729, target.body.prompt_format)
                writer = BodyWriter(replace(target.body, slo=None), material)
                writer.prepare(Plan((call,), load.seed, {}))
                exchange = await send_one(client, writer.write(call, lambda index: None))
                times_s.append(_first_s(target, exchange))
            found.append((length, max(min(times_s), found[-1][1] if found else 0.0)))
    finally:
        await client.close()
    return tuple(found)


def _first_s(target: Target, exchange: Exchange) -> float:
    if not exchange.ok or exchange.sent_s is None or not exchange.event_times:
        raise Unavailable(f"{target.name} failed a request without load: {exchange.error_detail}", param="url")
    return exchange.event_times[0] - exchange.sent_s


async def measure_server(
    target: Target,
    load: Load,
    objectives: Objectives,
    settings: OverloadSettings,
    max_prompt: int,
    observe: Observe | None = None,
) -> Served:
    seed = load.seed
    probes: list[Probe] = []

    async def run_at(factor: float, rate: float, num: int) -> Run:
        """num requests at that factor of the rate, beside so many that are refused that all are as many as at most."""
        here = _run(target, at_rate(load, factor * rate, num, seed, max_prompt), objectives, observe)
        left = max(settings.factors) / factor - 1
        if settings.refused is None or left <= 0:
            return await here
        beside = at_rate(load, left * factor * rate, max(1, round(left * num)), seed + 104_729, max_prompt)
        run, refused = await asyncio.gather(
            here, _run(settings.refused, replace(beside, num_warmups=0), objectives, None)
        )
        if refused.num_ok:
            raise ConfigError(f"The tenant of --refused-key was served {refused.num_ok} calls.", param="refused_key")
        return run

    async def attempt(rate: float) -> Probe:
        nonlocal seed
        seed += 1
        num = max(settings.least, round(rate * settings.probe_s))
        run = await run_at(1.0, rate, num)
        probes.append(goodput.judge(rate, run, settings.limits.target_attainment))
        return probes[-1]

    rate, low, high, warnings = settings.rate, settings.rate, None, []
    if not rate:
        found = goodput.conclude(
            [await goodput.search(attempt, settings.limits)], {}, settings.limits, goodput.Price(), load.argv
        )
        rate, low, high, warnings = found.request_rate, found.request_rate_low, found.request_rate_high, found.warnings
    levels: list[Level] = []
    for factor in settings.factors if rate else ():
        seed += 1
        num = max(settings.least, round(factor * rate * settings.run_s))
        before = await asyncio.to_thread(samples, target)
        run = await run_at(factor, rate, num)
        after = await asyncio.to_thread(samples, target)
        levels.append(level_of(factor, factor * rate, run, before, after))
    peak = max((level.goodput_per_s for level in levels if level.factor <= 1), default=0.0)
    peak = max([peak, *(probe.request_rate * probe.attainment for probe in probes if probe.passed)])
    levels = [replace(level, peak_share=level.goodput_per_s / peak if peak else None) for level in levels]
    seen = [(probe.request_rate, probe.attainment, probe.passed) for probe in probes]
    returning = None
    if rate and settings.measures_retries:
        pressed = overloaded_at_first(load, max(settings.factors), rate, seed + 1, max_prompt)
        returning = retry_outcome_of((await _run(target, pressed, objectives, observe)).requests, PRESSED_S)
    return Served(target.name, target.facts(), rate, low, high, peak, levels, seen, warnings, returning)


async def _run(target: Target, load: Load, objectives: Objectives, observe: Observe | None) -> Run:
    """A run whose rows are judged by the objectives of each."""
    target = replace(target, body=replace(target.body, slo=objectives.field))
    run = await run_load(target, load, observe=observe)
    return replace(run, requests=[objectives.judged(row) for row in run.requests])


def level_of(factor: float, rate: float, run: Run, before: dict[str, float], after: dict[str, float]) -> Level:
    """before, after: the server's samples."""
    rows = run.requests
    met = [row for row in rows if row.met_slo]
    errors = [row.error for row in rows if row.error is not None]
    num_refused, num_hung = errors.count(REFUSED), sum(error in HUNG for error in errors)
    return Level(
        factor=factor,
        request_rate=rate,
        num_requests=len(rows),
        num_met=len(met),
        num_missed=sum(row.ok for row in rows) - len(met),
        num_refused=num_refused,
        num_hung=num_hung,
        num_failed=len(errors) - num_refused - num_hung,
        goodput_per_s=len(met) / len(rows) * rate if rows else 0.0,
        peak_share=None,
        ttft_s=describe(value for row in rows if row.ok and (value := measure.ttft_s(row)) is not None),
        tpot_s=describe(value for row in rows if row.ok and (value := measure.tpot_s(row)) is not None),
        prediction_error=prediction_error(before, after),
        shadow={
            name.partition('outcome="')[2].partition('"')[0]: value - before.get(name, 0.0)
            for name, value in after.items()
            if name.startswith(_SHADOW)
        },
    )


def samples(target: Target) -> dict[str, float]:
    """The samples of its Prometheus page that count here, by name and labels; nothing where it has none."""
    try:
        text = target.address.get(target.metrics_url, TIMEOUT_S, MAX_PAGE_BYTES).decode("utf8", errors="replace")
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError):
        return {}
    found = [each for family in families for each in family.samples if each.name.startswith((_ERRORS, _SHADOW))]
    return {
        each.name + "".join(f'{name}="{value}"' for name, value in each.labels.items()): each.value for each in found
    }


def prediction_error(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of the predictions between two pages: the shares that were off by at most each bound, and how many there were."""
    counts: dict[float, float] = {}
    for name, value in after.items():
        if name.startswith(_ERRORS + "_bucket"):
            bound = float(name.partition('le="')[2].partition('"')[0])
            counts[bound] = value - before.get(name, 0.0)
    total = max(counts.values(), default=0.0)
    shares = {f"{bound:g}": count / total for bound, count in sorted(counts.items()) if total and bound < float("inf")}
    return {"num": total} | shares
