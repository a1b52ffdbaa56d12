"""Tools by the anthropic package: chosen or forced, streamed, results sent back, the tool runner, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, beta_tool

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a given city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "celsius": {"type": "boolean"}},
        "required": ["city", "celsius"],
        "additionalProperties": False,
    },
}
TIME: Any = {
    "name": "get_time",
    "description": "Get the current time in a given city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASK: Any = [{"role": "user", "content": "What's the weather like in Paris?"}]

GREEDY = {"temperature": 0}
"""Samplers left the package's own arguments; the API has them still."""


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=root, api_key="unused") as made:
        yield made


def used(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def test_the_model_may_call_or_answer(client: Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=60, tools=[WEATHER], messages=ASK, extra_body=GREEDY)
    assert (message.stop_reason == "tool_use") == bool(used(message)) and message.content


def test_any_tool_must_be_called(client: Anthropic, model: str) -> None:
    """One call: a small model may go on calling until the limit."""
    message = client.messages.create(
        model=model,
        max_tokens=200,
        tools=[WEATHER, TIME],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=ASK,
        extra_body=GREEDY,
    )
    assert message.stop_reason == "tool_use"
    for block in used(message):
        assert block.id and block.name in ("get_weather", "get_time") and block.input["city"] in ("Paris", "Rome")


def test_one_tool_must_be_called(client: Anthropic, model: str) -> None:
    message = client.messages.create(
        model=model,
        max_tokens=200,
        tools=[WEATHER, TIME],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        messages=ASK,
        extra_body=GREEDY,
    )
    (block,) = used(message)
    assert block.name == "get_weather" and set(block.input) == {"city", "celsius"}


def test_no_tool_may_be_called(client: Anthropic, model: str) -> None:
    message = client.messages.create(
        model=model, max_tokens=20, tools=[WEATHER], tool_choice={"type": "none"}, messages=ASK
    )
    assert not used(message) and message.stop_reason != "tool_use"


def test_a_streamed_call_adds_up(client: Anthropic, model: str) -> None:
    settings: Any = {
        "model": model,
        "max_tokens": 200,
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "messages": ASK,
        "extra_body": GREEDY,
    }
    with client.messages.stream(**settings) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert used(final)[0].input == used(client.messages.create(**settings))[0].input and len(pieces) > 2


def test_a_result_goes_back(client: Anthropic, model: str) -> None:
    asked = client.messages.create(
        model=model, max_tokens=200, tools=[WEATHER], tool_choice={"type": "any"}, messages=ASK, extra_body=GREEDY
    )
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "15 degrees"}]}
        for block in used(asked)
    ]
    turns = [*ASK, {"role": "assistant", "content": asked.content}, {"role": "user", "content": results}]
    answer = client.messages.create(model=model, max_tokens=40, tools=[WEATHER], messages=turns, extra_body=GREEDY)
    assert answer.content
    failed = [results[0] | {"is_error": True, "content": "ConnectionError: the weather is away"}, *results[1:]]
    turns[-1] = {"role": "user", "content": failed}
    assert client.messages.create(model=model, max_tokens=40, tools=[WEATHER], messages=turns).content


def test_the_tool_runner(client: Anthropic, model: str) -> None:
    calls = []

    @beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city.

        Args:
            city: The city.
        """
        calls.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=80, tools=[get_weather], messages=ASK, max_iterations=2, extra_body=GREEDY
    )
    messages = list(runner)
    assert messages and bool(calls) == (messages[0].stop_reason == "tool_use")


def test_results_without_calls_and_unnamed_tools_are_refused(client: Anthropic, model: str) -> None:
    stray: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"tool_result|tool_use_id"):
        client.messages.create(model=model, max_tokens=4, tools=[WEATHER], messages=stray)
    nameless: Any = {key: value for key, value in WEATHER.items() if key != "name"}
    with pytest.raises(anthropic.BadRequestError, match="name"):
        client.messages.create(model=model, max_tokens=4, tools=[nameless], messages=ASK)
    unknown: Any = {"type": "tool", "name": "other"}
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(model=model, max_tokens=4, tools=[WEATHER], tool_choice=unknown, messages=ASK)


def test_a_server_tool_is_left_out_and_a_lone_choice_is_refused(client: Anthropic, model: str) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    raw = client.messages.with_raw_response.create(model=model, max_tokens=4, tools=[search], messages=ASK)
    assert raw.headers["x-tokenmill-ignored"] == "tool web_search_20250305" and raw.parse().content
    only: Any = {"type": "tool", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client.messages.create(model=model, max_tokens=4, tools=[search, WEATHER], tool_choice=only, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="tool"):
        client.messages.create(model=model, max_tokens=4, tool_choice={"type": "any"}, messages=ASK)


def test_tools_are_counted(client: Anthropic, model: str) -> None:
    bare = client.messages.count_tokens(model=model, messages=ASK).input_tokens
    assert client.messages.count_tokens(model=model, messages=ASK, tools=[WEATHER]).input_tokens > bare
