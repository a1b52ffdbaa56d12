"""The llm command, with a server named in extra-openai-models.yaml, and its Python interface."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import llm
import pytest
from click.testing import CliRunner
from llm.cli import cli

FOLDER = Path(os.environ["LLM_USER_PATH"])


@pytest.fixture(scope="module", autouse=True)
def configured(url: str, model: str) -> Iterator[None]:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {model}\n  api_base: {url}\n  supports_tools: true\n  supports_schema: true\n"
        f"- model_id: text\n  model_name: {model}\n  api_base: {url}\n  completion: true\n"
    )
    yield


def command(*args: str) -> str:
    ran = CliRunner().invoke(cli, list(args))
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_prompt_from_the_command_line() -> None:
    options = ("-o", "temperature", "0", "-o", "max_tokens", "30")
    streamed = command("-m", "ours", *options, "Name the capital of France.")
    assert "Paris" in streamed
    assert command("-m", "ours", "--no-stream", *options, "Name the capital of France.") == streamed


def test_a_conversation_goes_on_from_its_log() -> None:
    command("-m", "ours", "-s", "You are helpful.", "-o", "max_tokens", "8", "My name is Ada.")
    assert command("-c", "-o", "max_tokens", "8", "What is my name?").strip()


def test_a_base_model() -> None:
    assert command("-m", "text", "-o", "max_tokens", "8", "The capital of France is").strip()


def test_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = command("-m", "ours", "--schema", json.dumps(schema), "-o", "max_tokens", "80", "Invent a dog.")
    assert set(json.loads(answer)) == {"name", "age"}


def test_a_tool_from_python() -> None:
    def upper(text: str) -> str:
        """Convert text to upper case."""
        return text.upper()

    response = llm.get_model("ours").prompt("Convert panda to upper case.", tools=[upper], max_tokens=60)
    assert response.text() or response.tool_calls()
    for result in response.execute_tool_calls() if response.tool_calls() else []:
        assert result.name == "upper"
