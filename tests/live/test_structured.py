"""Answers held to a form, by the real model: over HTTP under every name, and in a program's own process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Server

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.llm.async_llm import AsyncLLM

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "founded": {"type": "string", "format": "date"}},
    "required": ["city", "founded"],
    "additionalProperties": False,
}
DATE = re.compile(r"\d{4}-\d\d-\d\d")
QUESTION = [{"role": "user", "content": "Name a city and the day it was founded, as JSON."}]


@pytest.fixture(scope="module")
def client(smollm2) -> Iterator[openai.OpenAI]:
    with (
        Server("--kv-cache-memory-bytes", "100MiB") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def is_city(text: str | None) -> bool:
    value = json.loads(text or "")
    return list(value) == ["city", "founded"] and DATE.fullmatch(value["founded"]) is not None


def ask(client: openai.OpenAI, temperature: float = 0, **fields: Any) -> str:
    body = {key: fields.pop(key) for key in list(fields) if key not in ("response_format", "stream", "n")}
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=temperature, seed=5, max_tokens=200, extra_body=body, **fields
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}}, is_city),
    ({"structured_outputs": {"json": json.dumps(CITY), "disable_any_whitespace": True}}, is_city),
    ({"guided_json": CITY}, is_city),
    ({"json_schema": CITY}, is_city),
    ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, lambda text: text in ("Rome", "Oslo")),
    ({"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}, \d{4}"}}, re.compile(r"[A-Z][a-z]{2,9}, [0-9]{4}").fullmatch),
    ({"grammar": 'root ::= "In " [0-9]{4} "."'}, re.compile(r"In [0-9]{4}\.").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "a" NUM\nNUM: /[0-9]{2}/'}}, re.compile("a[0-9]{2}").fullmatch),
]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("fields", "fits"), FORMS)
def test_an_answer_fits_its_form(client: openai.OpenAI, fields: dict[str, Any], fits: Any, temperature: float) -> None:
    """Greedy or drawn, what ends by itself is what was asked for."""
    assert fits(ask(client, temperature, **dict(fields)))


def test_a_streamed_answer_fits_and_equals_the_whole(client: openai.OpenAI) -> None:
    """Several choices of one call, each in its own words, stream as they are."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    settings: Any = {"model": "smollm2", "messages": QUESTION, "seed": 3, "temperature": 1, "n": 3, "max_tokens": 200}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(response_format=form, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    whole = client.chat.completions.create(response_format=form, **settings)
    assert texts == [choice.message.content for choice in whole.choices] and all(map(is_city, texts))


def test_what_cannot_be_enforced_is_a_400_that_names_it(client: openai.OpenAI) -> None:
    """Keyword and place in the message, the field as `param`; the next call is served."""
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema"
    assert "'uniqueItems' at #/properties/tags" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="line 1"):
        ask(client, grammar='root ::= "a')
    assert is_city(ask(client, guided_json=CITY))


def test_a_program_of_ones_own_asks_in_the_same_words(smollm2) -> None:
    """LLM and AsyncLLM take vLLM's structured_outputs, for all prompts or one each."""
    greedy = SamplingParams(temperature=0, max_tokens=100)
    with LLM(str(smollm2), kv_cache_memory_bytes=100 * 2**20) as llm:
        assert is_city(llm.chat(QUESTION, greedy, structured_outputs={"json": CITY})[0].text)
        wanted = [{"choice": ["Rome", "Oslo"]}, None, {"regex": "[0-9]{3}"}]
        one, free, other = llm.generate(["A city: "] * 3, greedy, structured_outputs=wanted)
        assert one.text in ("Rome", "Oslo") and len(free.text) > 10 and re.fullmatch("[0-9]{3}", other.text)
        streamed = "".join(piece.text for piece in llm.stream(QUESTION, greedy, structured_outputs={"json": CITY}))
        assert is_city(streamed)
        with pytest.raises(InvalidRequest, match="'contains' at #"):
            llm.generate("x", structured_outputs={"json": {"type": "array", "contains": {}}})
        with pytest.raises(InvalidRequest, match="2 prompts came with 1"):
            llm.generate(["x", "y"], structured_outputs=[{"regex": "a"}])

    async def answer() -> str:
        async with AsyncLLM(str(smollm2), kv_cache_memory_bytes=100 * 2**20) as llm:
            last = ""
            async for output in llm.generate(QUESTION, greedy, structured_outputs={"json": CITY}):
                last = output.text
            return last

    assert is_city(asyncio.run(answer()))
