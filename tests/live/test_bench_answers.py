"""The load generator speaks OpenAI's responses and Anthropic's messages: bodies, token events, counts and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from scripted import Served
from tokenmill.bench.load import datasets
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.http import parse_url
from tokenmill.bench.load.material import word_material
from tokenmill.bench.load.run import Load, run_load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.stream import Exchange, on_message, on_response
from tokenmill.bench.load.target import Target
from tokenmill.bench.result import Run

WORDS = "hello big world "


def measure(served: Served, api: str) -> Run:
    target = Target("toy", parse_url(served.url), BodyFormat(api, "text", "toy"), f"{served.url}/metrics", 10.0)
    load = Load(
        lambda num, seed, rate: datasets.random_prompts(num, seed, Lengths(20, 12)),
        lambda seed, form: word_material(seed, None),
        Schedule(concurrency=3),
        9,
        seed=0,
        num_warmups=1,
    )
    return asyncio.run(run_load(target, load))


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_load_is_measured_as_over_chat(api: str) -> None:
    """The same calls give the same tokens, at most one event each, with all counts, and end for the same reason."""
    with Served(lambda prompt: WORDS * 4, step_s=0.002) as served:
        chat, run = measure(served, "chat"), measure(served, api)
    assert (run.num_ok, run.output_tokens, run.ttft_s.num) == (9, chat.output_tokens, 9) == (9, 9 * 12, 9)
    assert run.input_tokens == chat.input_tokens
    # One event each, but for tokens that a busy machine sends together.
    assert all(9 < each.itl_s.num <= 9 * (12 - 1) for each in (run, chat))
    assert not [warning for warning in run.warnings if "usage" in warning or "whole" in warning]


def read(events: list[Any], on_event: Callable[[Exchange, float, bytes], None]) -> Exchange:
    exchange = Exchange(0, 0.0, keep_text=True)
    for at_s, event in enumerate(events):
        on_event(exchange, float(at_s), event if isinstance(event, bytes) else json.dumps(event).encode())
    return exchange


USAGE = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 5}}


def response(status: str, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{status}", "response": {"status": status, "output": [], "usage": USAGE, **more}}


def test_events_of_responses_are_told_apart() -> None:
    """Reasoning, text and arguments are token events; content begins with the text; the rest is none."""
    exchange = read(
        [
            {"type": "response.created", "response": {"status": "in_progress"}},
            {"type": "response.output_item.added", "item": {"type": "reasoning"}},
            {"type": "response.reasoning_text.delta", "delta": "r"},
            {"type": "response.output_text.delta", "delta": "t", "logprobs": []},
            {"type": "response.output_text.done", "text": "t"},
            {"type": "response.function_call_arguments.delta", "delta": "{}"},
            response("incomplete"),
        ],
        on_response,
    )
    assert (list(exchange.event_times), exchange.first_content_s, exchange.text) == ([2.0, 3.0, 5.0], 3.0, "rt{}")
    assert (exchange.input_tokens, exchange.output_tokens, exchange.cached_tokens) == (9, 4, 5)
    assert (exchange.finish_reason, exchange.is_complete, exchange.ok) == ("length", True, True)


def test_events_of_messages_are_told_apart() -> None:
    """Cached tokens count among the input's; thinking is no content."""
    start = {"input_tokens": 3, "cache_read_input_tokens": 6, "output_tokens": 0}
    exchange = read(
        [
            {"type": "message_start", "message": {"usage": start}},
            {"type": "ping"},
            {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "r"}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "t"}},
            {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{}"}},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
            {"type": "message_stop"},
        ],
        on_message,
    )
    assert (list(exchange.event_times), exchange.first_content_s, exchange.text) == ([2.0, 3.0, 4.0], 3.0, "rt{}")
    assert (exchange.input_tokens, exchange.output_tokens, exchange.cached_tokens) == (9, 4, 6)
    assert (exchange.finish_reason, exchange.ok) == ("tool_calls", True)


def test_whole_answers_are_read() -> None:
    items = [
        {"type": "message", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "arguments": "{}"},
    ]
    whole = read([{"object": "response", "status": "completed", "output": items, "usage": USAGE}], on_response)
    assert (whole.text, whole.finish_reason, whole.output_tokens) == ("a{}", "stop", 4)
    blocks = [{"type": "text", "text": "a"}, {"type": "tool_use", "input": {"b": 1}}]
    counts = {"input_tokens": 9, "output_tokens": 4}
    whole = read([{"type": "message", "content": blocks, "stop_reason": "end_turn", "usage": counts}], on_message)
    assert (whole.text, whole.finish_reason, whole.output_tokens) == ('a{"b":1}', "stop", 4)


@pytest.mark.parametrize(
    ("events", "on_event", "error"),
    [
        ([response("failed", error={"code": "server_error"})], on_response, "stream_error"),
        ([{"type": "error", "message": "m"}], on_response, "stream_error"),
        ([b"{"], on_response, "bad_response"),
        ([{"type": "response.completed"}], on_response, "bad_response"),
        ([{"type": "error", "error": {"type": "overloaded_error"}}], on_message, "stream_error"),
        ([b"{"], on_message, "bad_response"),
    ],
)
def test_failures_are_failures(events: list[Any], on_event: Callable[..., None], error: str) -> None:
    assert read(events, on_event).error == error
