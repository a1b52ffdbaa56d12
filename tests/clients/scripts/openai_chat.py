"""Chat and completions by the openai package: plain, streamed, async, raw, counted, with logprobs, and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

CAPITAL: Any = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Name the capital of France."},
]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as made:
        yield made


def test_a_chat(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=40)
    assert completion.object == "chat.completion" and completion.model == model
    message = completion.choices[0].message
    assert message.role == "assistant" and "Paris" in (message.content or "")
    assert message.tool_calls is None and message.refusal is None
    assert completion.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=40)
    text = ""
    for chunk in client.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=40, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


def test_a_stream_with_usage(client: OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=CAPITAL, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    usage = chunks[-1].usage
    assert usage is not None and chunks[-1].choices == []
    assert usage.completion_tokens <= 8 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_sandbox_that_gathers_a_stream(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=CAPITAL, temperature=0, max_tokens=40) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in (final.choices[0].message.content or "")


def test_a_conversation_goes_on(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=40)
    messages = [*CAPITAL, first.choices[0].message, {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
    assert second.choices[0].message.content
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 0


def test_parts_of_text_and_a_developer(client: OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": [{"type": "text", "text": "Name the capital of France."}]},
    ]
    parts = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
    plain = client.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=40)
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_logprobs(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.create(
        model=model, messages=CAPITAL, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 3
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token and bytes(token.bytes or []).decode() == token.token


def test_several_choices_with_stops_and_a_seed(client: OpenAI, model: str) -> None:
    def ask() -> list[str | None]:
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count: one, two, three"}],
            n=3,
            seed=7,
            stop=["\n"],
            max_completion_tokens=24,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            top_p=0.9,
            user="someone",
        )
        return [choice.message.content for choice in completion.choices]

    answers = ask()
    assert len(answers) == 3 and answers == ask() and not any("\n" in (answer or "") for answer in answers)


def test_an_async_client_asks_many(url: str, model: str) -> None:
    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key="unused") as client:

            async def one(number: int) -> str:
                text = ""
                stream = await client.chat.completions.create(
                    model=model, messages=CAPITAL, seed=number, max_tokens=16, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*map(one, range(8)))

    assert all(asyncio.run(main()))


def test_completions_and_models(client: OpenAI, model: str) -> None:
    completion = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, echo=True)
    assert completion.choices[0].text.startswith("The capital of France is")
    assert model in [each.id for each in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_raw_answers_have_a_request_id(client: OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=model, messages=CAPITAL, max_tokens=4)
    assert raw.headers["content-type"].startswith("application/json") and raw.parse().choices
    assert raw.http_response.status_code == 200


def test_a_wrong_model_and_a_wrong_field(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-99", messages=CAPITAL)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=CAPITAL, temperature=-1, max_tokens=4)
    assert refused.value.param == "temperature"
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=image)
    assert refused.value.param == "messages"
