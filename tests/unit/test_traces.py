"""Traces: what a call sends to an OTLP receiver, from its HTTP head to the steps of its engine; and whom it may cost
nothing."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from scripted import Served
from tokenmill.control.observe import traces
from tokenmill.control.observe.traces import CONTENT_VARIABLE, Tracing, open_tracing
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.masking import Mask

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver:
    """Takes spans by OTLP over HTTP on a loopback port."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                for each in sent.resource_spans:
                    receiver.resources.append(values(each.resource.attributes))
                    receiver.spans += [span for scope in each.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return sorted((span for span in self.spans if span.name == name), key=lambda each: each.start_time_unix_nano)


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@contextmanager
def traced(receiver: Receiver, mask: Mask | None = None, **settings: Any) -> Iterator[Served]:
    """A server whose spans have all arrived when the block ends."""
    tracing = Tracing(OTLPSpanExporter(receiver.url), "1.2", mask)
    try:
        with Served(tracing=tracing, **settings) as served:
            yield served
    finally:
        tracing.close()


def ask(served: Served, path: str, body: dict[str, Any], **heads: str) -> dict[str, Any]:
    data = json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"content-type": "application/json", **heads})
    with urllib.request.urlopen(call, timeout=20) as answer:
        return json.load(answer)


def test_one_trace_leads_from_the_caller_to_the_steps(tmp_path: Path) -> None:
    """The caller's trace goes on: call, request, queue, prefill with each chunk's step, decode; names old and new."""
    config = EngineConfig(groups=full_groups(64), max_model_len=512, max_num_batched_tokens=64)
    body = {"messages": [{"role": "user", "content": "x" * 150}], "max_tokens": 5, "temperature": 0.5, "seed": 3}
    before = time.time_ns()
    with Receiver() as receiver, traced(receiver, engine=config, flight_dir=tmp_path) as served:
        answer = ask(served, "/v1/chat/completions", body, traceparent=PARENT, **{"x-request-id": "mine"})
        served.ask("/health")
    assert {span.trace_id.hex() for span in receiver.spans} == {PARENT.split("-")[1]}
    (call,) = receiver.named("POST /v1/chat/completions")
    assert call.parent_span_id.hex() == PARENT.split("-")[2] and call.kind == 2
    told = values(call.attributes)
    assert (told["http.response.status_code"], told["tokenmill.request_id"]) == (200, "mine")
    (request,) = receiver.named("chat toy")
    assert request.parent_span_id == call.span_id
    told = values(request.attributes)
    num_prompt = answer["usage"]["prompt_tokens"]
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "tokenmill", "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ["length"], "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 5, "gen_ai.usage.prompt_tokens": num_prompt, "gen_ai.usage.completion_tokens": 5,
    }  # fmt: skip
    assert {name: told.get(name) for name in expected} == expected
    assert 0 < told["gen_ai.latency.time_in_queue"] <= told["gen_ai.latency.time_to_first_token"]
    assert told["gen_ai.latency.time_to_first_token"] == told["gen_ai.response.time_to_first_chunk"]
    parts = [receiver.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert all(part.parent_span_id == request.span_id for part in parts)
    times = [time_ns for part in parts for time_ns in (part.start_time_unix_nano, part.end_time_unix_nano)]
    assert times == sorted(times) and before <= times[0] and times[-1] <= time.time_ns()
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == (times[0], times[-1])
    chunks = [values(event.attributes) for event in parts[1].events]
    assert sum(chunk["tokenmill.tokens"] for chunk in chunks) == num_prompt and len(chunks) > 1
    assert [chunk["tokenmill.step"] for chunk in chunks] == list(range(len(chunks)))
    assert receiver.resources[0]["service.name"] == "tokenmill" and "xxxx" not in str(receiver.spans)
    assert not receiver.named("GET /health"), "monitoring is not traced"


def test_what_the_caller_does_not_sample_is_not_sent() -> None:
    """The sampled flag of traceparent is respected, and nothing is kept for such a call."""
    with Receiver() as receiver, traced(receiver) as served:
        ask(served, "/v1/completions", {"prompt": "a", "max_tokens": 2}, traceparent=PARENT[:-1] + "0")
        assert served.client.observers.monitor is not None and served.client.observers.monitor.tracing is not None
        assert not served.client.observers.monitor.tracing._open
    assert not receiver.spans


def test_a_resumed_request_shows_both_engines_and_a_bad_call_its_status() -> None:
    """Held between two prefills; 400 is an error type, not a failure of the server."""
    with Receiver() as receiver, traced(receiver) as served:
        served.call(served.script.go.clear)
        asking = threading.Thread(target=ask, args=(served, "/v1/completions", {"prompt": "a", "max_tokens": 3}))
        asking.start()
        served.wait_until(lambda: any(each.lives for each in served.client.observers.monitor.requests))
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        served.call(served.script.go.set)
        served.restart_engine()
        asking.join(20)
        assert served.ask("/v1/completions", {"prompt": "a", "max_tokens": -1})[0] == 400
    assert [values(span.attributes)["tokenmill.engine"] for span in receiver.named("prefill")] == [0, 1]
    assert len(receiver.named("held")) == 1
    assert values(receiver.named("text_completion toy")[0].attributes)["tokenmill.num_resumptions"] == 1
    bad = values(receiver.named("POST /v1/completions")[-1].attributes)
    assert (bad["error.type"], bad["http.response.status_code"]) == ("400", 400)
    assert receiver.named("POST /v1/completions")[-1].status.code == 0


def test_no_span_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where callers put it: in the path, the name of the call, the state of their own trace, the prompt."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    body = {"prompt": "my key is swordfish-of-flags", "max_tokens": 2}
    heads = {"traceparent": PARENT, "tracestate": "vendor=swordfish-of-flags", "x-request-id": "swordfish-of-flags"}
    with Receiver() as receiver, traced(receiver, Mask(["swordfish-of-flags"])) as served:
        ask(served, "/v1/completions", body, **heads)
        served.ask("/v1/swordfish-of-flags")
    assert len(receiver.spans) > 2 and "my key is ***" in str(receiver.spans)
    assert "swordfish" not in str(receiver.spans)


def test_prompts_are_shown_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's variable for message content puts the prompt into the request's span."""
    monkeypatch.setenv(CONTENT_VARIABLE, "true")
    with Receiver() as receiver, traced(receiver) as served:
        ask(served, "/v1/completions", {"prompt": "a secret", "max_tokens": 2})
    told = values(receiver.named("text_completion toy")[0].attributes)
    assert json.loads(told["gen_ai.input.messages"])[0]["parts"][0]["content"] == "a secret"


def test_each_line_of_a_batch_is_a_trace(tmp_path: Path) -> None:
    """A call from inside has spans like one from outside."""
    with Receiver() as receiver, traced(receiver, files_dir=str(tmp_path)) as served:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": "toy", "prompt": "p"}}
            for i in range(3)
        ]
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            content = "\n".join(map(json.dumps, lines)).encode()
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            served.wait_until(lambda: len(served.client.observers.monitor.requests.ended) == 3)
            while client.batches.retrieve(batch.id).status != "completed":
                time.sleep(0.02)
    calls = receiver.named("POST /v1/completions")
    assert len({span.trace_id for span in calls}) == 3
    assert {span.parent_span_id for span in receiver.named("text_completion toy")} == {span.span_id for span in calls}


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://host/x", "http://"])
def test_a_bad_endpoint_names_the_flag(endpoint: str) -> None:
    """What is no HTTP address is refused with an example."""
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be an address such as"):
        open_tracing(endpoint, "1", Mask())


def test_traces_are_made_only_where_somebody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag and no variable: none; OTEL_* variables turn them on and off; without the SDK the remedy is named."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    assert open_tracing(None, "1", Mask()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing = open_tracing(None, "1", Mask())
    assert tracing is not None
    tracing.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="http/protobuf"):
        open_tracing(None, "1", Mask())
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tokenmill\[otel\]"):
        open_tracing("http://127.0.0.1:9", "1", Mask())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracing("http://127.0.0.1:9", "1", Mask()) is None


def test_a_server_that_ends_does_not_wait_for_a_collector_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of the exporter are cut short: it is shut down before the last batch has failed for good."""
    monkeypatch.setattr(traces, "LAST_S", 0.05)
    given_up = threading.Event()

    class Stubborn(OTLPSpanExporter):
        def export(self, spans: Any) -> Any:
            assert given_up.wait(20), "nobody gave it up"
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            given_up.set()

    tracing = Tracing(Stubborn("http://127.0.0.1:9"), "1")
    with tracing.call({"type": "http", "method": "GET", "path": "/", "headers": []}):
        pass
    tracing.close()
    assert given_up.is_set()
