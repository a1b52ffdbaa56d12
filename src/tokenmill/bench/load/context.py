"""What a run is beside its figures: its settings, which part of it counts, and the warnings that a reader needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ..result import ClientCost, Distribution, RequestRow, ServerMetrics
from .body import CHAT_APIS, POOLING_APIS
from .histogram import Histogram, describe
from .player import Played
from .stream import Exchange

BIN_S = 1.0
KEPT_EVENTS = 2


class Tally:
    """What runs of millions of requests keep of the times between tokens, added up as each request ends: a histogram of
    ITL (to within 1 / 2048 of a value); all else is exact.

    rows: of the requests that have ended, each with the first KEPT_EVENTS of its token events alone. num_events: of
    all; num_good: of those that succeeded. num_met_itl: requests that succeeded and met the objective on ITL."""

    def __init__(self) -> None:
        self.rows: list[RequestRow] = []
        self.num_events = 0
        self.num_good = self.num_met_itl = 0
        self._gaps = Histogram()
        self._bins: Counter[int] = Counter()

    def take(self, row: RequestRow, exchange: Exchange, met_itl: bool) -> None:
        """A request that has ended. met_itl: whether its times met the objective on them."""
        times = np.array(exchange.event_times, np.float64) - exchange.due_s
        self.num_events += len(times)
        if row.ok:
            self.num_good += len(times)
            self.num_met_itl += met_itl
            self._gaps.add_all(np.maximum(0.0, np.diff(times)))
        bins = ((row.due_s + times) / BIN_S).astype(np.int64)
        if len(bins):
            first = int(bins.min())
            for number, count in enumerate(np.bincount(bins - first, exchange.event_tokens).tolist(), first):
                if count:
                    self._bins[number] += int(count)
        if row.event_s is not None and len(row.event_s) > KEPT_EVENTS:
            counts = None if row.event_tokens is None else row.event_tokens[:KEPT_EVENTS]
            row = replace(row, event_s=row.event_s[:KEPT_EVENTS], event_tokens=counts)
        self.rows.append(row)

    def itl_s(self, percentiles: tuple[float, ...]) -> Distribution:
        return self._gaps.distribution(percentiles)

    def tokens(self, begin_s: float, width_s: float, num: int) -> list[int]:
        """Of each of `num` slices of time, which are whole bins or wider."""
        found = [0] * num
        for number, count in self._bins.items():
            found[min(num - 1, max(0, int((number * BIN_S - begin_s) / width_s)))] += count
        return found


@dataclass(frozen=True, slots=True)
class Window:
    """What is cut off a run's beginning and end, so that its steady state is measured: below 1 a share of its length,
    else seconds."""

    warmup: float = 0.0
    cooldown: float = 0.0

    def __post_init__(self) -> None:
        if not (self.warmup >= 0 and self.cooldown >= 0):
            raise ConfigError("--warmup and --cooldown must not be negative.", param="warmup")

    def of(self, begin_s: float, end_s: float) -> tuple[float, float] | None:
        """[from, to) of a run; None where all of it counts."""
        if not self.warmup and not self.cooldown:
            return None
        cut = [part * (end_s - begin_s) if part < 1 else part for part in (self.warmup, self.cooldown)]
        return begin_s + cut[0], end_s - cut[1]


@dataclass(frozen=True, slots=True)
class Context:
    """What a run is beside its figures. tally: what there is instead of the times of tokens."""

    name: str
    started_at: str
    objectives: dict[str, float]
    schedule: dict[str, Any]
    dataset: dict[str, Any]
    endpoint: dict[str, Any]
    environment: dict[str, Any]
    argv: list[str]
    server: ServerMetrics | None = None
    energy_source: str | None = None
    joules: float | None = None
    keep_event_times: bool = True
    window: Window = field(default_factory=lambda: Window())
    percentiles: tuple[float, ...] = ()
    counts_tokens: bool = False
    tally: Tally | None = None


LATENESS_LIMIT_S = 0.005
LOOP_LAG_LIMIT_S = 0.001


def warnings_of(context: Context, played: Played, rows: Sequence[RequestRow], cost: ClientCost) -> list[str]:
    """What to know before believing a run's figures, one text each."""
    warnings = []
    late = describe(row.sent_s - row.due_s for row in rows if row.sent_s is not None)
    if late.p99 is not None and late.p99 > LATENESS_LIMIT_S:
        cap = context.schedule.get("max_concurrency")
        cause = f"--max-concurrency {cap} held requests back" if cap else "the client could not keep the schedule"
        warnings.append(
            f"Sends were late: p99 {late.p99 * 1e3:.1f} ms ({cause}). Latencies count from when a request was due."
        )
    if cost.loop_lag_s.p99 is not None and cost.loop_lag_s.p99 > LOOP_LAG_LIMIT_S:
        lag_ms = cost.loop_lag_s.p99 * 1e3
        warnings.append(
            f"The client did not always get the processor in time: its event loop woke up to {lag_ms:.1f} ms late"
            " (p99); latencies may be that much too long."
        )
    if retries := sum(row.num_retries for row in rows):
        warnings.append(f"{retries} sends met a kept connection that the server had just closed, and were repeated.")
    if refused := sum(row.num_refused for row in rows):
        warnings.append(
            f"{refused} sends were refused (429 or 503) and asked again: latencies count from when a request was due."
        )
    good = [row for row in rows if row.ok]
    if 0 < len(good) < len(rows):
        warnings.append(
            f"{len(rows) - len(good)} of {len(rows)} requests failed: latencies are of those that succeeded."
        )
    is_pooling = context.endpoint.get("api") in POOLING_APIS
    whole = sum(row.first_s is None for row in good)
    if whole and not is_pooling:
        warnings.append(f"{whole} of {len(good)} answers came as a whole: they have no TTFT, TPOT or ITL.")
    if any(row.has_usage is False for row in good):
        if context.counts_tokens:
            how = "tokens are counted by --tokenizer, prompts without their template"
        else:
            events = "" if is_pooling else "output tokens are counted from events, "
            how = f"{events}input tokens are not known"
        warnings.append(f"The server sent no usage: {how}.")
    early = [row for row in good if row.output_tokens is not None and row.output_tokens < row.wanted_output_tokens]
    short = sum(row.finish_reason != "length" for row in early) if not is_pooling else 0
    if short:
        warnings.append(
            f"{short} of {len(good)} answers ended before their wanted length"
            " (--ignore-eos, where the server knows it, keeps lengths exact)."
        )
    # A chat template adds what it adds; elsewhere a server may add a beginning-of-text token, and no more.
    off = [row for row in good if row.input_tokens is not None and row.wanted_input_tokens is not None]
    wanted, got = sum(row.wanted_input_tokens or 0 for row in off), sum(row.input_tokens or 0 for row in off)
    if context.endpoint.get("api") not in CHAT_APIS and abs(got - wanted) > len(off):
        warnings.append(
            f"The server counted {got} input tokens where {wanted} were meant; --tokenizer makes text of exact length."
        )
    if played.was_interrupted:
        warnings.append("The run was interrupted; requests in flight were given up.")
    if played.given_up is not None:
        warnings.append(f"The run was given up: {played.given_up}.")
    return warnings
