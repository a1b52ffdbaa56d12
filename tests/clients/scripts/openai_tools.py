"""Tools by the openai package: the model's choice, required, named, forbidden, streamed, answered, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]


def function(name: str, description: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function(
    "get_weather",
    "Get current temperature for a given location.",
    location={"type": "string", "maxLength": 20, "description": "City and country e.g. Bogotá, Colombia"},
    units={"type": "string", "enum": ["celsius", "fahrenheit"]},
)
EMAIL = function(
    "send_email",
    "Send an email to a given recipient.",
    to={"type": "string", "maxLength": 20},
    urgent={"type": "boolean"},
    copies={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
)
TOOLS = {tool["function"]["name"]: tool for tool in (WEATHER, EMAIL)}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as made:
        yield made


def ask(client: OpenAI, model: str, **settings: Any) -> Any:
    """One call unless a test says otherwise: a small model that may go on calling does so until max_tokens."""
    settings = {
        "messages": ASK,
        "tools": [WEATHER, EMAIL],
        "temperature": 0,
        "max_tokens": 200,
        "parallel_tool_calls": False,
    } | settings
    return client.chat.completions.create(model=model, **settings)


def check(calls: Any) -> None:
    """Each call names a tool and fits its schema."""
    assert calls and len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[call.function.name]["function"]["parameters"])


def test_the_model_may_call(client: OpenAI, model: str) -> None:
    choice = ask(client, model, max_tokens=60).choices[0]
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    assert choice.message.tool_calls or choice.message.content is not None


def test_a_call_is_required(client: OpenAI, model: str) -> None:
    choice = ask(client, model, tool_choice="required").choices[0]
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("name", TOOLS)
def test_a_named_function_is_called(client: OpenAI, model: str, name: str) -> None:
    choice = ask(client, model, tool_choice={"type": "function", "function": {"name": name}}).choices[0]
    check(choice.message.tool_calls)
    assert [call.function.name for call in choice.message.tool_calls] == [name]


def test_a_call_is_forbidden(client: OpenAI, model: str) -> None:
    choice = ask(client, model, tool_choice="none", max_tokens=16).choices[0]
    assert not choice.message.tool_calls and choice.message.content is not None


def test_several_calls(client: OpenAI, model: str) -> None:
    choice = ask(client, model, tool_choice="required", parallel_tool_calls=True).choices[0]
    whole = choice.message.tool_calls if choice.finish_reason == "tool_calls" else choice.message.tool_calls[:-1]
    if whole:
        check(whole)
    assert choice.finish_reason in ("tool_calls", "length")


def test_a_streamed_call_adds_up(client: OpenAI, model: str) -> None:
    whole = ask(client, model, tool_choice="required").choices[0].message.tool_calls
    names, arguments, ends = {}, {}, []
    for chunk in ask(client, model, tool_choice="required", stream=True):
        for choice in chunk.choices:
            ends += [choice.finish_reason] * (choice.finish_reason is not None)
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    names[call.index] = call.function.name
                    assert call.id
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert ends == ["tool_calls"]
    assert [(call.function.name, call.function.arguments) for call in whole] == [
        (names[index], arguments[index]) for index in sorted(names)
    ]


def test_the_sandbox_that_gathers_a_stream(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    check(message.tool_calls)


def test_results_go_back(client: OpenAI, model: str) -> None:
    message = ask(client, model, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "15 degrees"} for call in message.tool_calls]
    assert ask(client, model, messages=[*ASK, message, *results], max_tokens=30).choices[0].message
    again = ask(client, model, messages=[*ASK, message, *results], tool_choice="none", max_tokens=30).choices[0]
    assert again.message.content is not None


def test_a_model_of_pydantic_as_a_tool(client: OpenAI, model: str) -> None:
    class GetWeather(BaseModel):
        """Get the weather."""

        city: str = Field(max_length=20)

    parsed = client.chat.completions.parse(
        model=model,
        messages=ASK,
        tools=[openai.pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    (call, *_) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_what_is_wrong_is_named(client: OpenAI, model: str) -> None:
    def refused(**settings: Any) -> str:
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, model, **settings)
        return f"{error.value.param} {error.value}"

    assert "tools" in refused(tools=[{"type": "function", "function": {"description": "no name"}}])
    assert "tool_choice" in refused(tool_choice={"type": "function", "function": {"name": "other"}})
    assert "tools" in refused(tools=[{"type": "web_search"}])
    stray = [*ASK, {"role": "tool", "tool_call_id": "call_1", "content": "15"}]
    assert "messages" in refused(messages=stray)


def test_a_call_that_was_cut_off_comes_back(client: OpenAI, model: str) -> None:
    """Wherever max_tokens ends it, the conversation goes on, with an answer to the call and without one."""
    for most in (4, 14, 18, 24):
        cut = ask(client, model, tool_choice="required", max_tokens=most).choices[0]
        assert cut.finish_reason == "length" and not cut.message.content
        calls = cut.message.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": "That was cut off."} for call in calls]
        for history in ([cut.message, *results], [cut.message]):
            messages = [*ASK, *history, {"role": "user", "content": "Say it again."}]
            again = ask(client, model, messages=messages, tool_choice="none", max_tokens=8).choices[0]
            assert again.message.content
