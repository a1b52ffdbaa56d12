"""The llm command with a server of OpenAI's protocol named in its extra-openai-models.yaml."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
