"""From what came of a plan to a `Run`: every definition of docs/operate/benchmarking.md but for pooled repeats.

Pure: exchanges and facts in, numbers out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ...core.errors import ConfigError
from ..result import (
    Bucket,
    ClientCost,
    Distribution,
    Energy,
    ErrorClass,
    Fairness,
    RequestRow,
    Run,
    Slo,
    TenantRow,
)
from .context import BIN_S, Context, Tally, warnings_of
from .histogram import describe, quantile
from .material import Vocabulary
from .plan import Call, Literal, Plan
from .player import Played
from .stream import Exchange


def fairness(rows: Sequence[RequestRow]) -> Fairness:
    """How evenly tenants were served, by Jain's index over their speeds (Jain, Chiu and Hawe 1984). A run without
    tenants is one tenant, and its index says nothing."""
    by_tenant: dict[str, list[RequestRow]] = {}
    for row in rows:
        by_tenant.setdefault(row.tenant, []).append(row)
    tenants = [_tenant(name, by_tenant[name]) for name in sorted(by_tenant)]
    speeds = [tenant.service_tokens_per_s or 0.0 for tenant in tenants]
    return Fairness(jain(speeds) if len(speeds) > 1 else None, tenants)


def _tenant(name: str, rows: Sequence[RequestRow]) -> TenantRow:
    good = [row for row in rows if row.ok]
    latencies = sorted(row.last_s - row.due_s for row in good if row.last_s is not None)
    firsts = sorted(row.first_s - row.due_s for row in good if row.first_s is not None)
    tokens = sum(row.output_tokens or 0 for row in good)
    return TenantRow(
        tenant=name,
        num_requests=len(rows),
        num_ok=len(good),
        output_tokens=tokens,
        service_tokens_per_s=tokens / sum(latencies) if latencies and sum(latencies) > 0 else None,
        ttft_p50_s=quantile(firsts, 0.5) if firsts else None,
        e2el_p50_s=quantile(latencies, 0.5) if latencies else None,
    )


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index: 1 for equal shares, 1 / n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


NUM_BUCKETS = 100
BUCKET_SIZES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)


def make_timeline(
    rows: Sequence[RequestRow], begin_s: float, end_s: float, tally: Tally | None = None
) -> tuple[float, list[Bucket]]:
    """Slices of a round width, about NUM_BUCKETS of them at most. tally: has the tokens, where rows do not; slices
    have no ITL then."""
    span_s = end_s - begin_s
    sizes = BUCKET_SIZES_S if tally is None else [size for size in BUCKET_SIZES_S if size >= BIN_S]
    width = next((size for size in sizes if span_s / size <= NUM_BUCKETS), span_s / NUM_BUCKETS)
    num = int(span_s / width) + 1 if rows else 0
    due, sent, good, bad, tokens = ([0] * num for _ in range(5))
    busy = [0.0] * num
    firsts: list[list[float]] = [[] for _ in range(num)]
    gaps: list[list[float]] = [[] for _ in range(num)]

    def slot(at_s: float) -> int:
        return min(num - 1, max(0, int((at_s - begin_s) / width)))

    for row in rows:
        due[slot(row.due_s)] += 1
        if row.sent_s is not None:
            sent[slot(row.sent_s)] += 1
        if row.end_s is not None:
            (good if row.ok else bad)[slot(row.end_s)] += 1
        if row.sent_s is not None and row.end_s is not None:
            for i in range(slot(row.sent_s), slot(row.end_s) + 1):
                left = max(row.sent_s, begin_s + i * width)
                busy[i] += max(0.0, min(row.end_s, begin_s + (i + 1) * width) - left)
        first = None if row.first_s is None else row.first_s - row.due_s
        if first is not None and row.first_s is not None:
            firsts[slot(row.first_s)].append(first)
        times = (row.event_s or []) if tally is None else []
        for i, at_s in enumerate(times):
            where = slot(row.due_s + at_s)
            tokens[where] += row.event_tokens[i] if row.event_tokens is not None else 1
            if i:
                gaps[where].append(at_s - times[i - 1])
    if tally is not None:
        tokens = tally.tokens(begin_s, width, num)
    return width, [
        Bucket(
            t_s=i * width,
            num_due=due[i],
            num_sent=sent[i],
            num_ok=good[i],
            num_failed=bad[i],
            output_tokens=tokens[i],
            in_flight=busy[i] / width,
            ttft_p50_s=quantile(sorted(firsts[i]), 0.5) if firsts[i] else None,
            itl_p50_s=quantile(sorted(gaps[i]), 0.5) if gaps[i] else None,
        )
        for i in range(num)
    ]


def offered_rate(rows: Sequence[RequestRow]) -> float | None:
    """Requests per second as they were due, the first being at the span's edge. None for fewer than two moments."""
    due = [row.due_s for row in rows]
    span_s = max(due, default=0.0) - min(due, default=0.0)
    return (len(due) - 1) / span_s if span_s > 0 else None


def in_flight(rows: Sequence[RequestRow], duration_s: float) -> tuple[float, int]:
    """Mean and most requests sent and not yet ended."""
    spans = [(row.sent_s, row.end_s) for row in rows if row.sent_s is not None and row.end_s is not None]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    level = most = 0
    for _, step in edges:
        level += step
        most = max(most, level)
    return (sum(end - start for start, end in spans) / duration_s if duration_s > 0 else 0.0), most


OBJECTIVES = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2el_s"}


def parse_objectives(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"], milliseconds, as `vllm bench serve` takes them -> {"ttft_s": 0.5, "tpot_s": 0.05}."""
    objectives = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit_ms = float(text)
        except ValueError:
            limit_ms = -1.0
        if name not in OBJECTIVES or not limit_ms > 0:
            raise ConfigError(
                f"--goodput takes NAME:MILLISECONDS with NAME one of {', '.join(OBJECTIVES)}, got {pair}.",
                param="goodput",
            )
        objectives[OBJECTIVES[name]] = limit_ms / 1000.0
    return objectives


def make_rows(
    plan: Plan, played: Played, objectives: dict[str, float], vocabulary: Vocabulary | None = None
) -> list[RequestRow]:
    """One row per call that became due, with all its event times. `vocabulary` counts the tokens of an answer's text,
    and of its prompt without the template, where the server did not."""
    for exchange in played.exchanges:
        if vocabulary is not None and exchange.output_tokens is None and exchange.texts:
            exchange.output_tokens = len(vocabulary.encode(exchange.text, add_special=False))
    return [row_of(plan.calls[e.index], e, played.start_s, objectives, vocabulary) for e in played.exchanges]


def _input_tokens(call: Call, vocabulary: Vocabulary) -> int:
    """Drawn parts are of exact length; quoted ones are counted; a quoted answer is taken as long as asked for."""
    return sum(
        len(vocabulary.encode(part.text, add_special=False)) if isinstance(part, Literal) else part.num_tokens
        for part in call.parts
    )


def row_of(
    call: Call,
    exchange: Exchange,
    start_s: float,
    objectives: dict[str, float],
    vocabulary: Vocabulary | None = None,
    most_events: int | None = None,
) -> RequestRow:
    """Of a call that has ended. most_events: of its token events, so many are kept; None: all, which the objective on
    ITL needs."""
    input_tokens = exchange.input_tokens
    if input_tokens is None and vocabulary is not None:
        input_tokens = _input_tokens(call, vocabulary)
    times, due_s = exchange.event_times, exchange.due_s
    counts = list(exchange.event_tokens)
    output_tokens = exchange.output_tokens if exchange.output_tokens is not None else sum(counts) or None
    row = RequestRow(
        index=call.index,
        session=call.session,
        turn=call.turn,
        tenant=call.tenant,
        group=call.group,
        due_s=due_s - start_s,
        sent_s=None if exchange.sent_s is None else exchange.sent_s - start_s,
        first_s=times[0] - start_s if times and exchange.is_streamed else None,
        last_s=times[-1] - start_s if times else None,
        end_s=None if exchange.end_s is None else exchange.end_s - start_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=exchange.cached_tokens,
        wanted_input_tokens=call.input_tokens,
        wanted_output_tokens=call.output_tokens,
        ok=exchange.ok,
        met_slo=exchange.ok,
        finish_reason=exchange.finish_reason,
        error=exchange.error,
        error_detail=exchange.error_detail,
        num_retries=exchange.num_retries,
        num_refused=exchange.num_refused,
        has_usage=exchange.input_tokens is not None,
        first_content_s=None
        if exchange.first_content_s is None or not exchange.is_streamed
        else exchange.first_content_s - start_s,
        event_s=[round(at_s - due_s, 6) for at_s in times[:most_events]],
        event_tokens=counts[:most_events] if counts.count(1) < len(counts) else None,
    )
    if row.ok and not all([met(row, name, limit) for name, limit in objectives.items()]):
        return replace(row, met_slo=False)
    return row


def ttft_s(row: RequestRow) -> float | None:
    return None if row.first_s is None else row.first_s - row.due_s


def ttfo_s(row: RequestRow) -> float | None:
    return None if row.first_content_s is None else row.first_content_s - row.due_s


def ttst_s(row: RequestRow) -> float | None:
    return row.event_s[1] - row.event_s[0] if row.event_s and len(row.event_s) > 1 else None


def e2el_s(row: RequestRow) -> float | None:
    return None if row.last_s is None else row.last_s - row.due_s


def tpot_s(row: RequestRow) -> float | None:
    """None for one token, and where all came at once: nothing was seen of the time between them."""
    if row.first_s is None or row.last_s is None or row.output_tokens is None or row.output_tokens < 2:
        return None
    if row.last_s == row.first_s:
        return None
    return (row.last_s - row.first_s) / (row.output_tokens - 1)


def gaps_s(row: RequestRow) -> list[float]:
    return [later - earlier for earlier, later in pairwise(row.event_s or ())]


def met(row: RequestRow, objective: str, limit_s: float) -> bool:
    """Did a successful request meet this objective? One token has nothing between tokens to miss; but what could not be
    seen of a longer answer (its first token, where it came as a whole) is not taken for met."""
    if objective == "itl_s":
        gaps = gaps_s(row)
        value = sum(gaps) / len(gaps) if gaps else None
    else:
        value = {"ttft_s": ttft_s, "tpot_s": tpot_s, "e2el_s": e2el_s}[objective](row)
    if value is None:
        return objective in ("tpot_s", "itl_s") and row.output_tokens == 1
    return value <= limit_s


def summarise(context: Context, played: Played, rows: list[RequestRow], more_warnings: Sequence[str] = ()) -> Run:
    """The run of `rows`, made by make_rows."""
    cost = ClientCost(
        cpu_s=played.cpu_s,
        cores=played.cpu_s / max(1e-9, played.end_s - played.start_s),
        num_events=sum(len(row.event_s or ()) for row in rows) if context.tally is None else context.tally.num_events,
        bytes_received=played.num_bytes,
        cpu_us_per_event=None,
        clock_start_s=played.start_s,
        loop_lag_s=describe(max(0.0, lag) for lag in played.loop_lags_s),
    )
    if cost.num_events:
        cost = replace(cost, cpu_us_per_event=cost.cpu_s / cost.num_events * 1e6)
    begin_s = min((row.due_s for row in rows), default=0.0)
    end_s = max((row.end_s for row in rows if row.end_s is not None), default=begin_s)
    bucket_s, timeline = make_timeline(rows, begin_s, end_s, context.tally)
    warnings = [*more_warnings, *warnings_of(context, played, rows, cost)]
    span = context.window.of(begin_s, end_s)
    if span is None:
        run = figures(context, rows, end_s - begin_s, cost, warnings)
    else:
        run = _windowed(context, rows, span, cost, warnings)
    run = replace(run, given_up=played.given_up)
    kept = rows if context.keep_event_times else [replace(row, event_s=None, event_tokens=None) for row in rows]
    kept = kept if context.tally is None else []
    return replace(run, timeline_bucket_s=bucket_s, timeline=timeline, requests=kept)


def _windowed(
    context: Context, rows: Sequence[RequestRow], span: tuple[float, float], cost: ClientCost, warnings: list[str]
) -> Run:
    """Latencies and shares of the requests due within the window, rates of what was answered within it. Raises
    ConfigError where nothing is left."""
    low, high = span
    due = [row for row in rows if low <= row.due_s < high]
    if not due or high <= low:
        raise ConfigError(
            f"--warmup and --cooldown leave no request of a run that lasted to {high:.1f} s.", param="warmup"
        )
    ended = [row for row in rows if row.ok and row.end_s is not None and low <= row.end_s < high]
    parts = [(row, _share_within(row, low, high)) for row in rows if row.ok]
    output = sum((row.output_tokens or 0) * share for row, share in parts)
    given = sum(row.input_tokens or 0 for row, _ in parts if low <= _read_s(row) < high)
    per_s = 1.0 / (high - low)
    busy_s = sum(
        max(0.0, min(row.end_s, high) - max(row.sent_s, low))
        for row in rows
        if row.sent_s is not None and row.end_s is not None
    )
    return replace(
        figures(context, due, high - low, cost, warnings),
        num_requests=len(rows),
        num_ok=sum(row.ok for row in rows),
        num_failed=sum(not row.ok for row in rows),
        num_retries=sum(row.num_retries for row in rows),
        errors=error_classes(rows),
        requests_per_s=len(ended) * per_s,
        input_tokens_per_s=given * per_s,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(given + output) * per_s,
        goodput_requests_per_s=sum(row.met_slo for row in ended) * per_s,
        goodput_output_tokens_per_s=sum((row.output_tokens or 0) * share for row, share in parts if row.met_slo)
        * per_s,
        mean_in_flight=busy_s * per_s,
        max_in_flight=in_flight(rows, high - low)[1],
        window={"from_s": low, "to_s": high, "num_requests": len(due)},
    )


def _share_within(row: RequestRow, low: float, high: float) -> float:
    """Of a row's token events, those that came within [low, high)."""
    times = row.event_s or ()
    return sum(low <= row.due_s + at < high for at in times) / len(times) if times else 0.0


def _read_s(row: RequestRow) -> float:
    """When the prompt had been read: the first token, or the whole answer."""
    return next(at for at in (row.first_s, row.last_s, row.due_s) if at is not None)


def figures(
    context: Context, rows: Sequence[RequestRow], duration_s: float, cost: ClientCost, warnings: list[str]
) -> Run:
    good = [row for row in rows if row.ok]
    within = [row for row in good if row.met_slo]
    input_tokens = sum(row.input_tokens or 0 for row in good)
    output_tokens = sum(row.output_tokens or 0 for row in good)
    cached = [row.cached_tokens for row in good if row.cached_tokens is not None]
    hit_tokens = sum(cached) if cached else None
    tally = context.tally
    num_events = tally.num_good if tally is not None else sum(len(row.event_s or ()) for row in good)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    mean_in_flight, max_in_flight = in_flight(rows, duration_s)
    return Run(
        name=context.name,
        started_at=context.started_at,
        duration_s=duration_s,
        num_requests=len(rows),
        num_ok=len(good),
        num_failed=len(rows) - len(good),
        num_retries=sum(row.num_retries for row in rows),
        **_latencies(rows, context),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_hit_tokens=hit_tokens,
        prefix_hit_share=hit_tokens / input_tokens if hit_tokens is not None and input_tokens else None,
        tokens_per_event=output_tokens / num_events if num_events else None,
        requests_per_s=len(good) * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(input_tokens + output_tokens) * per_s,
        goodput_requests_per_s=len(within) * per_s,
        goodput_output_tokens_per_s=sum(row.output_tokens or 0 for row in within) * per_s,
        offered_requests_per_s=offered_rate(rows) if context.schedule.get("mode") == "open" else None,
        mean_in_flight=mean_in_flight,
        max_in_flight=max_in_flight,
        slo=_slo(rows, context.objectives, tally),
        fairness=fairness(rows),
        errors=error_classes(rows),
        client=cost,
        server=context.server,
        energy=_energy(context, output_tokens),
        schedule=context.schedule,
        dataset=context.dataset,
        endpoint=context.endpoint,
        environment=context.environment,
        argv=context.argv,
        warnings=warnings,
        timeline_bucket_s=0.0,
        timeline=[],
    )


def _latencies(rows: Sequence[RequestRow], context: Context) -> dict[str, Any]:
    """Distributions by the names of `Run`; but for the lateness, of what succeeded."""

    def over(values: Iterable[float | None]) -> Distribution:
        return describe((value for value in values if value is not None), more=context.percentiles)

    good, tally = [row for row in rows if row.ok], context.tally
    gaps = (gap for row in good for gap in gaps_s(row))
    return {
        "ttft_s": over(map(ttft_s, good)),
        "ttfo_s": over(map(ttfo_s, good)),
        "ttst_s": over(map(ttst_s, good)),
        "tpot_s": over(map(tpot_s, good)),
        "itl_s": over(gaps) if tally is None else tally.itl_s(context.percentiles),
        "e2el_s": over(map(e2el_s, good)),
        "normalised_latency_s": over(_per_token(row) for row in good),
        "ttft_from_send_s": over(_less_lateness(row, ttft_s(row)) for row in good),
        "e2el_from_send_s": over(_less_lateness(row, e2el_s(row)) for row in good),
        "lateness_s": over(_lateness_s(row) for row in rows),
        "input_lengths": over(row.input_tokens for row in good),
        "output_lengths": over(row.output_tokens for row in good),
    }


def _energy(context: Context, output_tokens: int) -> Energy | None:
    if context.joules is None or context.energy_source is None:
        return None
    per_token = context.joules / output_tokens if output_tokens else None
    return Energy(context.energy_source, context.joules, per_token)


def _per_token(row: RequestRow) -> float | None:
    latency = e2el_s(row)
    return latency / row.output_tokens if latency is not None and row.output_tokens else None


def _lateness_s(row: RequestRow) -> float | None:
    return None if row.sent_s is None else row.sent_s - row.due_s


def _less_lateness(row: RequestRow, latency_s: float | None) -> float | None:
    late = _lateness_s(row)
    return None if late is None or latency_s is None else latency_s - late


def _slo(rows: Sequence[RequestRow], objectives: dict[str, float], tally: Tally | None) -> Slo:
    if not rows:
        return Slo(objectives, None, {})
    by_objective = {
        name: sum(row.ok and met(row, name, limit) for row in rows) / len(rows) for name, limit in objectives.items()
    }
    if tally is not None and "itl_s" in objectives:
        by_objective["itl_s"] = tally.num_met_itl / len(rows)
    return Slo(objectives, sum(row.met_slo for row in rows) / len(rows), by_objective)


def error_classes(rows: Sequence[RequestRow]) -> list[ErrorClass]:
    """Most frequent first, each with one example."""
    counts = Counter(row.error for row in rows if row.error is not None)
    examples = {row.error: row.error_detail or "" for row in reversed(rows) if row.error is not None}
    return [ErrorClass(kind, num, examples[kind]) for kind, num in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]
