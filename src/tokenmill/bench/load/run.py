"""One measured run, from a plan to a `Run`: warm up, read the server's counters, play, read them again, add up; and
repeats of it, pooled.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from .. import machine
from ..result import ClientCost, Repeats, RequestRow, Run
from ..stats import mean_interval, merge_warnings
from . import measure, scrape
from .body import BodyWriter
from .context import Context, Window
from .goodput import Goal
from .http import Client
from .material import Material, Vocabulary
from .plan import Plan
from .player import Played, Player, Progress
from .retries import EarlyStop, RetryPolicy
from .schedule import Schedule
from .target import Target, warm_up

RATES = (
    "requests_per_s",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "goodput_requests_per_s",
    "goodput_output_tokens_per_s",
)


def pool(runs: Sequence[Run], percentiles: tuple[float, ...] = ()) -> Run:
    """All requests of several runs together: distributions over all, rates over the sum of the durations."""
    first = runs[0]
    cpu_s = sum(run.client.cpu_s for run in runs)
    num_events = sum(run.client.num_events for run in runs)
    span_s = sum(run.client.cpu_s / run.client.cores for run in runs if run.client.cores)
    cost = ClientCost(
        cpu_s=cpu_s,
        cores=cpu_s / max(1e-9, span_s),
        num_events=num_events,
        bytes_received=sum(run.client.bytes_received for run in runs),
        cpu_us_per_event=cpu_s / num_events * 1e6 if num_events else None,
        clock_start_s=first.client.clock_start_s,
        loop_lag_s=max((run.client.loop_lag_s for run in runs), key=lambda lag: lag.p99 or 0.0),
    )
    joules = [run.energy.joules for run in runs if run.energy is not None]
    context = Context(
        name=first.name,
        started_at=first.started_at,
        objectives=first.slo.objectives,
        schedule=first.schedule,
        dataset=first.dataset,
        endpoint=first.endpoint,
        environment=first.environment,
        argv=first.argv,
        energy_source=first.energy.source if first.energy is not None else None,
        joules=sum(joules) if len(joules) == len(runs) else None,
        percentiles=percentiles,
    )
    rows = [row for run in runs for row in run.requests if _is_within(run, row)]
    warnings = merge_warnings(runs)
    pooled = measure.figures(context, rows, sum(run.duration_s for run in runs), cost, warnings)
    rates: dict[str, Any] = {name: _weighted([(getattr(run, name), run.duration_s) for run in runs]) for name in RATES}
    # Runs followed one another, so requests of different runs were never in flight together.
    return replace(
        pooled,
        **rates,
        num_requests=sum(run.num_requests for run in runs),
        num_ok=sum(run.num_ok for run in runs),
        num_failed=sum(run.num_failed for run in runs),
        errors=measure.error_classes([row for run in runs for row in run.requests]),
        mean_in_flight=_weighted([(run.mean_in_flight, run.duration_s) for run in runs]),
        max_in_flight=max(run.max_in_flight for run in runs),
        offered_requests_per_s=None
        if first.offered_requests_per_s is None
        else _weighted([(run.offered_requests_per_s or 0.0, run.duration_s) for run in runs]),
    )


def _is_within(run: Run, row: RequestRow) -> bool:
    return run.window is None or run.window["from_s"] <= row.due_s < run.window["to_s"]


def _weighted(pairs: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else 0.0


MAX_PRECONNECTED = 64
"""Connections opened before an open loop starts; a closed loop knows how many it needs."""

REPEATED_FIGURES = (
    "requests_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "goodput_requests_per_s",
    "goodput_output_tokens_per_s",
)
REPEATED_DISTRIBUTIONS = ("ttft_s", "tpot_s", "itl_s", "e2el_s", "normalised_latency_s")

MakePlan = Callable[[int, int, float | None], Plan]
"""(number of requests, seed, request rate where one is given) -> plan."""
MakeMaterial = Callable[[int, str], Material]
"""(seed, prompt format) -> what drawn text is made of."""
Observe = Callable[[Progress], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """Everything about a run but the endpoint. `make_plan` and `make_material` are functions of a seed, so that each
    repeat and each probe has text of its own and no prefix cache answers for the one before. goals: of a search for the
    goodput. `vocabulary` counts the
    tokens of servers that do not. is_lean: of simulations, keep no times of tokens (`Tally`)."""

    make_plan: MakePlan
    make_material: MakeMaterial
    schedule: Schedule
    num_prompts: int
    seed: int
    objectives: dict[str, float] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    num_warmups: int = 1
    argv: list[str] = field(default_factory=list)
    keep_event_times: bool = True
    give_up: EarlyStop = field(default_factory=EarlyStop)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    window: Window = field(default_factory=Window)
    percentiles: tuple[float, ...] = ()
    vocabulary: Vocabulary | None = None
    is_lean: bool = False

    def with_rate(self, rate: float) -> Load:
        return replace(self, schedule=replace(self.schedule, request_rate=rate, use_trace_times=False))


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it exists, else on asyncio's own loop."""
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def run_load(
    target: Target, load: Load, *, observe: Observe | None = None, repeat: int = 0, name: str | None = None
) -> Run:
    """Measure `load` on `target`. Raises Unavailable where not even the warm-up succeeds."""
    plan = load.schedule.apply(load.make_plan(load.num_prompts, load.seed, load.schedule.request_rate))
    material = load.make_material(load.seed, target.body.prompt_format)
    writer = BodyWriter(target.body, material)
    writer.prepare(plan)
    digest = writer.digest(plan)
    counts_tokens = load.vocabulary is not None
    client = Client(target.address, target.body.path, timeout_s=target.timeout_s, name=f"bench-{load.seed}")
    try:
        if load.num_warmups:
            # Text of another seed, so that the warm-up leaves nothing of this load in a prefix cache.
            other = load.seed + 7_919
            warm = load.make_plan(load.num_warmups, other, load.schedule.request_rate)
            await warm_up(client, target, warm, load.make_material(other, target.body.prompt_format))
        most = load.schedule.concurrency or MAX_PRECONNECTED
        await client.connect(min(most, len(plan.roots), load.schedule.max_concurrency or most))
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        meter = scrape.find_energy_meter()
        page_before = await asyncio.to_thread(scrape.scrape, target.metrics_url, target.address)
        joules_before = meter.read_j() if meter is not None else []
        player = Player(
            plan, load.schedule, writer, client, load.give_up, counts_tokens, retry_policy=load.retry_policy
        )
        played = await _play(player, observe)
        joules = meter.spent_j(joules_before, meter.read_j()) if meter is not None else None
        page_after = await asyncio.to_thread(scrape.scrape, target.metrics_url, target.address)
    finally:
        await client.close()
    context = Context(
        name=name or target.name,
        started_at=started_at,
        objectives=load.objectives,
        schedule={**load.schedule.facts(), **load.retry_policy.facts(), "repeat": repeat},
        dataset={
            **plan.facts,
            "seed": plan.seed,
            "num_requests": len(plan.calls),
            "text": material.about,
            "digest": digest,
            "plan_digest": plan.digest(),
            "num_rounds": player.num_rounds,
        },
        endpoint=target.facts(),
        environment=machine.environment(),
        argv=load.argv,
        server=scrape.difference(target.metrics_url, page_before, page_after),
        energy_source=meter.source if meter is not None else None,
        joules=joules,
        keep_event_times=load.keep_event_times,
        window=load.window,
        percentiles=load.percentiles,
        counts_tokens=counts_tokens,
    )
    rows = measure.make_rows(player.plan, played, load.objectives, load.vocabulary)
    return measure.summarise(context, played, rows, plan.remarks)


async def _play(player: Player, observe: Observe | None) -> Played:
    """Play; an interrupt ends the sending, and what there is by then is the result."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, player.stop)
    try:
        return await player.play(observe)
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)


async def run_repeats(target: Target, load: Load, num_repeats: int, *, observe: Observe | None = None) -> Repeats:
    """The load num_repeats times, seeds counting up from its own."""
    runs = []
    for repeat in range(num_repeats):
        seeded = replace(load, seed=load.seed + repeat, keep_event_times=True)
        runs.append(await run_load(target, seeded, observe=observe, repeat=repeat))
        if runs[-1].given_up or any("interrupted" in warning for warning in runs[-1].warnings):
            break
    pooled = pool(runs, load.percentiles)
    if not load.keep_event_times:
        runs = [replace(run, requests=[replace(row, event_s=None) for row in run.requests]) for run in runs]
    return Repeats(pooled, intervals(runs), runs)


def intervals(runs: list[Run]) -> dict[str, Any]:
    """Mean and interval over repeats of the rates, and of each latency's mean, p50, p90 and p99."""
    found = {name: mean_interval([getattr(run, name) for run in runs]) for name in REPEATED_FIGURES}
    for name in REPEATED_DISTRIBUTIONS:
        for part in ("mean", "p50", "p90", "p99"):
            values = [getattr(getattr(run, name), part) for run in runs]
            if all(value is not None for value in values):
                found[f"{name}.{part}"] = mean_interval(values)
    return found
