"""bench tools: questions are read as their publisher writes them, and what is counted is what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted import Served, make_text_model
from tokenmill.bench.tools import Case, is_right, read_cases
from tokenmill.cli.main import main
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError

ROW: dict[str, Any] = {
    "id": "one",
    "category": "simple",
    "question": [[{"role": "user", "content": "Add 1 and 2."}]],
    "function": [
        {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "dict",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "float"},
                    "how": {"type": "string", "enum": ["dict"]},
                    "c": {"type": "any"},
                },
                "required": ["a"],
            },
        }
    ],
    "ground_truth": [{"add": {"a": [1], "b": [2, "2"], "how": ["", "now here"]}}],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(ROW | {"id": str(number)}) + "\n" for number in range(4)))
    return file


def test_questions_are_read_with_schemas_that_are_json_schemas(data: Path) -> None:
    case = read_cases(data, None, 0)[0]
    parameters = case.schemas["add"]
    assert parameters["type"] == "object" and parameters["properties"]["b"] == {"type": "number"}
    assert parameters["properties"]["how"]["enum"] == ["dict"] and parameters["properties"]["c"] == {}
    assert case.answers == [("add", {"a": [1], "b": [2, "2"], "how": ["", "now here"]})]
    assert [case.id for case in read_cases(data, 2, 1)] == [case.id for case in read_cases(data, 2, 1)]
    data.write_text("{}")
    with pytest.raises(ConfigError, match="questions with functions: a line has no 'function'"):
        read_cases(data, None, 0)
    data.write_text("\n")
    with pytest.raises(ConfigError, match="has no questions"):
        read_cases(data, None, 0)


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([("add", {"a": 1, "b": 2})], True),
        ([("add", {"a": 1, "b": 2.0, "how": "Now, here!"})], True),
        ([("add", {"a": 2, "b": 2})], False),
        ([("add", {"a": True, "b": 2})], False),
        ([("add", {"a": 1})], False),
        ([("add", {"a": 1, "b": 2, "d": 3})], False),
        ([("sub", {"a": 1, "b": 2})], False),
        ([("add", {"a": 1, "b": 2})] * 2, False),
        ([], False),
    ],
)
def test_calls_are_right_if_each_argument_is_one_of_those_allowed(calls: list[Any], right: bool) -> None:
    case = Case("x", "simple", [], [], [("add", ROW["ground_truth"][0]["add"])])
    assert is_right(case, calls) is right


def test_values_within_values() -> None:
    case = Case("x", "simple", [], [], [("f", {"a": [{"b": [1, 2], "c": [""]}], "d": [["x", "Y"]]})])
    assert is_right(case, [("f", {"a": {"b": 2}, "d": ["X", "y"]})])
    assert not is_right(case, [("f", {"a": {"b": 3}, "d": ["x", "y"]})])
    assert not is_right(case, [("f", {"a": {"b": 2}, "d": ["y", "x"]})])


class Says:
    answer = ""

    def __call__(self, prompt: str) -> str:
        return self.answer


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Served, Says]]:
    says = Says()
    engine = EngineConfig(groups=full_groups(512), max_model_len=4096)
    with Served(says, text=make_text_model(), engine=engine) as running:
        yield running, says


@pytest.mark.parametrize(
    ("answer", "outcome", "right", "code"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', "fits", 4, 0),
        ('{"name": "add", "arguments": {"a": 3}}', "fits", 0, 0),
        ('{"name": "add", "arguments": {"a": "x"}}', "does not fit", 0, 1),
        ('{"name": "add", "arguments": {"a": oops}}', "malformed", 0, 1),
        ("words", "no call", 0, 1),
        ('{"name": "add", "arguments": {"a": ' + "1" * 100, "length", 0, 0),
    ],
)
def test_answers_are_counted_by_what_became_of_them(
    served: tuple[Served, Says], data: Path, tmp_path: Path, answer: str, outcome: str, right: int, code: int
) -> None:
    """The scripted model heeds no grammar, so that faults can be shown."""
    running, says = served
    says.answer = answer
    out = tmp_path / "result.json"
    command = ["bench", "tools", "--url", running.url, "--data", str(data), "--max-tokens", "80", "--json", str(out)]
    assert main(command) == code
    result = json.loads(out.read_text())
    assert {name: count for name, count in result["counts"].items() if count} == {outcome: 4}
    assert result["right"] == right and len(result["items"]) == 4
