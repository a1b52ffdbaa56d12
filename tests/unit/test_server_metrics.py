"""The metrics: docs/operate/metrics.md and the registry say the same, and what is observed is what the page defines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from scripted import Served
from tokenmill.api.sandbox import Caller
from tokenmill.cluster.canary import Version
from tokenmill.cluster.events import Ended
from tokenmill.cluster.on_demand import Rules
from tokenmill.cluster.totals import Totals
from tokenmill.control.audit.log import AuditMetrics
from tokenmill.control.kv_store import EngineTierMetrics, TierMetrics
from tokenmill.control.models.canaries import Canaries, CanaryMetrics
from tokenmill.control.models.on_demand import OnDemand
from tokenmill.control.models.registry import ModelRegistry
from tokenmill.control.observe.metrics import Metrics, token_buckets
from tokenmill.control.observe.monitor import Monitor
from tokenmill.control.observe.plugin_observers import Feed, PluginObserver, PluginObserverMetrics
from tokenmill.control.observe.requests import Record, RequestRegistry
from tokenmill.control.observe.tenant_metrics import OTHER, TenantMetrics
from tokenmill.control.slo.idle_job import IdleTime
from tokenmill.control.slo.scorer import Scorer
from tokenmill.control.usage.accounting import Accounting, UsageMetrics
from tokenmill.control.workers.metrics import ExpertMetrics
from tokenmill.core.cost import UNKNOWN, Costs
from tokenmill.core.events import EngineStats, Output, Ready, Timing
from tokenmill.core.experts import ExpertLoad, WeightReads
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.slo import Targets
from tokenmill.core.speculation import DraftStats
from tokenmill.core.terms import Terms
from tokenmill.net.system import MonotonicClock
from tokenmill.server.idempotency.layer import IdempotencyMetrics
from tokenmill.server.result_cache import ResultCache
from tokenmill.server.resume.registry import ResumeMetrics
from tokenmill.server.upstream.connection import UpstreamAddress
from tokenmill.server.upstream.proxy import Ended as UpstreamEnded
from tokenmill.server.upstream.start import UpstreamMetrics
from tokenmill.server.upstream.tally import Tally
from tokenmill.server.upstream.upstream import Upstream

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "metrics.md"
READY = Ready("m", 512, 100, (2,), "id", 16, 64, num_pool_blocks=80)
LABELS = {"model_name": "m", "engine": "0"}


def observed(metrics: Metrics) -> Monitor:
    """An monitor that has seen a request with targets from its first token to its end, one refused and one open."""
    monitor = Monitor("m", metrics.registry)
    terms = Terms(tenant="t", profile="chat", ttft_s=1.0)
    request = Request("r", (1, 2, 3), SamplingParams(), 9, seed=1, arrival_s=10.0, terms=terms)
    monitor.opened([request, replace(request, id="open")], "me", 10.0)
    monitor.first(request, 0.5, 10.5)
    output = Output("r", finish_reason="stop", num_output=5, num_cached=1, timing=Timing(10.0, 10.2, 10.5, 12.5, 2))
    monitor.requests.close(Ended(request, output, "stop", 12.5, 12.5))
    monitor.refused("t", "wait")
    return monitor


def upstreamed(metrics: Metrics) -> None:
    """An upstream has answered a call, and a canary was taken back."""
    upstream = Upstream("u", UpstreamAddress.of("http://x"), MonotonicClock())
    tally = Tally(8)
    UpstreamMetrics([upstream], metrics.registry).ended(
        UpstreamEnded("u", Caller(), "200", "http://x", tally, 1, 1.0, 1.0)
    )
    canaries = Canaries(ModelRegistry(("a", "b")), None, Targets)
    canary = canaries.put("c", [Version("a", 1), Version("b", 1)])
    for _ in range(50):
        canaries.note(canary, "a", False, None, None)
        canaries.note(canary, "b", True, None, None)
    metrics.registry.register(CanaryMetrics(canaries))
    metrics.registry.register(PluginObserverMetrics("m", [Feed("statsd", PluginObserver())]))


def stored(metrics: Metrics) -> None:
    """The KV store has told of a tier, and experts have computed."""

    async def ask(what: str, argument: Mapping[str, Any]) -> dict[str, Any]:
        return {"tiers": {"host": {"bytes": 7, "hits": 3}}}

    tiers = TierMetrics("m", ask)
    metrics.registry.register(tiers)
    metrics.registry.register(EngineTierMetrics("m", lambda: EngineStats(tier_hits=(5, 7, 0, 0), fetch_s=0.5)))
    asyncio.run(tiers.refresh())
    metrics.registry.register(ExpertMetrics("m", lambda: ExpertLoad((1,), ((6, 2, 0, 0),), reads=WeightReads(5, 1))))


def loaded_on_demand(metrics: Metrics) -> None:
    """A model was loaded, and another unloaded."""
    on_demand = OnDemand(Rules(), ModelRegistry(("m",)), dict, AsyncMock(), Mock(), MonotonicClock())
    on_demand.metrics.count("a", "loaded", 1.5)
    on_demand.metrics.count("b", "idle")
    metrics.registry.register(on_demand.metrics)


def test_costs_are_of_who_computes_prompts() -> None:
    """A worker of a decode pool knows what a token of an answer takes, which says nothing of 5,000 of a prompt."""
    totals, prompts, draws = Totals(), Costs(0.01, token_s=1e-4), Costs(0.0, token_s=5e-3)
    for link in (0, 1):
        totals.join(link, 9, EngineStats())
    totals.step(1, EngineStats(num_steps=1, prompt_tokens_computed=1, costs=draws))
    assert totals.stats.costs == draws  # nobody knows better
    totals.step(0, EngineStats(num_steps=1, prompt_tokens_computed=500, costs=prompts))
    totals.step(1, EngineStats(num_steps=2, prompt_tokens_computed=2, costs=draws))
    assert totals.stats.costs == totals.sums.costs == prompts
    better = prompts._replace(token_s=2e-4)
    totals.step(0, EngineStats(num_steps=2, prompt_tokens_computed=500, costs=better))
    assert totals.stats.costs == better
    totals.leave(0)
    assert totals.stats.costs == better
    totals.step(1, EngineStats(num_steps=3, prompt_tokens_computed=3, costs=draws))
    assert totals.stats.costs == draws
    totals.leave(1)
    assert totals.stats.costs == UNKNOWN


def test_the_page_lists_every_metric_with_its_type_and_no_other() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(READY, EngineStats(drafting=DraftStats(1.0)))
    metrics.registry.register(UsageMetrics("m", Accounting(Path("never opened"))))
    metrics.registry.register(AuditMetrics("m", lambda: {"seq": 7, "pending": 2, "failure": None}))
    IdempotencyMetrics("m", metrics.registry)
    metrics.registry.register(ResumeMetrics("m", Mock(num_open=1, num_resumed=0, num_reconnects=0)))
    ResultCache(0, "m", metrics.registry, lambda: None)
    monitor = observed(metrics)
    metrics.registry.register(Scorer("m", dict))
    metrics.registry.register(IdleTime("m", lambda: 0, MonotonicClock(), Mock(outcome="")))
    upstreamed(metrics)
    stored(metrics)
    loaded_on_demand(metrics)
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    told = (*metrics.registry.collect(), *monitor.tenants.registry.collect())
    families = {family.name: family.type for family in told}
    assert {name: kind for name, kind, _, _ in rows} == families
    assert len(rows) == len(families), "a metric is listed twice"


def test_the_page_names_every_label() -> None:
    metrics = Metrics("m", 512)
    metrics.engine_ready(READY, EngineStats())
    metrics.call_refused(400)
    lines = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    monitor = observed(metrics)
    upstreamed(metrics)
    stored(metrics)
    loaded_on_demand(metrics)
    for family in (*metrics.registry.collect(), *monitor.tenants.registry.collect()):
        labels = {label for sample in family.samples for label in sample.labels} - {*LABELS, "le"}
        for label in labels:
            assert f"`{label}`" in lines[family.name], (family.name, label)


def test_engines_together_tell_what_came_from_tiers() -> None:
    """Counts go on where an engine has gone; one that joins counts from where it was."""
    totals, metrics = Totals(), Metrics("m", 512)
    metrics.registry.register(EngineTierMetrics("m", lambda: totals.stats))
    assert not [family for family in metrics.registry.collect() if family.name.startswith("tokenmill:kv_fetch")]
    totals.join(0, 10, EngineStats())
    totals.join(1, 10, EngineStats(tier_hits=(100, 0, 0, 0), kv_written=50))
    totals.step(0, EngineStats(tier_hits=(16, 32, 0, 0), fetch_s=0.5, kv_written=4))
    totals.step(1, EngineStats(tier_hits=(116, 0, 0, 8), kv_written=51))
    totals.leave(0)
    totals.step(1, EngineStats(tier_hits=(132, 0, 0, 8), kv_written=52))

    def told(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"tokenmill:{name}_total", {"model_name": "m", **labels})

    found = [told("kv_fetched_tokens", tier=tier) for tier in ("host", "disk", "remote", "peer")]
    assert found == [48, 32, 0, 8]
    assert (told("kv_written_blocks"), told("kv_fetch_seconds")) == (6, 0.5)


def test_engines_together_tell_how_many_drafts_were_accepted() -> None:
    totals, metrics = Totals(), Metrics("m", 512)
    for link in (0, 1):
        totals.join(link, 10, EngineStats())
    totals.step(0, EngineStats(num_drafts=3, num_draft_tokens=9, accepted_per_pos=(3, 1)))
    totals.step(1, EngineStats(num_drafts=1, num_draft_tokens=3, accepted_per_pos=(1, 1, 1)))
    totals.leave(0)
    metrics.step(totals.stats)

    def told(name: str, **labels: str) -> float | None:
        return value(metrics, f"vllm:spec_decode_{name}_total", **labels)

    assert [told("num_accepted_tokens_per_pos", position=str(each)) for each in range(4)] == [4, 2, 1, None]
    assert (told("num_drafts"), told("num_draft_tokens"), told("num_accepted_tokens")) == (4, 12, 7)


def test_by_what_drafts_are_chosen_is_told_of_the_engine_that_was_last() -> None:
    """And not at all where nothing drafts."""
    totals, metrics = Totals(), Metrics("m", 512)
    for link in (0, 1):
        totals.join(link, 10, EngineStats())
    totals.step(0, EngineStats(drafting=DraftStats(2.0, (("ngram", 0.9, 8),), (1.5, 3.0))))
    metrics.step(totals.stats)
    totals.step(1, EngineStats(drafting=DraftStats(1.25, (("suffix", 0.5, 3), ("mtp", 0.75, 0)), (1.1, 1.2, 1.6))))
    metrics.step(totals.stats)

    def told(name: str, **labels: str) -> float | None:
        return value(metrics, f"tokenmill:{name}", **labels)

    assert [told("draft_acceptance_ratio", source=each) for each in ("suffix", "mtp", "ngram")] == [0.5, 0.75, None]
    assert [told("drafts_chosen", source=each) for each in ("suffix", "mtp")] == [3, 0]
    assert [told("draft_step_cost_ratio", drafts=each) for each in ("1", "2", "4", "8")] == [1.1, 1.2, 1.6, None]
    assert told("draft_speedup_ratio") == 1.25
    metrics.step(EngineStats())
    assert told("draft_speedup_ratio") is None and told("drafts_chosen", source="suffix") is None


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, LABELS | labels)


def finish(metrics: Metrics, reason: str, *, num_output: int = 5, num_cached: int = 16) -> None:
    request = Request("r", tuple(range(40)), SamplingParams(max_tokens=9), 9, seed=1, arrival_s=10.0)
    timing = Timing(arrival_s=10.0, scheduled_s=11.0, first_token_s=13.0, finished_s=21.0)
    output = Output("r", finish_reason="stop", num_output=num_output, num_cached=num_cached, timing=timing)
    metrics.request_done(request, output, reason, 21.0, 21.5)


def test_the_times_of_a_request_are_cut_where_the_page_says() -> None:
    metrics = Metrics("m", 512)
    finish(metrics, "stop")
    expected = {
        "e2e_request_latency_seconds": 11.5,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 8.0,
        "request_inference_time_seconds": 10.0,
        "request_time_per_output_token_seconds": 2.0,
        "request_prompt_tokens": 40,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 9,
        "request_prefill_kv_computed_tokens": 24,
    }
    assert {name: value(metrics, f"vllm:{name}_sum") for name in expected} == expected
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 16
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1


def test_a_refused_request_leaves_no_trace_in_the_lengths() -> None:
    metrics = Metrics("m", 512)
    finish(metrics, "error")
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:request_prompt_tokens_count") == 0


def test_counters_go_on_when_the_engine_starts_again() -> None:
    metrics, totals = Metrics("m", 512), Totals()
    totals.join(0, 80, EngineStats())
    metrics.engine_ready(READY, totals.stats)
    totals.step(0, EngineStats(num_steps=7, generation_tokens=100, num_running=3, last_step_tokens=9))
    metrics.step(totals.stats)
    assert value(metrics, "vllm:num_requests_running") == 3
    totals.leave(0)
    metrics.engine_lost(None, totals.stats)
    assert value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "tokenmill:engine_ready") == 0
    assert value(metrics, "tokenmill:engine_losses_total") == 1
    totals.join(1, 80, EngineStats())
    metrics.engine_ready(READY, totals.stats)
    assert value(metrics, "tokenmill:kv_blocks_free") == 80, "before its first step"
    totals.step(1, EngineStats(num_steps=1, generation_tokens=4, last_step_tokens=1))
    metrics.step(totals.stats)
    assert value(metrics, "vllm:generation_tokens_total") == 104
    assert value(metrics, "tokenmill:steps_total") == 8
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2


def test_several_engines_count_as_one() -> None:
    totals = Totals()
    totals.join(0, 80, EngineStats())
    totals.join(1, 40, EngineStats())
    totals.step(0, EngineStats(num_steps=7, num_running=3, num_free_blocks=60, num_blocks=80, kv_usage=0.25))
    totals.step(1, EngineStats(num_steps=2, num_running=2, num_free_blocks=10, num_blocks=40, kv_usage=0.75))
    stats = totals.stats
    assert (stats.num_steps, stats.num_running, stats.num_free_blocks, stats.num_blocks) == (9, 5, 70, 120)
    assert stats.kv_usage == 0.75
    totals.leave(1)
    assert (totals.stats.num_steps, totals.stats.num_running, totals.stats.num_blocks) == (9, 3, 80)


@pytest.mark.parametrize(
    ("most", "buckets"), [(1, (1,)), (60, (1, 2, 5, 10, 20, 50)), (100, (1, 2, 5, 10, 20, 50, 100))]
)
def test_token_buckets_end_at_the_context(most: int, buckets: tuple[int, ...]) -> None:
    assert token_buckets(most) == buckets


def test_equal_gaps_between_tokens_are_counted_together() -> None:
    metrics = Metrics("m", 512)
    metrics.further_tokens(0.004, 16)
    metrics.further_tokens(0.005, 2)
    metrics.further_tokens(100.0, 1)
    name = "vllm:inter_token_latency_seconds"
    found = {bound: value(metrics, f"{name}_bucket", le=bound) for bound in ("0.0025", "0.005", "80.0", "+Inf")}
    assert found == {"0.0025": 0, "0.005": 18, "80.0": 18, "+Inf": 19}
    assert value(metrics, f"{name}_count") == 19
    assert value(metrics, f"{name}_sum") == pytest.approx(100.074)
    assert value(metrics, f"{name}_created") > 0, "as all others have it"


def test_classes_and_tenants_are_told_apart() -> None:
    """Waits, tokens, preemptions and SLO results of a request are found under its class, profile and tenant."""
    metrics = Metrics("m", 512)
    monitor = observed(metrics)
    group = {"priority_class": "1", "profile": "chat"}
    for name, more, expected in (
        ("class_requests_total", {"finished_reason": "stop"}, 1),
        ("class_time_to_first_token_seconds_sum", {}, 0.5),
        ("class_time_per_output_token_seconds_sum", {}, 0.5),
        ("class_queue_time_seconds_sum", {}, pytest.approx(0.2)),
        ("class_tokens_total", {"kind": "output"}, 5),
        ("class_preemptions_total", {}, 2),
        ("slo_requests_total", {"result": "attained"}, 1),
    ):
        assert value(metrics, f"tokenmill:{name}", **group, **more) == expected, name
    assert value(metrics, "tokenmill:class_requests_open", priority_class="1", state="waiting") == 1
    told = monitor.tenants.registry
    for name, more, expected in (
        ("requests_total", {"priority_class": "1", "finished_reason": "stop"}, 1),
        ("calls_refused_total", {"reason": "wait"}, 1),
        ("tokens_total", {"kind": "prompt"}, 3),
        ("time_to_first_token_seconds_count", {}, 1),
        ("preemptions_total", {}, 2),
        ("requests_open", {"state": "waiting"}, 1),
    ):
        labels = LABELS | {"tenant": "t"} | more
        assert told.get_sample_value(f"tokenmill:tenant_{name}", labels) == expected, name


def test_only_the_greatest_tenants_have_series_and_no_sum_falls() -> None:
    """Beyond the bound tenants are "other"; who overtakes gets a series from 0 on; all together stay what they were."""
    metrics = TenantMetrics("m", RequestRegistry(), max_tenants=2)

    def use(tenant: str, num_output: int) -> None:
        terms = Terms(tenant=tenant)
        record = Record("r", "me", terms, "", 1, 9, 1.0, 1.0, scheduled_s=1.0, ended_s=2.0, num_output=num_output)
        record.reason = "stop"
        metrics.end(record)

    def tokens() -> dict[str, float]:
        family = next(each for each in metrics.collect() if each.name == "tokenmill:tenant_tokens")
        return {each.labels["tenant"]: each.value for each in family.samples if each.labels["kind"] == "output"}

    for tenant, number in (("a", 100), ("b", 50), ("c", 60)):
        use(tenant, number)
    assert tokens() == {"a": 100, "b": 50, OTHER: 60}
    use("c", 40)
    assert tokens() == {"a": 100, "c": 40, OTHER: 110}, "b has fewer than two thirds of c's"
    use("b", 30)
    assert tokens() == {"a": 100, "c": 40, OTHER: 140}


def test_prompt_tokens_by_source_add_up() -> None:
    """Computed, cached and brought in from the store: together they are the prompt tokens."""
    metrics = Metrics("m", 512)
    metrics.num_parameters = 20
    metrics.engine_ready(replace(READY, active_share=0.5), EngineStats())
    metrics.engine_lost(None, EngineStats())  # and what it computed stays counted
    metrics.step(
        EngineStats(
            num_steps=1,
            prompt_tokens=100,
            prefix_hits=60,
            external_hits=20,
            prompt_tokens_computed=40,
            generation_tokens=5,
        )
    )
    name = "vllm:prompt_tokens_by_source_total"
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value(metrics, name, source=source) for source in sources] == [40, 40, 20]
    assert value(metrics, "vllm:estimated_flops_per_gpu_total") == 2 * 10 * 45


def test_series_by_tenant_need_an_admin_key() -> None:
    """A scrape without one, or with a key of a tenant, tells of no tenant."""
    with Served() as served:
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        text = served.ask("/metrics")[1]
        assert "tokenmill:class_requests_total{" in text and "tokenmill:tenant" not in text
    text, _ = Metrics("m", 512).render("application/openmetrics-text", [TenantMetrics("m", RequestRegistry()).registry])
    assert b"tokenmill:tenant_tokens" in text and text.count(b"# EOF") == 1


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8",
        "text/plain;version=1.0.0;escaping=underscores",
        "text/plain",
        "",
    ],
)
def test_names_keep_their_colons_in_every_format(accept: str) -> None:
    """What Prometheus asks for gives vLLM's names, not names with underscores in them."""
    body, content_type = Metrics("m", 512).render(accept)
    assert b'\nvllm:num_requests_running{engine="0",model_name="m"} 0.0\n' in body and b"vllm_" not in body
    assert ("openmetrics" in content_type) == (b"# EOF" in body) == ("openmetrics" in accept)


def test_the_audit_log_is_told_of() -> None:
    """Its entries, those that wait, and whether it fails."""
    metrics = Metrics("m", 512)
    status = {"seq": 7, "pending": 2, "failure": None}
    metrics.registry.register(AuditMetrics("m", lambda: status))
    names = ("audit_entries_total", "audit_pending", "audit_failing")
    assert [value(metrics, f"tokenmill:{name}") for name in names] == [7, 2, 0]
    status["failure"] = "the disk is full"
    assert value(metrics, "tokenmill:audit_failing") == 1
