"""What agents ask by the anthropic package: tools there and back, forced calls, answers by a schema, caching, large
settings; and what is refused to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

CAPITAL: Any = [{"role": "user", "content": "Name the capital of France."}]
GREEDY: Any = {"temperature": 0}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
        "required": ["location"],
    },
}


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=root, api_key="unused", max_retries=0) as made:
        yield made


def test_more_tokens_than_the_context_has(client: Anthropic, model: str) -> None:
    """What callers ask of large models does no harm here."""
    with client.messages.stream(model=model, max_tokens=64_000, messages=CAPITAL, extra_body=GREEDY) as stream:
        assert stream.get_final_message().stop_reason == "end_turn"


def test_what_is_cached_is_told(client: Anthropic, model: str) -> None:
    """Marked as for Anthropic's cache, or not: the second call finds the long beginning."""
    system: Any = [{"type": "text", "text": "Facts: " + "one, two. " * 100, "cache_control": {"type": "ephemeral"}}]
    for attempt in range(2):
        usage = client.messages.create(model=model, max_tokens=1, system=system, messages=CAPITAL).usage
        assert (usage.cache_read_input_tokens or 0) > 300 or attempt == 0
    assert client.messages.create(model=model, max_tokens=0, system=system, messages=CAPITAL).content == []


def test_a_tool_and_its_result(client: Anthropic, model: str) -> None:
    """A history as the documentation shows it is read, and answered."""
    use: Any = {
        "type": "tool_use",
        "id": "toolu_01D7FLrfh4GYq7yT1ULFeyMV",
        "name": "get_weather",
        "input": {"location": "San Francisco, CA"},
    }
    result: Any = {"type": "tool_result", "tool_use_id": use["id"], "content": "259 degrees"}
    history: Any = [
        {"role": "user", "content": "What's the weather like in San Francisco?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I'll check."}, use]},
        {"role": "user", "content": [result]},
    ]
    message = client.messages.create(model=model, max_tokens=60, tools=[WEATHER], messages=history)
    assert message.content and message.stop_reason in ("end_turn", "max_tokens", "tool_use")
    before = client.messages.count_tokens(model=model, tools=[WEATHER], messages=history[:1])
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > before.input_tokens + 20
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[1\]"):
        client.messages.create(model=model, max_tokens=60, tools=[WEATHER], messages=history[:2])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_is_forced(client: Anthropic, model: str, choice: Any) -> None:
    """Whole and gathered from a stream: one call at least, whose input fits the schema, with a result sent back."""
    question: Any = [{"role": "user", "content": "What is the weather like in San Francisco?"}]
    asked: Any = {"model": model, "max_tokens": 200, "tools": [WEATHER], "extra_body": GREEDY}
    message = client.messages.create(messages=question, tool_choice=choice, **asked)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and calls
    assert calls[0].name == "get_weather" and isinstance(calls[0].input["location"], str)
    with client.messages.stream(messages=question, tool_choice=choice, **asked) as stream:
        kinds = {event.type for event in stream}
        gathered = stream.get_final_message()
    assert "input_json" in kinds and gathered.stop_reason == "tool_use"
    assert [block.input for block in gathered.content if block.type == "tool_use"] == [call.input for call in calls]
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "Foggy"} for call in calls]
    turns = [*question, message.to_param(), {"role": "user", "content": results}]
    assert client.messages.create(messages=turns, tool_choice={"type": "none"}, **asked).content[0].type == "text"


class Contact(BaseModel):
    name: str
    email: str
    wants_demo: bool


def test_an_answer_that_fits_a_schema(client: Anthropic, model: str) -> None:
    """Read by the package's own model of it, whole and from a stream."""
    text: Any = [{"role": "user", "content": "Ada (ada@example.org) asks for a demo. Extract her data."}]
    asked: Any = {"model": model, "max_tokens": 300, "messages": text, "output_format": Contact, "extra_body": GREEDY}
    message = client.messages.parse(**asked)
    assert message.stop_reason == "end_turn" and isinstance(message.parsed_output, Contact)
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().parsed_output == message.parsed_output


def test_the_sandbox_that_runs_tools(client: Anthropic, model: str) -> None:
    """It calls the function with arguments that fit, and sends back what it gives."""
    given: list[tuple[int, int]] = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two integers.

        Args:
            a: the first
            b: the second
        """
        given.append((a, b))
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is 5 + 7?"}],
        tools=[add],
        tool_choice={"type": "tool", "name": "add"},
        max_iterations=2,
        extra_body=GREEDY,
    )
    messages = list(runner)
    assert len(messages) == 2 and given and all(isinstance(value, int) for pair in given for value in pair)


def test_what_agents_send(client: Anthropic, model: str) -> None:
    """Large marked system blocks, many tools, a user's id, betas, adaptive thinking, edits that keep everything."""
    tools = [WEATHER | {"name": f"tool_{number}", "eager_input_streaming": True} for number in range(20)]
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    with client.beta.messages.stream(
        model=model,
        max_tokens=30,
        system=[{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Rules. " * 200, **mark}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                    {"type": "text", "text": "Say hello.", **mark},
                ],
            }
        ],
        tools=tools,
        tool_choice={"type": "auto"},
        thinking={"type": "adaptive"},
        metadata={"user_id": "user_1_account__session_2"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        extra_headers={"x-app": "cli", "anthropic-dangerous-direct-browser-access": "true"},
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason in ("end_turn", "max_tokens", "tool_use") and final.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ({"model": "none"}, anthropic.NotFoundError, "'none' does not exist"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"temprature": 1}, anthropic.BadRequestError, "temprature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
         anthropic.BadRequestError, "tool_choice"),
        ({"tools": [WEATHER | {"input_schema": {"type": "object", "minProperties": 2}, "strict": True}]},
         anthropic.BadRequestError, r"tools\[0\].input_schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
         anthropic.BadRequestError, "output_config.format.schema"),
        ({"container": "c"}, anthropic.BadRequestError, "container"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, anthropic.BadRequestError, "prompt is too"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
         anthropic.BadRequestError, r"messages\[0\].content\[0\]"),
    ],
)  # fmt: skip
def test_refusals(
    client: Anthropic, model: str, body: dict[str, Any], error: type[anthropic.APIStatusError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        client.messages.create(model=model, max_tokens=5, messages=CAPITAL, extra_body=body)
    assert caught.value.request_id and caught.value.type in ("not_found_error", "invalid_request_error")
