"""What spans say: OpenTelemetry's attributes of HTTP servers and of generative AI (semantic-conventions-genai, status
Development), vLLM's older names beside them, and our own, which start with `tokenmill.`. Never a text."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from ...core.request import Request
from .book import Record

PROVIDER = "tokenmill"
_CHATS = ("/chat/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat")
_SETTINGS = (
    ("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0),
)  # fmt: skip


def call_attributes(scope: MutableMapping[str, Any]) -> dict[str, Any]:
    """Of a call as it comes."""
    server, client = scope.get("server"), scope.get("client")
    found: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    if server is not None:
        found["server.address"] = str(server[0])
        if server[1]:
            found["server.port"] = int(server[1])
    if client is not None:
        found["client.address"] = str(client[0])
    return found


def outcome_of(scope: MutableMapping[str, Any]) -> tuple[str, dict[str, Any], bool]:
    """Of a call as it ends: its span's name, attributes, and whether the server failed."""
    state = scope.get("state", {})
    found: dict[str, Any] = {}
    route = getattr(scope.get("route"), "path", "") or ("" if scope.get("path_params") else scope["path"])
    is_known = "endpoint" in scope
    if is_known and route:
        found["http.route"] = route
    if state.get("request_id"):
        found["tokenmill.request_id"] = state["request_id"]
    tenant = getattr(state.get("tenant"), "id", "")
    if tenant:
        found["tokenmill.tenant"] = tenant
    status = state.get("traced_status")
    if status is not None:
        found["http.response.status_code"] = status
        if status >= 400:
            found["error.type"] = str(status)
    name = f"{scope['method']} {route}" if is_known and route else scope["method"]
    return name, found, status is not None and status >= 500


def operation_of(path: str, request: Request) -> str:
    if request.pooling is not None:
        return "embeddings"
    return "chat" if path in _CHATS else "text_completion"


def gen_ai_attributes(record: Record, request: Request, operation: str, model: str) -> dict[str, Any]:
    """Of a request that has ended."""
    sampling, terms = request.sampling, record.terms
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.system": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.root,
        "gen_ai.response.finish_reasons": (record.reason,),
        "gen_ai.usage.input_tokens": record.num_prompt,
        "gen_ai.usage.output_tokens": record.num_output,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached,
        "gen_ai.usage.prompt_tokens": record.num_prompt,
        "gen_ai.usage.completion_tokens": record.num_output,
        "gen_ai.request.id": record.id,
        "gen_ai.latency.e2e": record.ended_s - record.arrival_s,
        "tokenmill.priority_class": terms.priority_class,
        "tokenmill.num_preemptions": record.num_preemptions,
        "tokenmill.num_resumptions": record.num_resumptions,
        "tokenmill.num_moves": record.num_moves,
    }
    if request.pooling is None:
        found |= {
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.seed": request.seed if request.seed < 2**63 else request.seed - 2**64,
        }
        for name, default in _SETTINGS:
            if (value := getattr(sampling, name)) != default:
                found[f"gen_ai.request.{name}"] = value
    if terms.tenant:
        found["tokenmill.tenant"] = terms.tenant
    if terms.profile:
        found["tokenmill.profile"] = terms.profile
    if record.is_attained is not None:
        found["tokenmill.slo.attained"] = record.is_attained
    if record.reason == "error":
        found["error.type"] = "error"
    return found | _latencies(record)


def _latencies(record: Record) -> dict[str, float]:
    """vLLM's, and the one of the conventions."""
    found: dict[str, float] = {}
    if record.scheduled_s < 0:
        return found
    found["gen_ai.latency.time_in_queue"] = record.scheduled_s - record.arrival_s
    if record.first_s < 0:
        return found
    last_s = max(record.first_s, record.last_s)
    return found | {
        "gen_ai.response.time_to_first_chunk": record.first_s - record.arrival_s,
        "gen_ai.latency.time_to_first_token": record.first_s - record.arrival_s,
        "gen_ai.latency.time_in_model_prefill": record.first_s - record.scheduled_s,
        "gen_ai.latency.time_in_model_decode": last_s - record.first_s,
        "gen_ai.latency.time_in_model_inference": last_s - record.scheduled_s,
    }
