"""What vLLM adds to OpenAI's API, by extra_body and extra paths, as its documentation shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 20},
        "model": {"type": "string", "maxLength": 20},
        "car_type": {"type": "string", "enum": ["sedan", "SUV", "Truck", "Coupe"]},
    },
    "required": ["brand", "model", "car_type"],
    "additionalProperties": False,
}
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="unused") as made:
        yield made


def ask(client: OpenAI, model: str, text: str, **extra: Any) -> str:
    completion = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=150, extra_body=extra
    )
    return completion.choices[0].message.content or ""


@pytest.mark.parametrize("older", [False, True])
def test_choices(client: OpenAI, model: str, older: bool) -> None:
    wanted = ["positive", "negative"]
    extra: Any = {"guided_choice": wanted} if older else {"structured_outputs": {"choice": wanted}}
    assert ask(client, model, "Classify this sentiment: vLLM is wonderful!", **extra) in wanted


@pytest.mark.parametrize("older", [False, True])
def test_a_regular_expression(client: OpenAI, model: str, older: bool) -> None:
    pattern = r"[a-z]{2,12}@[a-z]{2,12}\.com"
    extra: Any = {"guided_regex": pattern} if older else {"structured_outputs": {"regex": pattern}}
    assert re.fullmatch(pattern, ask(client, model, "Invent the email address of Alan Turing.", **extra))


@pytest.mark.parametrize("older", [False, True])
def test_a_schema(client: OpenAI, model: str, older: bool) -> None:
    extra: Any = {"guided_json": CAR} if older else {"structured_outputs": {"json": CAR}}
    jsonschema.validate(
        json.loads(ask(client, model, "Describe the most iconic car of the 90s as JSON.", **extra)), CAR
    )


@pytest.mark.parametrize("older", [False, True])
def test_a_grammar(client: OpenAI, model: str, older: bool) -> None:
    extra: Any = {"guided_grammar": SQL} if older else {"structured_outputs": {"grammar": SQL}}
    answer = ask(client, model, "Write an SQL query that shows col_1 of table_1.", **extra)
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", answer)


def test_a_structural_tag(client: OpenAI, model: str) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<function=get_weather>", "schema": CAR, "end": "</function>"}],
        "triggers": ["<function="],
    }
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Say hello."}],
        temperature=0,
        max_tokens=20,
        response_format=tag,  # type: ignore[arg-type]
    )
    assert completion.choices[0].message.content


def test_samplers_of_vllm(client: OpenAI, model: str) -> None:
    settings: Any = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "stop_token_ids": [0], "ignore_eos": False}
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=8,
        seed=1,
        extra_body=settings | {"min_tokens": 4, "skip_special_tokens": True, "priority": 1, "cache_salt": "mine"},
    )
    assert completion.usage is not None and completion.usage.completion_tokens >= 4


def test_an_answer_is_begun_by_the_caller(client: OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "user", "content": "Name the capital of France."},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    completion = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=4,
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    )
    assert "Paris" in (completion.choices[0].message.content or "")


def test_token_ids_in_and_out(client: OpenAI, model: str, root: str) -> None:
    found = client.post(f"{root}/tokenize", body={"model": model, "prompt": "The capital of France is"}, cast_to=object)
    assert isinstance(found, dict) and found["count"] == len(found["tokens"])
    completion = client.completions.create(
        model=model, prompt=found["tokens"], max_tokens=4, extra_body={"return_token_ids": True}
    )
    extra = completion.choices[0].model_extra or {}
    assert extra["prompt_token_ids"] == found["tokens"] and len(extra["token_ids"]) <= 4
    back = client.post(f"{root}/detokenize", body={"model": model, "tokens": found["tokens"]}, cast_to=object)
    assert isinstance(back, dict) and back["prompt"] == "The capital of France is"


def test_logprobs_of_prompts(client: OpenAI, model: str) -> None:
    completion = client.completions.create(
        model=model, prompt="One two three", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    logprobs = (completion.choices[0].model_extra or {})["prompt_logprobs"]
    assert logprobs[0] is None and all(len(each) >= 1 for each in logprobs[1:])


def test_settings_of_the_template(client: OpenAI, model: str) -> None:
    plain = ask(client, model, "Hello!")
    assert ask(client, model, "Hello!", chat_template_kwargs={"enable_thinking": False}) == plain


def test_beams(client: OpenAI, model: str) -> None:
    completion = client.completions.create(
        model=model,
        prompt="The capital of France is",
        n=2,
        temperature=0,
        max_tokens=6,
        extra_body={"use_beam_search": True, "length_penalty": 1.0},
    )
    assert len({choice.text for choice in completion.choices}) == 2


def test_bad_constraints_are_refused_by_name(client: OpenAI, model: str) -> None:
    for extra in (
        {"structured_outputs": {"regex": "(unclosed"}},
        {"structured_outputs": {"grammar": "root ::= nowhere"}},
        {"structured_outputs": {"json": CAR, "regex": "a"}},
        {"guided_choice": []},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, model, "Hello!", **extra)
        assert next(iter(extra)) in f"{refused.value.param} {refused.value}"
