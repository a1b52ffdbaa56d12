"""The nouns of a load measurement, and the JSON they are written as. docs/operate/benchmarking.md defines every field.

Belongs here: what a reader of a result may rely on. Never: how it was measured or how it is drawn. Field names are the
JSON names; a rename or a change of meaning raises SCHEMA. Times are seconds from the start of the run (RequestRow) or
lengths of time; a quantity that could not be measured is None, never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """What `num` values look like. Percentiles are nearest-rank: each is a value that occurred. All None if num = 0.
    more: percentiles asked for besides, by their number as a text ("75", "99.5")."""

    num: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = None
    max: float | None = None
    more: dict[str, float] = field(default_factory=dict)

    def percentile(self, text: str) -> float | None:
        """The one asked for by its number."""
        value: float | None = self.more.get(text, getattr(self, f"p{text.replace('.', '_')}", None))
        return value


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. `due_s`: when it was meant to be sent; `sent_s`: when it was, for the first time; `num_refused`: how
    often it was asked again because the server had answered 429 or 503. `first_s`: None
    where the answer came as a whole; `first_content_s`: of the answer proper, after reasoning. `has_usage`: the server
    counted its tokens. Arrival times of token-carrying events are `due_s + event_s[i]`; event i carried
    `event_tokens[i]` tokens (None: one each)."""

    index: int
    session: str
    turn: int
    tenant: str
    group: str
    due_s: float
    sent_s: float | None
    first_s: float | None
    last_s: float | None
    end_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    wanted_input_tokens: int | None
    wanted_output_tokens: int
    ok: bool
    met_slo: bool
    finish_reason: str | None
    error: str | None
    error_detail: str | None
    num_retries: int = 0
    num_refused: int = 0
    has_usage: bool = True
    first_content_s: float | None = None
    event_s: list[float] | None = None
    event_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ErrorClass:
    kind: str
    num: int
    example: str


@dataclass(frozen=True, slots=True)
class Slo:
    """The conjunction a request must meet: quantity (ttft_s, tpot_s, itl_s, e2el_s) -> most seconds allowed.
    attainment: share of all requests, failed ones included, that met all; by_objective: that met this one."""

    objectives: dict[str, float]
    attainment: float | None
    by_objective: dict[str, float]


@dataclass(frozen=True, slots=True)
class TenantRow:
    tenant: str
    num_requests: int
    num_ok: int
    output_tokens: int
    service_tokens_per_s: float | None
    ttft_p50_s: float | None
    e2el_p50_s: float | None


@dataclass(frozen=True, slots=True)
class Fairness:
    """jain: Jain's index over the tenants' service_tokens_per_s, 1/n (one gets all) to 1 (equal)."""

    jain: float | None
    tenants: list[TenantRow]


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What measuring cost. loop_lag_s: how late the client's event loop woke from timers of its own. clock_start_s: the
    monotonic clock at the start of the run, to join with what other processes of the machine recorded."""

    cpu_s: float
    cores: float
    num_events: int
    bytes_received: int
    cpu_us_per_event: float | None
    clock_start_s: float
    loop_lag_s: Distribution


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Prometheus samples of the server. counters: increase over the run; gauges: [before, after]; histograms: mean of
    what was observed during the run. None of them empty samples; names carry their labels."""

    url: str
    counters: dict[str, float]
    gauges: dict[str, list[float]]
    histogram_means: dict[str, float]


@dataclass(frozen=True, slots=True)
class Energy:
    """What the named counters measured over the run: the whole package or board, whoever used it."""

    source: str
    joules: float
    joules_per_output_token: float | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """One slice of the timeline, [t_s, t_s + bucket_s). Requests are counted where they were due (due), sent and
    ended; tokens where they arrived; in_flight is the mean over the slice; ttft_p50_s is of requests whose first
    token came in it."""

    t_s: float
    num_due: int
    num_sent: int
    num_ok: int
    num_failed: int
    output_tokens: int
    in_flight: float
    ttft_p50_s: float | None
    itl_p50_s: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one endpoint. Distributions are over requests that succeeded (itl_s: over their event gaps). window:
    the steady state that the figures are of, where the run's ends were cut off; counts of requests and errors are of
    the whole run. given_up: why the run was ended before its time."""

    name: str
    started_at: str
    duration_s: float
    num_requests: int
    num_ok: int
    num_failed: int
    num_retries: int
    ttft_s: Distribution
    ttfo_s: Distribution
    ttst_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2el_s: Distribution
    normalised_latency_s: Distribution
    ttft_from_send_s: Distribution
    e2el_from_send_s: Distribution
    lateness_s: Distribution
    input_lengths: Distribution
    output_lengths: Distribution
    input_tokens: int
    output_tokens: int
    prefix_hit_tokens: int | None
    prefix_hit_share: float | None
    tokens_per_event: float | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_requests_per_s: float
    goodput_output_tokens_per_s: float
    offered_requests_per_s: float | None
    mean_in_flight: float
    max_in_flight: int
    slo: Slo
    fairness: Fairness
    errors: list[ErrorClass]
    client: ClientCost
    server: ServerMetrics | None
    energy: Energy | None
    schedule: dict[str, Any]
    dataset: dict[str, Any]
    endpoint: dict[str, Any]
    environment: dict[str, Any]
    argv: list[str]
    warnings: list[str]
    timeline_bucket_s: float
    timeline: list[Bucket]
    requests: list[RequestRow] = field(default_factory=list)
    window: dict[str, Any] | None = None
    given_up: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "kind": "run", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over repeats with its confidence interval (Student's t); low = high = mean for a single repeat."""

    mean: float
    low: float
    high: float
    confidence: float
    values: list[float]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The same load several times, with a fresh seed each. `pooled`: all requests together, without rows."""

    pooled: Run
    intervals: dict[str, Interval]
    runs: list[Run]

    def to_json(self) -> dict[str, Any]:
        return self.pooled.to_json() | {
            "kind": "repeats",
            "intervals": {name: asdict(interval) for name, interval in self.intervals.items()},
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """Runs over one swept quantity: `by` is "request_rate", "concurrency" or a setting of what is simulated, points[i]
    its value in runs[i], or where it is no number, counted from 1. labels: what points are called, where they are
    settings. left_out: settings that cannot be, and why."""

    by: str
    points: list[float]
    runs: list[Run]
    labels: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        runs = [run.to_json() for run in self.runs]
        return {"schema": SCHEMA, "kind": "sweep", "by": self.by, "points": self.points, "labels": self.labels,
                "left_out": self.left_out, "runs": runs}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate tried by the goodput search. attainment: share of requests, after the first, within what it misses by
    most or keeps by least, `goal` ("": the objectives), with its interval (Wilson, for as many independent requests as
    the blocks show); target: the share wanted; block_shares: of each block in time, num_judged requests in all. stable:
    the queue did not grow: `drift` is how many seconds latency grew in a second."""

    request_rate: float
    attainment: float
    attainment_low: float
    attainment_high: float
    block_shares: list[float]
    num_judged: int
    stable: bool
    drift: float | None
    passed: bool
    target: float
    run: Run
    goal: str = ""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest request rate that meets the SLO and the goals (limits of percentiles), between `request_rate_low` and
    `request_rate_high`. request_rate_interval: the same with its confidence, and what each search found by itself; None
    where nothing failed (the rate is then a lower bound and request_rate_high None) or nothing passed (rate 0)."""

    slo: dict[str, float]
    goals: dict[str, float]
    target_attainment: float
    request_rate: float
    request_rate_low: float
    request_rate_high: float | None
    request_rate_interval: Interval | None
    goodput_requests_per_s: float
    output_tokens_per_s: float
    per_core: float | None
    per_gpu: float | None
    requests_per_dollar: float | None
    output_tokens_per_dollar: float | None
    num_cores: int | None
    num_gpus: int | None
    cost_per_hour: float | None
    argv: list[str]
    warnings: list[str]
    probes: list[Probe]

    def to_json(self) -> dict[str, Any]:
        probes = [
            {name: getattr(probe, name) for name in Probe.__slots__ if name != "run"} | {"run": probe.run.to_json()}
            for probe in self.probes
        ]
        plain = {name: getattr(self, name) for name in Goodput.__slots__ if name != "probes"}
        plain["request_rate_interval"] = self.request_rate_interval and asdict(self.request_rate_interval)
        return {"schema": SCHEMA, "kind": "goodput", **plain, "probes": probes}


@dataclass(frozen=True, slots=True)
class GoodputSweep:
    """As Sweep, of searches: the goodput of each setting of what is simulated."""

    by: str
    labels: list[str]
    searches: list[Goodput]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        searches = [each.to_json() for each in self.searches]
        return {"schema": SCHEMA, "kind": "goodput_sweep", "by": self.by, "labels": self.labels,
                "left_out": self.left_out, "searches": searches}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one endpoint in one phase: its median over the repeats, and the least and the most of them."""

    endpoint: str
    phase: str
    metric: str
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """candidate over baseline: the geometric mean of the repeats' ratios, with its interval, and the medians of both
    sides. p_value: of the ratio being 1; p_adjusted: corrected for the number of ratios of the primary metric, or of
    the others. verdict: "better", "worse", or "undecided": p_adjusted is not small enough, or too few repeats."""

    phase: str
    metric: str
    higher_is_better: bool
    baseline: str
    candidate: str
    baseline_value: float
    candidate_value: float
    ratio: float
    low: float
    high: float
    confidence: float
    p_value: float
    p_adjusted: float
    is_primary: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Endpoints in turns on equal loads. primary_metric: the one declared beforehand to decide. runs[i].name is the
    endpoint's, runs[i].schedule["repeat"] its turn and runs[i].schedule["phase"] whether it had seen the load's shared
    text before: "cold" or "warm"."""

    endpoints: list[dict[str, Any]]
    primary_metric: str
    figures: list[Figure]
    ratios: list[Ratio]
    argv: list[str]
    warnings: list[str]
    runs: list[Run]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": "compare",
            **{name: getattr(self, name) for name in Comparison.__slots__},
            "figures": [asdict(figure) for figure in self.figures],
            "ratios": [asdict(ratio) for ratio in self.ratios],
            "runs": [run.to_json() for run in self.runs],
        }


Result = Run | Repeats | Sweep | Goodput | GoodputSweep | Comparison
