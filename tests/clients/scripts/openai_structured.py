"""Structured output by the openai package: models of pydantic, schemas, JSON objects, streamed, refused by place."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CalendarEvent(Strict):
    name: str = Field(max_length=30)
    date: str = Field(max_length=20)
    participants: list[Literal["Alice", "Bob", "Carol"]] = Field(max_length=3)


class Step(Strict):
    explanation: str = Field(max_length=40)
    output: str = Field(max_length=20)


class MathReasoning(Strict):
    steps: list[Step] = Field(max_length=2)
    final_answer: str = Field(max_length=20)


class Kind(enum.StrEnum):
    div = "div"
    button = "button"


class UI(Strict):
    type: Kind
    label: str = Field(max_length=20)
    children: list[UI] = Field(max_length=1)


EVENT: Any = [
    {"role": "system", "content": "Extract the event information."},
    {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as made:
        yield made


def schema_of(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_is_parsed(client: OpenAI, model: str, temperature: float) -> None:
    completion = client.chat.completions.parse(
        model=model,
        messages=EVENT,
        response_format=CalendarEvent,
        temperature=temperature,
        seed=1,
        max_tokens=200,
    )
    assert isinstance(completion.choices[0].message.parsed, CalendarEvent)


def test_nested_models(client: OpenAI, model: str) -> None:
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "How can I solve 8x + 7 = -23?"}],
        response_format=MathReasoning,
        temperature=0,
        max_tokens=400,
    )
    assert isinstance(completion.choices[0].message.parsed, MathReasoning)


def test_a_schema_that_refers_to_itself(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Make a small form."}],
        response_format=schema_of(UI.model_json_schema()),
        temperature=0,
        max_tokens=200,
    )
    if answer.choices[0].finish_reason == "stop":
        UI.model_validate_json(answer.choices[0].message.content or "")


def test_a_schema_of_many_kinds(client: OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 99},
            "state": {"enum": ["on", "off", None]},
            "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["id", "state", "size", "code", "day"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model, messages=EVENT, response_format=schema_of(schema), temperature=0, max_tokens=200
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    assert list(value) == ["id", "state", "size", "code", "day"]


def test_a_streamed_schema(client: OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=EVENT, response_format=CalendarEvent, temperature=0, max_tokens=200
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, CalendarEvent)


def test_a_json_object(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Answer in JSON with the key city: name the capital of France."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_plain_text_is_a_format_too(client: OpenAI, model: str) -> None:
    settings: Any = {"model": model, "messages": EVENT, "temperature": 0, "max_tokens": 10}
    told = client.chat.completions.create(response_format={"type": "text"}, **settings)
    assert told.choices[0].message.content == client.chat.completions.create(**settings).choices[0].message.content


def test_several_choices_and_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=EVENT,
        response_format=schema_of({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
                                   "additionalProperties": False}),
        n=3,
        seed=3,
        logprobs=True,
        max_tokens=60,
    )  # fmt: skip
    assert len(answer.choices) == 3
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content or "")["yes"], bool)
        assert choice.logprobs is not None and choice.logprobs.content


def test_an_answer_that_is_cut_says_so(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=EVENT, response_format=CalendarEvent, temperature=0, max_tokens=3
        )


def test_what_is_wrong_is_named(client: OpenAI, model: str) -> None:
    def refused(form: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=model, messages=EVENT, response_format=form, max_tokens=4)
        return error.value

    for form in (
        {"type": "yaml"},
        {"type": "json_schema"},
        schema_of({"type": "strange"}),
        schema_of({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
    ):
        error = refused(form)
        assert "response_format" in f"{error.param} {error}"
