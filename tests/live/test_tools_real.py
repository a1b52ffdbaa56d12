"""Calls demanded of a real model: whatever it draws, what ends by itself parses and fits its schema, streams too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from live.serving import Server
from tokenmill.cli.main import main

pytestmark = pytest.mark.slow

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 30},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "ship", "car"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}, "maxItems": 2},
    },
    "required": ["city", "days", "by"],
    "$defs": {"stop": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}},
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 40}, "on": {"type": "string", "format": "date"}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"plan_trip": TRIP, "take_note": NOTE}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED = ["Plan a trip to Oslo for three days by train.", "Note that the meeting is on May 6th 2027.", "Hello!"]
BFCL = next(
    (file for folder in Path(__file__).parents if (file := folder / "shared/data/prompts/bfcl.jsonl.gz").exists()), None
)
FAMILIES = ["json", "hermes", "llama3_json", "mistral", "granite", "deepseek_v3", "qwen3_coder"]


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[openai.OpenAI]:
    with Server() as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, text: str, choice: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=200,
        temperature=1.0,
        **more,
    )


def check(choice: Any) -> int:
    """The calls of an answer that ended by itself; 0 where it was cut off."""
    if choice.finish_reason == "length":
        return 0
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    for call in choice.message.tool_calls:
        validator = jsonschema.Draft202012Validator(
            SCHEMAS[call.function.name], format_checker=jsonschema.FormatChecker()
        )
        validator.validate(json.loads(call.function.arguments))
    return len(choice.message.tool_calls)


def test_required_and_named_calls_fit(client: openai.OpenAI) -> None:
    num_calls = 0
    for seed, text in enumerate(ASKED * 3):
        num_calls += check(ask(client, text, "required", seed=seed).choices[0])
        named = ask(client, text, {"type": "function", "function": {"name": "take_note"}}, seed=seed).choices[0]
        assert check(named) == 1 and named.message.tool_calls[0].function.name == "take_note"
        num_calls += 1
    assert num_calls >= 12


def test_stop_strings_do_not_cut_calls_that_are_demanded(client: openai.OpenAI) -> None:
    """Those that every call has in it, and its marks: the same tokens, to the same end."""
    for choice in ("required", {"type": "function", "function": {"name": "take_note"}}):
        for seed in range(3):
            plain = ask(client, ASKED[0], choice, seed=seed).choices[0]
            stopped = ask(client, ASKED[0], choice, seed=seed, stop=['"', "}", "\n", "<tool_call>"]).choices[0]
            assert check(stopped) == check(plain) and stopped.finish_reason == plain.finish_reason


@pytest.mark.skipif(BFCL is None, reason="no questions of BFCL beside this checkout")
@pytest.mark.parametrize(("choice", "num_fits"), [("required", 3), ("named", 8)])
def test_calls_demanded_of_published_questions_fit(
    client: openai.OpenAI, choice: str, num_fits: int, tmp_path: Path
) -> None:
    """None is refused, every answer that ends by itself fits its schema, and enough of them end."""
    out = tmp_path / "result.json"
    command = ["bench", "tools", "--url", str(client.base_url.copy_with(path="")), "--data", str(BFCL), "--limit", "12"]
    assert main([*command, "--choice", choice, "--max-tokens", "200", "--json", str(out)]) == 0
    counts = json.loads(out.read_text())["counts"]
    assert counts["refused"] == 0 and counts["fits"] >= num_fits and counts["fits"] + counts["length"] == 12


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client, ASKED[0], "required", seed=7).choices[0].message.tool_calls
    names, texts = [], []
    for chunk in ask(client, ASKED[0], "required", seed=7, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                names.append(call.function.name)
                texts.append("")
            texts[call.index] += call.function.arguments or ""
    assert [(call.function.name, call.function.arguments) for call in whole] == list(zip(names, texts, strict=True))


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_every_familys_form_can_be_demanded(smollm2: Path, family: str) -> None:
    """Of a model that was trained for none of them; marks are text where its vocabulary has no such token."""
    with Server("--tool-call-parser", family) as server:
        body = {
            "messages": [{"role": "user", "content": ASKED[0]}],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "take_note"}},
            "max_tokens": 200,
        }
        status, text = server.request("POST", "/v1/chat/completions", body)
        assert status == 200, text
        (choice,) = json.loads(text)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "take_note"
        jsonschema.validate(json.loads(call["function"]["arguments"]), NOTE)
