"""Writes tokenmill.json, the Grafana dashboard, from the list of its panels.

python deploy/grafana/make_dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
_WIDTH, _HEIGHT = 8, 8
_PREDICTED, _REAL = "tokenmill:ttft_predicted_seconds_total", "tokenmill:ttft_real_seconds_total"
_MODEL = 'model_name=~"$model",instance=~"$instance"'


class Panel(NamedTuple):
    """queries: (PromQL, legend); M stands for the selector of model and instance. stacked: areas on one another."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    stacked: bool = False


def rate(metric: str, by: str = "", more: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{M{more}}}[$__rate_interval]))"


def quantiles(metric: str, by: str = "", legend: str = "") -> tuple[tuple[str, str], ...]:
    group = f"le, {by}" if by else "le"
    shares = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")) if not by else ((0.99, "p99"),)
    return tuple(
        (f"histogram_quantile({share}, {rate(metric + '_bucket', group)})", f"{legend} {name}".strip())
        for share, name in shares
    )


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What callers experience",
        (
            Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"), "Arrival to first token."),
            Panel("Time per output token", "s", quantiles("vllm:request_time_per_output_token_seconds")),
            Panel("Gap between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
            Panel("End to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
            Panel("Queue", "s", quantiles("vllm:request_queue_time_seconds"), "Arrival to first scheduled."),
            Panel(
                "Requests by end",
                "reqps",
                ((rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
                stacked=True,
            ),
        ),
    ),
    (
        "Objectives and refusals",
        (
            Panel(
                "Requests that met their targets",
                "percentunit",
                (
                    (
                        rate("tokenmill:slo_requests_total", "priority_class, profile", ',result="attained"')
                        + f" / {rate('tokenmill:slo_requests_total', 'priority_class, profile')}",
                        "P{{priority_class}} {{profile}}",
                    ),
                ),
                "Share of those with targets, by class and profile.",
            ),
            Panel(
                "Time to first token by class",
                "s",
                quantiles(
                    "tokenmill:class_time_to_first_token_seconds",
                    "priority_class, profile",
                    "P{{priority_class}} {{profile}}",
                ),
            ),
            Panel(
                "Calls refused",
                "reqps",
                (
                    (rate("tokenmill:requests_refused_total", "status"), "{{status}}"),
                    (rate("tokenmill:calls_turned_away_total", "reason"), "429: {{reason}}"),
                ),
            ),
        ),
    ),
    (
        "The engine",
        (
            Panel(
                "Requests",
                "short",
                (
                    ("sum(vllm:num_requests_running{M})", "running"),
                    ("sum(vllm:num_requests_waiting{M})", "waiting"),
                ),
            ),
            Panel(
                "Tokens",
                "short",
                (
                    (rate("vllm:generation_tokens_total"), "output a second"),
                    (rate("vllm:prompt_tokens_by_source_total", "source"), "prompt a second: {{source}}"),
                ),
            ),
            Panel(
                "KV blocks that requests hold",
                "percentunit",
                (("max(vllm:kv_cache_usage_perc{M})", "held"),),
                "Share of the fullest pool.",
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                ((f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "hits"),),
            ),
            Panel("Preemptions", "ops", ((rate("vllm:num_preemptions_total"), "preemptions"),)),
            Panel(
                "Steps",
                "short",
                (
                    (rate("tokenmill:steps_total"), "steps a second"),
                    (
                        f"{rate('vllm:iteration_tokens_total_sum')} / {rate('vllm:iteration_tokens_total_count')}",
                        "tokens a step",
                    ),
                ),
            ),
            Panel(
                "Engines",
                "short",
                (
                    ("sum(tokenmill:engine_ready{M})", "servers with an engine"),
                    ("sum(increase(tokenmill:engine_losses_total{M}[1h]))", "engines lost in an hour"),
                    ("sum(increase(tokenmill:requests_resumed_total{M}[1h]))", "requests resumed in an hour"),
                ),
            ),
            Panel(
                "Predictions",
                "s",
                (
                    ("max(tokenmill:predicted_wait_seconds{M})", "wait of a new client"),
                    (
                        f"{rate(_PREDICTED)} / {rate(_REAL)}",
                        "predicted / real TTFT",
                    ),
                ),
            ),
            Panel(
                "Account of usage",
                "s",
                (("max(tokenmill:usage_lag_seconds{M})", "age of the sums"),),
            ),
        ),
    ),
    (
        "Tenants (scrapes with an admin key)",
        (
            Panel(
                "Tokens by tenant",
                "short",
                ((rate("tokenmill:tenant_tokens_total", "tenant"), "{{tenant}}"),),
                "Prompt, cached and output tokens a second of requests that ended.",
                stacked=True,
            ),
            Panel(
                "Time to first token by tenant",
                "s",
                quantiles("tokenmill:tenant_time_to_first_token_seconds", "tenant", "{{tenant}}"),
            ),
            Panel(
                "Refused by tenant",
                "reqps",
                ((rate("tokenmill:tenant_calls_refused_total", "tenant, reason"), "{{tenant}} {{reason}}"),),
            ),
            Panel(
                "Open requests by tenant",
                "short",
                (("sum by (tenant, state) (tokenmill:tenant_requests_open{M})", "{{tenant}} {{state}}"),),
                stacked=True,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for i, panel in enumerate(row):
            place = {"x": i % 3 * _WIDTH, "y": y + i // 3 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += (len(row) + 2) // 3 * _HEIGHT
    return {
        "uid": "tokenmill",
        "title": "tokenmill",
        "tags": ["tokenmill", "llm"],
        "timezone": "browser",
        "schemaVersion": 38,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_SOURCE, _variable("model", "model_name"), _variable("instance", "instance")]},
        "panels": panels,
    }


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": f"label_values(tokenmill:engine_ready, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        drawn |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "gridPos": place,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(65 + i),
                "datasource": _DATASOURCE,
                "expr": query.replace("{M", "{" + _MODEL).replace("by () ", ""),
                "legendFormat": legend,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "tokenmill.json").write_text(text())
