"""Traces by OpenTelemetry: a span for each call, and below it one for each of its requests, with its queue, prefill,
decode and resumption. The spans of a request are made when it has ended, from its record and its engine's flight
recorder, so that nothing is done while it runs. Sampling, resource and bounds of the queue are the SDK's, by OTEL_*
variables; a thread of the SDK's exports. Only this file knows the SDK, and loads it only when traces are wanted.

Spans have OpenTelemetry's attributes of HTTP servers and of generative AI (semantic-conventions-genai, status
Development), vLLM's older names beside them, and our own, which start with `tokenmill.`. Never a text, unless that is
asked for.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from ...core.errors import ConfigError
from ...core.masking import Mask
from ...core.request import Request
from .requests import Record
from .timeline import Rings, timeline

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

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
    if state.get("told_id"):
        found["tokenmill.request_id"] = state["told_id"]
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


CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""OpenTelemetry's own: "true" puts prompts into spans."""
LAST_S = 3.0
MAX_CHARS = 10_000
"""Of a prompt that is put into a span."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLAG = "--otlp-traces-endpoint"
_EXPLAIN = "install it with: pip install 'tokenmill[otel]'"


class Tracing:
    """`exporter`: where spans go. `version`: of this server. `mask`: of what no span has."""

    def __init__(self, exporter: SpanExporter, version: str, mask: Mask | None = None) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = Resource({SERVICE_NAME: "tokenmill", SERVICE_VERSION: version})
        self.provider: TracerProvider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
        self._mask = mask or Mask()
        self._exporter = _masked(exporter, self._mask)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self.provider.get_tracer("tokenmill", version)
        self._shows_prompts = os.environ.get(CONTENT_VARIABLE, "").lower() == "true"
        self._open: dict[str, tuple[Context, Request, str]] = {}
        self.model_of: Callable[[str], str] = lambda adapter: adapter
        self.decode: Callable[[Sequence[int]], str] = lambda tokens: ""
        self.rings = Rings()

    def close(self) -> None:
        """Send what is left, or give it up after `LAST_S`: who ends is not to wait for a collector that is gone."""
        give_up = threading.Timer(LAST_S, self._exporter.shutdown)
        give_up.start()
        self.provider.shutdown()
        give_up.cancel()
        give_up.join()

    # ---- calls ----

    @contextmanager
    def call(self, scope: MutableMapping[str, Any]) -> Iterator[None]:
        """The span of an HTTP call, below the one that its traceparent names; the current one within the block."""
        from opentelemetry.context import Context, attach, detach
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        heads = {name.decode("latin1"): self._mask(value.decode("latin1")) for name, value in scope["headers"]}
        parent: Context = extract(heads, Context())
        span = self._tracer.start_span(scope["method"], parent, SpanKind.SERVER, call_attributes(scope))
        token = attach(set_span_in_context(span, parent))
        state = scope.setdefault("state", {})
        state["trace_id"] = format(span.get_span_context().trace_id, "032x")
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            detach(token)
            name, more, has_failed = outcome_of(scope)
            span.update_name(name)
            span.set_attributes(more)
            if has_failed:
                span.set_status(Status(StatusCode.ERROR))
            span.end()

    # ---- requests ----

    def opened(self, requests: Sequence[Request], operation: str) -> None:
        """Called where the call's span is the current one. `operation`: the path of the call; "": there is none."""
        from opentelemetry.context import get_current
        from opentelemetry.trace import get_current_span

        context = get_current()
        parent = get_current_span(context).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return
        for request in requests:
            self._open[request.id] = (context, request, operation)

    def ended(self, record: Record) -> None:
        found = self._open.pop(record.id, None)
        if found is not None:
            self._write(record, *found)

    def _write(self, record: Record, context: Context, request: Request, path: str) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        since_s = time.time() - time.monotonic() + record.arrival_s

        def ns(after_s: float) -> int:
            return int(1e9 * (since_s + after_s))

        end = ns(record.ended_s - record.arrival_s)
        operation = operation_of(path, request)
        model = self.model_of(request.adapter)
        attributes = gen_ai_attributes(record, request, operation, model)
        if self._shows_prompts:
            part = {"type": "text", "content": self.decode(request.prompt_tokens[:MAX_CHARS])[:MAX_CHARS]}
            attributes["gen_ai.input.messages"] = json.dumps([{"role": "user", "parts": [part]}])
        span = self._tracer.start_span(f"{operation} {model}", context, attributes=attributes, start_time=ns(0.0))
        if record.error or record.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span, context)
        if span.is_recording():
            for part_of in timeline(record, self.rings):
                self._write_part(part_of, below, ns, end)
        span.end(end)

    def _write_part(self, part: dict[str, Any], below: Context, ns: Callable[[float], int], end: int) -> None:
        engine = {} if part["engine"] is None else {"tokenmill.engine": part["engine"]}
        span = self._tracer.start_span(part["name"], below, attributes=engine, start_time=ns(part["start_s"]))
        for event in part["events"]:
            facts = {
                f"tokenmill.{name}": value for name, value in event.items() if name not in ("name", "at_s", "end_s")
            }
            if event.get("end_s") is not None:
                facts["tokenmill.duration_s"] = event["end_s"] - event["at_s"]
            span.add_event(event["name"], facts, ns(event["at_s"]))
        span.end(end if part["end_s"] is None else ns(part["end_s"]))


def _masked(exporter: SpanExporter, mask: Mask) -> SpanExporter:
    """Sends spans to `exporter` without what `mask` hides: here all of them pass, with all that they have."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    def shown(span: ReadableSpan) -> ReadableSpan:
        return ReadableSpan(
            mask(span.name),
            span.context,
            span.parent,
            span.resource,
            mask.deep(dict(span.attributes or {})),
            [Event(mask(each.name), mask.deep(dict(each.attributes or {})), each.timestamp) for each in span.events],
            span.links,
            span.kind,
            status=span.status,
            start_time=span.start_time,
            end_time=span.end_time,
            instrumentation_scope=span.instrumentation_scope,
        )

    class Masked(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return exporter.export([shown(span) for span in spans])

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Masked()


def open_tracing(endpoint: str | None, version: str, mask: Mask) -> Tracing | None:
    """Traces to `endpoint`, or where OTEL_* variables say; None: nobody wants any. Raises ConfigError where the SDK is
    not installed, or the endpoint is no HTTP address."""
    env = os.environ
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    if endpoint is None and not any(env.get(name) for name in _ENDPOINTS):
        return None
    protocols = (env.get(f"OTEL_EXPORTER_OTLP_{each}PROTOCOL") for each in ("TRACES_", ""))
    protocol = next((each for each in protocols if each), "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(f"Traces go out by http/protobuf, not by {protocol} (OTEL_EXPORTER_OTLP_PROTOCOL).")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"Traces need the OpenTelemetry SDK; {_EXPLAIN}", param="otlp_traces_endpoint") from error
    return Tracing(OTLPSpanExporter(None if endpoint is None else _whole(endpoint)), version, mask)


def _whole(endpoint: str) -> str:
    """With the path of OTLP where it has none."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = f"{_FLAG} must be an address such as http://localhost:4318/v1/traces, got {endpoint!r}."
        raise ConfigError(message, param="otlp_traces_endpoint")
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path="/v1/traces"))
