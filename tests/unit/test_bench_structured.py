"""bench structured: schemas taken and refused, data replayed, answers judged."""

from __future__ import annotations

import argparse
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer

from tokenmill.bench.structured import answers as gaps
from tokenmill.bench.structured.answers import Answer, Case, judge, misfit, read_cases
from tokenmill.bench.structured.command import add_arguments, measure
from tokenmill.bench.structured.replay import OutOfBudget, Replay, Speller, take
from tokenmill.core.errors import ConfigError, InvalidRequest, Unavailable
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.text_model import TextModel

PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
DATA = next(
    (
        path
        for folder in Path(__file__).parents
        if (path := folder / "shared/data/prompts/json_schema_bench.jsonl.gz").exists()
    ),
    None,
)


def speller(schema: Any) -> Speller:
    return Speller(to_grammar(Constraint("json_schema", schema, "p")), schema)


def replay() -> Replay:
    tokenizer = byte_tokenizer()
    return Replay(tokenizer, (tokenizer.vocab_size - 2,))


def test_keys_are_put_in_the_order_that_the_grammar_takes() -> None:
    """Named properties first and in their order, whatever order the data has; nothing where no order will do."""
    assert speller(PAIR).spell({"c": [1, {}], "b": "x", "a": 1}, 100) == '{"a":1,"b":"x","c":[1,{}]}'
    assert speller(PAIR).spell({"b": "x"}, 100) is None
    assert speller(PAIR).spell({"a": 1.5}, 100) is None
    either = {
        "anyOf": [{"required": ["y", "x"], "properties": {"y": {"const": 1}}}, {"properties": {"x": {"const": 2}}}]
    }
    assert speller(either).spell({"x": 3, "y": 1}, 100) == '{"y":1,"x":3}'
    with pytest.raises(OutOfBudget):
        speller({"additionalProperties": {"type": "null"}}).spell({**dict.fromkeys("abcdefgh"), "i": 1}, 50)


def test_replay_tells_right_from_wrong() -> None:
    """Against a grammar that is the schema's own there is no error; against others both kinds are found."""
    tests = (({"b": "x", "a": 1}, True), ({"a": 1}, True), ({"a": "x"}, False), ({}, False))
    case = Case("pair", PAIR, tests)
    figures, taken = take([case, Case("no", {"type": "array", "uniqueItems": True}, ())])
    assert figures["num_taken"] == 1 and figures["refused_by_keyword"] == {"uniqueItems": 1}
    assert replay().run(taken)["counts"] == {"invalid refused": 2, "valid taken in another order": 1, "valid taken": 1}
    loose = to_grammar(Constraint("json_schema", {"type": "object"}, "p"))
    tight = to_grammar(Constraint("json_schema", {"const": {"a": 1}}, "p"))
    assert [error["what"] for error in replay().run([(case, loose)])["errors"]] == ["invalid taken"] * 2
    assert [error["test"] for error in replay().run([(case, tight)])["errors"]] == [0]


def test_answers_are_judged_by_how_they_ended() -> None:
    """Only what ended by itself must fit."""
    cases = [Case(str(number), PAIR, ()) for number in range(4)]
    answers = [
        Answer('{"a":1}', "stop", 5),
        Answer('{"a', "length", 9),
        Answer('{"a":"x"}', "stop", 6),
        Answer("no", "refused", 0),
    ]
    figures = judge(cases, answers, 2.0)
    assert figures["by_finish_reason"] == {"stop": 2, "length": 1, "refused": 1} and figures["tokens_per_s"] == 10
    assert [row["name"] for row in figures["misfits"]] == ["2"] and figures["misfits"][0]["why"].startswith("type:")
    assert [row["name"] for row in figures["failures"]] == ["3"]


def test_fitting_includes_formats_and_exact_multiples() -> None:
    assert misfit({"format": "date"}, '"2023-02-29"') and not misfit({"format": "date"}, '"2024-02-29"')
    assert not misfit({"multipleOf": 0.1}, "0.6") and misfit({"multipleOf": 0.1}, "0.65")
    assert misfit({}, "{").startswith("not JSON")


def test_cases_are_read_from_lines_and_spread(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl.gz"
    rows = [{"name": str(n), "schema": {}, "tests": [{"data": n, "valid": True}]} for n in range(10)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert [case.name for case in read_cases(path, 5)] == ["0", "2", "4", "6", "8"]
    (tmp_path / "bad.jsonl").write_text('{"name": 1}')
    with pytest.raises(ConfigError, match="a line has no 'schema'"):
        read_cases(tmp_path / "bad.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no schemas"):
        read_cases(tmp_path / "empty.jsonl")


class Others:
    """A server whose streams last until grammars that explode of both kinds have ended."""

    model = "m"

    def __init__(self, num_bombs: int) -> None:
        self.num_bombs, self.bombs, self.streams = num_bombs, [], []
        self.is_enough = threading.Event()

    def stream(self, path: str, body: dict[str, Any]) -> list[float]:
        self.streams.append(body)
        assert len(self.streams) <= gaps.NUM_OTHERS or self.is_enough.wait(60)
        return [1.0, 1.5, 1.75]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bombs.append(body["guided_regex"])
        if len(self.bombs) >= 2 * self.num_bombs:
            self.is_enough.set()
        ends = {"a": InvalidRequest("too large"), "b": Unavailable("does not answer")}
        letter = body["guided_regex"][1]
        if letter in ends:
            raise ends[letter]
        return {}


def test_gaps_of_others_are_measured_without_and_with_grammars_that_explode() -> None:
    """Half of the others are held to a schema; each pattern is new, and some explode at once, some later."""
    others = Others(3)
    without, beside = gaps.measure_gaps(others, 3, 20, 0)  # type: ignore[arg-type]
    assert (without["num_bombs"], without["bombs_ended_as"]) == (0, {})
    assert beside["num_bombs"] == 3 and sum(beside["bombs_ended_as"].values()) == len(others.bombs) >= 6
    assert set(beside["bombs_ended_as"]) == {"refused", "failed", "answered"}
    assert len(set(others.bombs)) == len(others.bombs)
    assert {pattern[0] for pattern in others.bombs} == {"[", "("}
    for row in (without, beside):
        assert row["num_gaps"] == 2 * gaps.NUM_OTHERS and (row["p50_s"], row["p99_s"], row["max_s"]) == (0.25, 0.5, 0.5)
    assert len(others.streams) == 2 * gaps.NUM_OTHERS and all(body["ignore_eos"] for body in others.streams)
    assert sum("guided_json" in body for body in others.streams) == gaps.NUM_OTHERS


def test_gaps_need_a_server() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="--url"):
        measure(parser.parse_args(["--data", "none", "--bombs", "8"]), lambda: pytest.fail("nothing is loaded"))


@pytest.mark.skipif(DATA is None, reason="the schemas of JSONSchemaBench are not here")
def test_a_sample_of_real_schemas_is_enforced() -> None:
    """Of schemas that people wrote most are taken, every refusal names its keyword, and no datum is judged wrong."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--data", str(DATA), "--limit", "120"])
    tokenizer = byte_tokenizer()
    result = measure(args, lambda: TextModel(tokenizer, None, (tokenizer.vocab_size - 2,), None, 100))
    assert result["taken"]["num_taken"] >= 90 and not result["taken"]["refused_without_keyword"]
    assert result["replay"]["num_tests"] > 250 and not result["replay"]["errors"]
