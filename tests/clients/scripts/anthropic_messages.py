"""Messages by the anthropic package: whole, streamed, gathered, async, continued, counted, listed and refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

CAPITAL: Any = [{"role": "user", "content": "Name the capital of France."}]

GREEDY = {"temperature": 0}
"""Samplers left the package's own arguments; the API has them still."""


@pytest.fixture(scope="module")
def client(root: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=root, api_key="unused") as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_batch(client: Anthropic, model: str) -> None:
    """Made, listed, waited for, read and forgotten as the documentation shows it."""
    params: Any = {"model": model, "max_tokens": 20, "messages": CAPITAL}
    made = client.messages.batches.create(
        requests=[{"custom_id": f"call-{number}", "params": params} for number in range(2)]
    )
    assert made.id in [each.id for each in client.messages.batches.list(limit=1)]
    while (batch := client.messages.batches.retrieve(made.id)).processing_status != "ended":
        time.sleep(0.1)
    assert batch.request_counts.succeeded == 2 and batch.ended_at is not None
    found = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
    assert set(found) == {"call-0", "call-1"}
    assert all(each.type == "succeeded" and text_of(each.message) for each in found.values())
    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.cancel(made.id)


def test_a_message(client: Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=40, messages=CAPITAL, extra_body=GREEDY)
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert "Paris" in text_of(message) and message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.output_tokens > 0 and message.id.startswith("msg_")


def test_events_of_a_stream(client: Anthropic, model: str) -> None:
    whole = client.messages.create(model=model, max_tokens=40, messages=CAPITAL, extra_body=GREEDY)
    text, kinds = "", []
    for event in client.messages.create(model=model, max_tokens=40, messages=CAPITAL, extra_body=GREEDY, stream=True):
        kinds.append(event.type)
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
    assert text == text_of(whole) and kinds[0] == "message_start" and kinds[-1] == "message_stop"


def test_the_sandbox_that_gathers_a_stream(client: Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=40, messages=CAPITAL, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(final) == text and final.usage.output_tokens > 1 and final.stop_reason == "end_turn"


def test_an_async_client(root: str, model: str) -> None:
    async def main() -> str:
        async with (
            AsyncAnthropic(base_url=root, api_key="unused") as client,
            client.messages.stream(model=model, max_tokens=16, messages=CAPITAL) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(main())


def test_a_system_prompt_as_text_and_as_blocks(client: Anthropic, model: str) -> None:
    system = "You are a pirate."
    plain = client.messages.create(model=model, max_tokens=12, system=system, messages=CAPITAL, extra_body=GREEDY)
    blocks = client.messages.create(
        model=model,
        max_tokens=12,
        system=[{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": CAPITAL[0]["content"]}]}],
        extra_body=GREEDY,
    )
    assert text_of(plain) == text_of(blocks)


def test_a_conversation_and_words_put_in_its_mouth(client: Anthropic, model: str) -> None:
    first = client.messages.create(model=model, max_tokens=40, messages=CAPITAL, extra_body=GREEDY)
    turns = [*CAPITAL, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
    assert text_of(client.messages.create(model=model, max_tokens=20, messages=turns))
    opened = [*CAPITAL, {"role": "assistant", "content": "The capital of France is the city of"}]
    assert "Paris" in text_of(client.messages.create(model=model, max_tokens=6, messages=opened, extra_body=GREEDY))


def test_stop_sequences_and_samplers(client: Anthropic, model: str) -> None:
    message = client.messages.create(
        model=model,
        max_tokens=60,
        messages=[{"role": "user", "content": "Write the numbers from 1 to 9, with commas."}],
        stop_sequences=[","],
        extra_body={"top_k": 5, "top_p": 0.9, "temperature": 0.7},
        metadata={"user_id": "someone"},
    )
    assert "," not in text_of(message) and message.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
    if message.stop_reason == "stop_sequence":
        assert message.stop_sequence == ","
    short = client.messages.create(model=model, max_tokens=2, messages=CAPITAL)
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 2


def test_tokens_are_counted(client: Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=CAPITAL, system="Be brief.")
    message = client.messages.create(model=model, max_tokens=1, messages=CAPITAL, system="Be brief.")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(client: Anthropic, model: str) -> None:
    assert model in [each.id for each in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_refusals_are_the_packages_own(client: Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-99", max_tokens=4, messages=CAPITAL)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=model, max_tokens=4, messages=CAPITAL, extra_body={"temperature": -1})
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "temperature" in body["error"]["message"]
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model=model, max_tokens=4, messages=[{"role": "user", "content": [image]}])
