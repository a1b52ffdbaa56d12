"""Several runs of the same load as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..result import ClientCost, RequestRow, Run
from . import measure
from .context import Context
from .stats import merge_warnings

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
