"""Prometheus metrics under vLLM's names, so that dashboards, autoscalers and gateways made for it work unchanged.

What requests experience is observed here as it happens, with the engine's time stamps; what the engine is and has is
copied from its last EngineStats when somebody asks. docs/operate/metrics.md defines every name; a test compares the
two.

Counters count over all engines and their lives (`cluster.totals`). Series whose name starts
with `tokenmill:` have no counterpart in vLLM.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from ...cluster.events import Effects
from ...core.events import FINISH_ERROR, EngineStats, Output, Ready
from ...core.request import Request
from ...core.speculation import DraftStats
from .overload import OverloadMetrics

_LABELS = ("model_name", "engine")
_PAUSE_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 4, 8)


class MoveMetrics:
    """Of requests whose move is over, and of answers that have ended."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)
        self._moved = Counter(
            "tokenmill:requests_moved", "Requests that went from one engine to another, or were to",
            (*_LABELS, "reason", "outcome"), registry=registry,
        )  # fmt: skip
        self._pause = Histogram(
            "tokenmill:move_pause_seconds", "From when its first engine stopped a request until the next one had it",
            _LABELS, buckets=_PAUSE_S, registry=registry,
        ).labels(*labels)  # fmt: skip
        self._tokens = self._counter(registry, "tokenmill:moved_kv_tokens", "Tokens whose KV another engine copied")
        self._rerouted = self._counter(
            registry, "tokenmill:requests_rerouted", "Requests that waited in one engine and were given to another"
        )
        self._copied = Counter(
            "tokenmill:prefixes_copied", "Prefixes that were copied to a further engine ahead of need, or were to be",
            (*_LABELS, "outcome"), registry=registry,
        )  # fmt: skip
        self._predicted = self._counter(registry, "tokenmill:answer_lengths_predicted", "Answers predicted and ended")
        self._hits = self._counter(
            registry, "tokenmill:answer_lengths_in_bucket", "Of these, those whose likeliest bucket of length was right"
        )
        self._error = Histogram(
            "tokenmill:answer_length_error_ratio", "By which share of it the length of an answer was mispredicted",
            _LABELS, buckets=_SHARES, registry=registry,
        ).labels(*labels)  # fmt: skip

    def note(self, effects: Effects) -> None:
        for moved in effects.moved:
            outcome = "failed" if moved.error else "moved"
            self._moved.labels(*self._labels, moved.why, outcome).inc()
            self._tokens.inc(moved.num_tokens)
            if moved.pause_s:
                self._pause.observe(moved.pause_s)
        self._rerouted.inc(effects.rerouted)
        for copied in effects.copied:
            self._copied.labels(*self._labels, "failed" if copied.error else "copied").inc()
            self._tokens.inc(copied.num_tokens)
        for seen in effects.lengths:
            self._predicted.inc()
            self._hits.inc(seen.is_hit)
            self._error.observe(abs(seen.num_guessed - seen.num_tokens) / seen.num_tokens)

    def _counter(self, registry: CollectorRegistry, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=registry).labels(*self._labels)


_FINISHES = ("stop", "length", "abort", "error")

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)  # fmt: skip
_GRAMMAR_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)

_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_AS_THEY_ARE = {"escaping": openmetrics.ALLOWUTF8} if hasattr(openmetrics, "ALLOWUTF8") else {}
"""Names with colons are good in every version of the format; left to itself the library makes underscores of them."""

_TIMES = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S),
    ("vllm:request_time_per_output_token_seconds", "Mean time per output token after the first", _TOKEN_S),
    ("vllm:e2e_request_latency_seconds", "Arrival to end", _REQUEST_S),
    ("vllm:request_queue_time_seconds", "Arrival to first scheduled", _REQUEST_S),
    ("vllm:request_prefill_time_seconds", "First scheduled to first token", _REQUEST_S),
    ("vllm:request_decode_time_seconds", "First token to last token", _REQUEST_S),
    ("vllm:request_inference_time_seconds", "First scheduled to last token", _REQUEST_S),
)
_SIZES = (
    ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    ("vllm:request_generation_tokens", "Output tokens of a request"),
    ("vllm:request_max_num_generation_tokens", "Output tokens of the longest choice of a call"),
    ("vllm:request_params_max_tokens", "Resolved max_tokens of a request"),
    ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed rather than found in the prefix cache"),
)

# Counters copied from EngineStats: (name, help, field).
_TOTALS = (
    ("vllm:prompt_tokens", "Prompt tokens of scheduled requests", "prompt_tokens"),
    ("vllm:generation_tokens", "Output tokens produced", "generation_tokens"),
    ("vllm:num_preemptions", "Times a running request gave its blocks back", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", "prefix_hits"),
    ("vllm:external_prefix_cache_queries", "Tokens looked up in the store of KV", "external_queries"),
    ("vllm:external_prefix_cache_hits", "Tokens brought in from the store of KV", "external_hits"),
    ("vllm:corrupted_requests", "Requests that ended because their logits were not finite", "num_corrupted"),
    ("vllm:spec_decode_num_drafts", "Times drafts of a request were verified", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted and verified", "num_draft_tokens"),
    ("tokenmill:constrained_requests", "Requests that were to follow a grammar", "num_constrained"),
    (
        "tokenmill:grammar_failures",
        "Requests that ended because their grammar could not be followed",
        "num_grammar_failures",
    ),
    ("tokenmill:steps", "Engine steps", "num_steps"),
    ("tokenmill:prompt_tokens_computed", "Prompt tokens whose KV was computed", "prompt_tokens_computed"),
)


def token_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    buckets, scale = [], 1
    while scale <= most:
        buckets += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return tuple(buckets)


class Metrics:
    """All series of one front end and its engines together. `max_context` bounds the buckets of token counts.
    `num_parameters`: of the model, where it is known."""

    def __init__(self, model_name: str, max_context: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._stats = EngineStats()
        self._ready: Ready | None = None
        self.num_parameters = 0
        self._active_share = 1.0
        self.name_adapter: Callable[[str], str] = lambda digest: digest
        self.count_waiting: Callable[[], int] = lambda: 0
        self.predict_wait: Callable[[], float] = lambda: 0.0
        times = {name: self._histogram(name, text, buckets) for name, text, buckets in _TIMES}
        sizes = {name: self._histogram(name, text, token_buckets(max_context)) for name, text in _SIZES}
        self._ttft, self._tpot, self._e2e, self._queue, self._prefill, self._decode, self._inference = times.values()
        self._itl = _Gaps(
            "vllm:inter_token_latency_seconds", "Gap between two steps that gave a request tokens", _TOKEN_S
        )
        self._num_prompt, self._num_output, self._most_output, self._max_tokens, self._computed = sizes.values()
        self._params_n = self._histogram("vllm:request_params_n", "Choices a call asks for", _CHOICES)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step", _STEP_TOKENS)
        success = Counter(
            "vllm:request_success", "Finished requests", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._success = {reason: success.labels(*self._labels, reason) for reason in _FINISHES}
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._pooled = self._counter("tokenmill:pooling_requests", "Finished requests for a vector or a score")
        self._refused = Counter(
            "tokenmill:requests_refused", "Calls answered with an error status", (*_LABELS, "status"),
            registry=self.registry,
        )  # fmt: skip
        self._turned_away = Counter(
            "tokenmill:calls_turned_away", "Calls answered with 429 because of what is open", (*_LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self._losses = self._counter("tokenmill:engine_losses", "Times a ready engine was lost")
        self._resumed = self._counter("tokenmill:requests_resumed", "Requests that outlived their engine")
        self._routed = Counter(
            "tokenmill:requests_routed", "Requests given to one of several engines", (*_LABELS, "reason"),
            registry=self.registry,
        )  # fmt: skip
        self._poisoned = self._counter("tokenmill:requests_poisoned", "Requests given up because engines died of them")
        self._disconnects = self._counter("tokenmill:client_disconnects", "Clients that left before their answer")
        self._grammars = self._histogram(
            "tokenmill:grammar_compile_seconds", "Time until a constraint had become a grammar", _GRAMMAR_S
        )
        self._grammars_refused = self._counter("tokenmill:grammars_refused", "Constraints that were no usable grammar")
        self.overload = OverloadMetrics(self.registry, self._labels, lambda: self._stats)
        self.moves = MoveMetrics(self.registry, self._labels)
        self.registry.register(_Snapshot(self))

    def render(self, accept: str, more: Sequence[CollectorRegistry] = ()) -> tuple[bytes, str]:
        """The exposition in the format that `accept` prefers, and its content type; in the plain format where `accept`
        asks for a version that is none. `more`: registries to tell of as well."""
        return render(_Together((self.registry, *more)), accept)

    def engine_ready(self, ready: Ready, stats: EngineStats) -> None:
        """An engine has come; `stats`: of all that serve now."""
        self._ready, self._stats = ready, stats
        self._active_share = ready.active_share

    def engine_lost(self, ready: Ready | None, stats: EngineStats) -> None:
        """One that had been ready has gone. `ready`, `stats`: of those that are left."""
        self._losses.inc()
        self._ready, self._stats = ready, stats

    def requests_resumed(self, number: int) -> None:
        """Requests of a lost engine that go on in another."""
        self._resumed.inc(number)

    def request_routed(self, reason: str) -> None:
        """There was a choice between engines."""
        self._routed.labels(*self._labels, reason).inc()

    def requests_poisoned(self, number: int) -> None:
        """Requests that were ended because engines died of them."""
        self._poisoned.inc(number)

    def grammar_compiled(self, seconds: float) -> None:
        """For a call whose constraint was not among the last ones."""
        self._grammars.observe(seconds)

    def grammar_refused(self) -> None:
        """A constraint that cannot be followed, or not within the limits."""
        self._grammars_refused.inc()

    def step(self, stats: EngineStats) -> None:
        if stats.num_steps != self._stats.num_steps:
            self._step_tokens.observe(stats.last_step_tokens)
        self._stats = stats

    def first_token(self, since_arrival_s: float) -> None:
        """A request got its first token."""
        self._ttft.observe(since_arrival_s)

    def further_tokens(self, gap_s: float, num_requests: int) -> None:
        """A step gave tokens to so many requests that had all got some `gap_s` before."""
        self._itl.observe(gap_s, num_requests)

    def call_admitted(self, num_choices: int) -> None:
        self._params_n.observe(num_choices)

    def call_done(self, most_output_tokens: int) -> None:
        self._most_output.observe(most_output_tokens)

    def call_refused(self, status: int) -> None:
        self._refused.labels(*self._labels, str(status)).inc()

    def call_turned_away(self, reason: str) -> None:
        """A 429; `reason`: which bound it was (cluster.admission)."""
        self._turned_away.labels(*self._labels, reason).inc()

    def client_gone(self) -> None:
        self._disconnects.inc()

    def request_lost(self, ending: str) -> None:
        """It ended for its client before an engine had it."""
        self._success[ending].inc()

    def request_done(self, request: Request, output: Output, reason: str, last_token_s: float, now: float) -> None:
        """The engine's last word on a request; `reason` as its client saw it."""
        self._success[reason].inc()
        self._e2e.observe(now - request.arrival_s)
        gives_tokens = request.pooling is None
        if gives_tokens:
            self._max_tokens.observe(request.max_tokens)
        if reason == FINISH_ERROR:
            return
        num_prompt, num_output = len(request.prompt_tokens), output.num_output
        self._num_prompt.observe(num_prompt)
        if gives_tokens:
            self._num_output.observe(num_output)
        elif output.vector:
            self._pooled.inc()
        timing = output.timing
        if timing is None or timing.scheduled_s < 0:
            return
        num_cached = min(output.num_cached, num_prompt)
        self._cached.inc(num_cached)
        self._computed.observe(num_prompt - num_cached)
        self._queue.observe(timing.scheduled_s - request.arrival_s)
        if timing.first_token_s < 0:
            return
        end_s = max(last_token_s, timing.first_token_s)
        self._prefill.observe(timing.first_token_s - timing.scheduled_s)
        self._decode.observe(end_s - timing.first_token_s)
        self._inference.observe(end_s - timing.scheduled_s)
        if num_output > 1:
            self._tpot.observe((end_s - timing.first_token_s) / (num_output - 1))

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=self.registry)
        return family.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)


def render(registry: CollectorRegistry | _Together, accept: str) -> tuple[bytes, str]:
    """What `Metrics.render` gives, of one registry."""
    try:
        _, preferred = choose_encoder(accept)
    except (TypeError, ValueError):
        preferred = ""
    if "openmetrics" in preferred:
        return openmetrics.generate_latest(registry, **_AS_THEY_ARE), _OPENMETRICS
    return generate_latest(registry), _PLAIN


class _Together:
    """Several registries as one, to be written out."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                first = found.setdefault(family.name, family)
                if first is not family:  # of another model
                    first.samples.extend(family.samples)
        yield from found.values()


class _Gaps:
    """A histogram for what happens with every token: many equal values are one observation, made by one thread."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, labels: Sequence[str]) -> Metric:
        found = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        names = map(floatToGoString, (*self._bounds, float("inf")))
        found.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        found.add_sample(f"{self._name}_created", dict(zip(_LABELS, labels, strict=True)), self._created)
        return found


class _Snapshot:
    """The collector of everything that is copied from the engine's last stats, and of gaps between tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._metrics._stats
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch", stats.num_running)
        num_waiting = stats.num_waiting + metrics.count_waiting()
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled", num_waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason", labels=(*_LABELS, "reason")
        )
        reasons.add_metric((*metrics._labels, "capacity"), num_waiting)
        yield reasons
        yield self._gauge("tokenmill:predicted_wait_seconds", "Predicted wait of a usual call", metrics.predict_wait())
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests hold", stats.kv_usage)
        yield self._gauge(
            "tokenmill:kv_blocks_cached", "Blocks that hold reusable prefixes only", stats.num_cached_blocks
        )
        yield self._gauge("tokenmill:kv_blocks_free", "Blocks that hold nothing", stats.num_free_blocks)
        yield self._gauge("tokenmill:engine_ready", "1 while an engine takes requests", metrics._ready is not None)
        for name, text, field in _TOTALS:
            family = CounterMetricFamily(name, text, labels=_LABELS)
            family.add_metric(metrics._labels, getattr(stats, field))
            yield family
        yield self._sources(stats)
        yield from self._accepted(stats.accepted_per_pos)
        if stats.drafting is not None:
            yield from self._drafting(stats.drafting)
        computed = stats.prompt_tokens_computed + stats.generation_tokens
        flops = CounterMetricFamily(
            "vllm:estimated_flops_per_gpu",
            "Two for each parameter that a token uses and computed token",
            labels=_LABELS,
        )
        flops.add_metric(metrics._labels, 2.0 * metrics.num_parameters * metrics._active_share * computed)
        yield flops
        yield metrics._itl.family(metrics._labels)
        yield self._cache_config()
        yield self._adapters()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._metrics._labels, float(value))
        return family

    def _sources(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens of scheduled requests by source", labels=(*_LABELS, "source")
        )
        hits = min(stats.prefix_hits, stats.prompt_tokens)
        external = min(stats.external_hits, hits)
        for source, number in (
            ("local_compute", stats.prompt_tokens - hits),
            ("local_cache_hit", hits - external),
            ("external_kv_transfer", external),
        ):
            family.add_metric((*self._metrics._labels, source), float(number))
        return family

    def _accepted(self, per_pos: Sequence[int]) -> Iterator[Metric]:
        labels = self._metrics._labels
        whole = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", labels=_LABELS
        )
        whole.add_metric(labels, float(sum(per_pos)))
        yield whole
        each = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in their drafts",
            labels=(*_LABELS, "position"),
        )
        for position, number in enumerate(per_pos):
            each.add_metric((*labels, str(position)), float(number))
        yield each

    def _drafting(self, told: DraftStats) -> Iterator[Metric]:
        labels, of_drafters = self._metrics._labels, (*_LABELS, "source")
        yield self._gauge("tokenmill:draft_speedup_ratio", "Tokens a second against none drafted", told.speedup)
        right = GaugeMetricFamily(
            "tokenmill:draft_acceptance_ratio", "Share of a drafter's latest tokens that were right", labels=of_drafters
        )
        chosen = GaugeMetricFamily(
            "tokenmill:drafts_chosen", "Drafts of it that the latest step verifies", labels=of_drafters
        )
        for source, share, num_drafts in told.sources:
            right.add_metric((*labels, source), share)
            chosen.add_metric((*labels, source), float(num_drafts))
        yield right
        yield chosen
        costs = GaugeMetricFamily(
            "tokenmill:draft_step_cost_ratio", "Time of a step against one without drafts", labels=(*_LABELS, "drafts")
        )
        for place, ratio in enumerate(told.step_costs):
            costs.add_metric((*labels, str(1 << place)), ratio)
        yield costs

    def _adapters(self) -> Metric:
        """The time of the scrape; what runs and waits is in the labels, as gateways that place adapters expect it."""
        names = (*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters with running and waiting requests", labels=names
        )
        metrics, stats = self._metrics, self._metrics._stats
        if metrics._ready is not None and metrics._ready.max_loras:
            running, waiting = (
                ",".join(map(metrics.name_adapter, digests))
                for digests in (stats.running_adapters, stats.waiting_adapters)
            )
            family.add_metric((*metrics._labels, str(metrics._ready.max_loras), running, waiting), time.time())
        return family

    def _cache_config(self) -> Metric:
        """Constant 1; the facts are labels. No GPU is needed for num_gpu_blocks: gateways look for that name."""
        names = (*_LABELS, "block_size", "num_gpu_blocks", "max_model_len", "enable_prefix_caching")
        family = GaugeMetricFamily("vllm:cache_config_info", "Geometry of the KV cache", labels=names)
        ready = self._metrics._ready
        if ready is not None:
            facts = dict(ready.facts)
            family.add_metric(
                (
                    *self._metrics._labels, str(ready.block_size), str(ready.num_blocks), str(ready.max_model_len),
                    facts.get("enable_prefix_caching", "True"),
                ),
                1.0,
            )  # fmt: skip
        return family
