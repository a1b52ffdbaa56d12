"""The ollama package: chat, generate, streams, async, tools, formats, embeddings, and what it lists and shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Literal

import ollama
import pytest
from ollama import AsyncClient, Client
from pydantic import BaseModel, Field

CAPITAL = [{"role": "user", "content": "Name the capital of France."}]
GREEDY = {"temperature": 0, "num_predict": 40}


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[Client]:
    yield Client(host=root)


def test_chat(client: Client, model: str) -> None:
    answer = client.chat(model=model, messages=CAPITAL, options=GREEDY)
    assert answer["message"]["role"] == "assistant" and "Paris" in (answer.message.content or "")
    assert answer.done and answer.done_reason == "stop" and (answer.eval_count or 0) > 0


def test_a_streamed_chat(client: Client, model: str) -> None:
    chunks = list(client.chat(model=model, messages=CAPITAL, options=GREEDY, stream=True))
    whole = client.chat(model=model, messages=CAPITAL, options=GREEDY)
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1].total_duration or 0) >= (chunks[-1].eval_duration or 0) > 0


def test_a_stream_with_characters_that_end_lines(client: Client, model: str) -> None:
    """The package splits what comes by `str.splitlines`."""
    said = "a\u2028b\u2029c\x85d"
    chunks = client.chat(model=model, messages=CAPITAL, format={"const": said}, stream=True)
    assert json.loads("".join(chunk.message.content or "" for chunk in chunks)) == said


def test_generate(client: Client, model: str) -> None:
    prompt = "Name the capital of France."
    answer = client.generate(model=model, prompt=prompt, system="Be brief.", options=GREEDY)
    assert "Paris" in answer.response and answer.context
    chunks = client.generate(model=model, prompt=prompt, system="Be brief.", options=GREEDY, stream=True)
    assert "".join(chunk.response for chunk in chunks) == answer.response


def test_generate_raw(client: Client, model: str) -> None:
    options = {"temperature": 0, "num_predict": 4, "stop": ["\n"], "seed": 1, "top_k": 5, "repeat_penalty": 1.1}
    answer = client.generate(model=model, prompt="The capital of France is", raw=True, options=options, keep_alive="5m")
    assert answer.response and answer.done


def test_async(root: str, model: str) -> None:
    async def main() -> str:
        text = ""
        async for part in await AsyncClient(host=root).chat(model=model, messages=CAPITAL, options=GREEDY, stream=True):
            text += part.message.content or ""
        return text

    assert "Paris" in asyncio.run(main())


def test_what_is_there(client: Client, model: str) -> None:
    assert any((each.model or "").split(":")[0] == model for each in client.list().models)
    shown = client.show(model)
    assert shown.modelinfo and shown.details is not None and "completion" in (shown.capabilities or [])
    assert any((each.model or "").split(":")[0] == model for each in client.ps().models)


def test_another_model_is_not_found(client: Client) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(model="other", messages=CAPITAL)
    assert refused.value.status_code == 404 and "model 'other' not found" in refused.value.error


def test_json_and_a_schema(client: Client, model: str) -> None:
    class Country(BaseModel):
        name: str = Field(max_length=20)
        capital: str = Field(max_length=20)

    options = GREEDY | {"num_predict": 120}
    answer = client.chat(model=model, messages=CAPITAL, format=Country.model_json_schema(), options=options)
    assert Country.model_validate_json(answer.message.content or "").name
    loose = client.chat(model=model, messages=CAPITAL, format="json", options=options)
    assert loose.done_reason == "length" or isinstance(json.loads(loose.message.content or ""), dict)


def test_tools_as_functions(client: Client, model: str) -> None:
    def add_two_numbers(a: int, b: int) -> int:
        """Add two numbers

        Args:
            a: The first number
            b: The second number

        Returns:
            int: The sum
        """
        return a + b

    asked = [{"role": "user", "content": "What is three plus one?"}]
    answer = client.chat(model=model, messages=asked, tools=[add_two_numbers], options=GREEDY)
    for call in answer.message.tool_calls or []:
        assert call.function.name
    turns = [
        *asked,
        {"role": "assistant", "tool_calls": [{"function": {"name": "add_two_numbers", "arguments": {"a": 3, "b": 1}}}]},
        {"role": "tool", "content": "4", "tool_name": "add_two_numbers"},
    ]
    assert client.chat(model=model, messages=turns, tools=[add_two_numbers], options=GREEDY).message.content


def test_thinking_is_refused_where_a_model_cannot(client: Client, model: str) -> None:
    think: Literal[False] = False
    assert client.chat(model=model, messages=CAPITAL, think=think, options=GREEDY).message.content
    with pytest.raises(ollama.ResponseError, match="think"):
        client.chat(model=model, messages=CAPITAL, think=True, options=GREEDY)
