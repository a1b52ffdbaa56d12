"""Responses by the openai package: text, streams, conversations, functions, structured output, what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "Name the capital of France."


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as made:
        yield made


def test_text_from_a_text(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=40)
    assert response.object == "response" and response.status == "completed" and response.model == model
    assert "Paris" in response.output_text
    assert response.output[0].type == "message" and response.output[0].content[0].type == "output_text"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_instructions_and_roles(client: OpenAI, model: str) -> None:
    given: Any = [
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    by_role = client.responses.create(model=model, input=given, temperature=0, max_output_tokens=40)
    by_field = client.responses.create(
        model=model, instructions="You are a helpful assistant.", input=QUESTION, temperature=0, max_output_tokens=40
    )
    assert by_role.output_text == by_field.output_text and "Paris" in by_field.output_text


def test_events_of_a_stream(client: OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=40)
    stream = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=40, stream=True)
    kinds, text = [], ""
    for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            assert event.response.output_text == whole.output_text
    assert text == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_conversation_that_the_client_keeps_or_the_server(client: OpenAI, model: str) -> None:
    """The model sees the same."""
    history: Any = [{"role": "user", "content": "My name is Ada."}]
    first = client.responses.create(model=model, input=history, max_output_tokens=40)
    history += [{"role": item.role, "content": item.content} for item in first.output if item.type == "message"]
    question: Any = {"role": "user", "content": "What is my name?"}
    by_items = client.responses.create(
        model=model, input=[*history, question], temperature=0, max_output_tokens=40, store=False
    )
    by_id = client.responses.create(
        model=model, input=[question], previous_response_id=first.id, temperature=0, max_output_tokens=40
    )
    assert by_id.output_text == by_items.output_text and by_id.previous_response_id == first.id
    assert by_id.usage is not None and by_items.usage is not None and first.usage is not None
    assert by_id.usage.input_tokens == by_items.usage.input_tokens > first.usage.input_tokens


def test_what_the_server_keeps(client: OpenAI, model: str) -> None:
    first = client.responses.create(
        model=model, input="My name is Ada.", max_output_tokens=8, metadata={"topic": "names"}
    )
    second = client.responses.create(
        model=model, input="What is my name?", previous_response_id=first.id, max_output_tokens=8
    )
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text and again.metadata == {"topic": "names"}
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items if item.type == "message"] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_function_is_called_and_answered(client: OpenAI, model: str) -> None:
    items: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]
    response = client.responses.create(
        model=model,
        input=items,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls and calls[0].name == "get_weather" and isinstance(json.loads(calls[0].arguments)["city"], str)
    items += response.output
    for call in calls:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"celsius": 14})})
    final = client.responses.create(
        model=model, input=items, tools=[WEATHER], tool_choice="none", temperature=0, max_output_tokens=60
    )
    assert final.output_text


def test_a_call_that_was_cut_off_comes_back(client: OpenAI, model: str) -> None:
    """By its id and among the items, with an output and without one."""
    asked: Any = {"role": "user", "content": "What is the weather like in Paris today?"}
    how: Any = {"model": model, "tools": [WEATHER], "temperature": 0}
    forced: Any = how | {"input": [asked], "tool_choice": "required"}
    answers = (client.responses.create(**forced, max_output_tokens=most) for most in range(10, 40))
    cut = next(answer for answer in answers if answer.output)  # before the call's name is certain there is nothing
    (call,) = cut.output
    assert cut.status == "incomplete" and call.type == "function_call" and call.status == "incomplete"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "?"}]}
    for news in ([output], []):
        news = [*news, {"role": "user", "content": "Say hello."}]
        by_id = client.responses.create(**how, input=news, previous_response_id=cut.id, max_output_tokens=8)
        by_items = client.responses.create(**how, input=[asked, *cut.output, *news], max_output_tokens=8)
        assert by_id.output_text == by_items.output_text != ""
        assert by_id.usage and by_items.usage and by_id.usage.input_tokens == by_items.usage.input_tokens


def test_a_function_in_a_namespace_is_called_by_both_names(client: OpenAI, model: str) -> None:
    """As Codex offers the tools of MCP servers, beside tools that are left out and named."""
    tools: Any = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]},
    ]
    raw = client.responses.with_raw_response.create(
        model=model,
        input="What is the weather like in Paris today?",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    assert raw.headers["x-tokenmill-ignored"] == "tool web_search"
    (call,) = [item for item in raw.parse().output if item.type == "function_call"]
    assert (call.namespace, call.name) == ("mcp__sky", "get_weather") and json.loads(call.arguments)


def test_arguments_come_as_they_are_written(client: OpenAI, model: str) -> None:
    stream = client.responses.create(
        model=model,
        input="What is the weather like in Paris today?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
        max_output_tokens=60,
        stream=True,
    )
    calls: dict[int, Any] = {}
    for event in stream:
        if event.type == "response.output_item.added" and event.item.type == "function_call":
            calls[event.output_index] = event.item
        elif event.type == "response.function_call_arguments.delta":
            calls[event.output_index].arguments += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert calls[event.output_index].arguments == event.arguments
    assert [call.name for call in calls.values()] == ["get_weather"]
    assert list(json.loads(calls[min(calls)].arguments)) == ["city"]


class Event(BaseModel):
    name: str
    participants: list[str]


MEETING: Any = [
    {"role": "system", "content": "Extract the event information."},
    {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
]


def test_an_answer_parsed_into_a_class(client: OpenAI, model: str) -> None:
    response = client.responses.parse(
        model=model, input=MEETING, text_format=Event, temperature=0, max_output_tokens=120
    )
    event = response.output_parsed
    assert isinstance(event, Event) and event.name and event.participants


def test_a_stream_parsed_into_a_class(client: OpenAI, model: str) -> None:
    with client.responses.stream(
        model=model, input=MEETING, text_format=Event, temperature=0, max_output_tokens=120
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Event) and Event.model_validate_json(text) == final.output_parsed


def test_json_mode(client: OpenAI, model: str) -> None:
    response = client.responses.create(
        model=model,
        input="Give me a JSON object with the keys name and color of an apple.",
        text={"format": {"type": "json_object"}},
        temperature=0,
        max_output_tokens=120,
    )
    assert isinstance(json.loads(response.output_text), dict)


def test_an_answer_that_is_cut_says_so(client: OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Tell me a long story.", max_output_tokens=16)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_logprobs(client: OpenAI, model: str) -> None:
    response = client.responses.create(
        model=model, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=16
    )
    logprobs = response.output[0].content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens - (response.status == "completed")
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs)


def test_an_async_client_asks_many(url: str, model: str) -> None:
    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="unused") as client:

            async def one(number: int) -> str:
                text = ""
                stream = await client.responses.create(
                    model=model, input=f"Say {number}.", max_output_tokens=16, stream=True
                )
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                return text

            return await asyncio.gather(*map(one, range(8)))

    assert all(asyncio.run(main()))


def test_in_the_background(client: OpenAI, model: str) -> None:
    job = client.responses.create(
        model=model, input="Tell a story.", background=True, stream=True, max_output_tokens=20
    )
    first = next(iter(job))
    assert first.type == "response.created" and first.response.status == "queued"
    job.close()
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number))
    assert rest[-1].type in ("response.completed", "response.incomplete") and rest[-1].response.output_text
    assert client.responses.retrieve(first.response.id).output_text == rest[-1].response.output_text


def test_a_conversation(client: OpenAI, model: str) -> None:
    talk = client.conversations.create(items=[{"role": "user", "content": "My name is Ada."}])
    first = client.responses.create(model=model, input="Hello.", conversation=talk.id, max_output_tokens=10)
    assert first.conversation is not None and first.conversation.id == talk.id
    assert len(list(client.conversations.items.list(talk.id))) == 3
    assert client.conversations.delete(talk.id).deleted


def test_a_custom_tool(client: OpenAI, model: str) -> None:
    form: Any = {"type": "grammar", "syntax": "lark", "definition": 'start: "SELECT " /[a-z]{1,9}/ ";"'}
    tool: Any = {"type": "custom", "name": "query", "format": form}
    choice: Any = {"type": "custom", "name": "query"}
    answer = client.responses.create(model=model, input="List the users.", tools=[tool], tool_choice=choice)
    (call,) = [item for item in answer.output if item.type == "custom_tool_call"]
    assert call.input.startswith("SELECT ") and call.input.endswith(";")


def test_what_is_not_there_is_refused_by_name(client: OpenAI, model: str) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ]
    for body, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=model, input="x", **body)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model=model, input="x", previous_response_id="resp_unknown")
    assert unknown.value.code == "previous_response_not_found"
