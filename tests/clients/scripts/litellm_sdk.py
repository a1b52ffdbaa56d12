"""litellm: whole, streamed, async and with its own errors, by prefix: OpenAI's protocol, Anthropic's, Ollama's."""

from __future__ import annotations

import asyncio
import json
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import litellm

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(url: str, model: str) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": url, "api_key": "unused", "temperature": 0}


def test_a_chat(server: dict[str, Any]) -> None:
    answer = litellm.completion(messages=CAPITAL, max_tokens=30, **server)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0


def test_a_stream(server: dict[str, Any]) -> None:
    whole = litellm.completion(messages=CAPITAL, max_tokens=30, **server).choices[0].message.content
    chunks = list(litellm.completion(messages=CAPITAL, max_tokens=30, stream=True, **server))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    rebuilt = litellm.stream_chunk_builder(chunks, messages=CAPITAL)
    assert rebuilt is not None and rebuilt.choices[0].message.content == whole


def test_async(server: dict[str, Any]) -> None:
    answer = asyncio.run(litellm.acompletion(messages=CAPITAL, max_tokens=30, **server))
    assert "Paris" in answer.choices[0].message.content


def test_text_completion(server: dict[str, Any], url: str, model: str) -> None:
    given = server | {"model": f"text-completion-openai/{model}"}
    answer = litellm.text_completion(prompt="The capital of France is", max_tokens=4, **given)
    assert answer.choices[0].text


def test_errors_are_those_of_litellm(server: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=CAPITAL, max_tokens=4, **(server | {"temperature": -1}))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=CAPITAL, max_tokens=4, **(server | {"model": "openai/other"}))


def test_a_tool_is_called(server: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=120,
        **server,
    )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls
    assert calls[0].function.name == "get_current_weather"
    assert set(json.loads(calls[0].function.arguments)) == {"location", "unit"}


def test_a_schema(server: dict[str, Any]) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        capital: bool

    answer = litellm.completion(messages=CAPITAL, response_format=City, max_tokens=100, **server)
    assert City.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat", "ollama"])
def test_litellm_asks_and_streams(root: str, model: str, provider: str) -> None:
    given: Any = {"model": f"{provider}/{model}", "api_base": root, "api_key": "unused", "max_tokens": 40}
    whole = litellm.completion(messages=CAPITAL, temperature=0, **given)
    assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 0
    chunks = litellm.completion(messages=CAPITAL, temperature=0, stream=True, **given)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip() == whole.choices[0].message.content.strip()


def test_litellm_calls_tools_of_messages(root: str, model: str) -> None:
    answer = litellm.completion(
        model=f"anthropic/{model}",
        api_base=root,
        api_key="unused",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=100,
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"location", "unit"}
