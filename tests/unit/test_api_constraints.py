"""What bodies say of the form of an answer, under every server's names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.api.call import Call
from tokenmill.api.openai.parse import parse_chat, parse_completion
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.grammar.constraint import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


def chat(body: dict[str, Any]) -> Call:
    return parse_chat({"messages": [{"role": "user", "content": "x"}], **body}, Rules(100))[0]


TAKEN: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"grammar": "", "regex": "", "json_schema": None, "grammar_lazy": False, "grammar_triggers": []}, None),
    ({"response_format": {"type": "json_object"}}, Constraint("json_object", None, "response_format.schema")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Constraint("json_schema", SCHEMA, "response_format.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        Constraint("json_schema", SCHEMA, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        Constraint("json_schema", SCHEMA, "response_format.schema"),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS}},
        Constraint("structural_tag", TAGS, "response_format"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", SCHEMA, "structured_outputs.json")),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        Constraint("json_schema", SCHEMA, "structured_outputs.json"),
    ),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Constraint("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a"]}}, Constraint("choice", ["a"], "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "root ::= x"}}, Constraint("gbnf", "root ::= x", "structured_outputs.grammar")),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Constraint("json_object", None, "structured_outputs.json_object", ""),
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAGS), "whitespace_pattern": " ?"}},
        Constraint("structural_tag", TAGS, "structured_outputs.structural_tag", " ?"),
    ),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": "", "guided_decoding_backend": "xgrammar"},
        Constraint("json_schema", SCHEMA, "guided_json", ""),
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"(?:\s| [\s ]{1,2}|[ \t]\n)*"}},
        Constraint("json_schema", SCHEMA, "structured_outputs.json", r"(?:[ \t\n\r]| [ \t\n\r]{1,2}|[ \t]\n)*"),
    ),
    ({"guided_regex": "a"}, Constraint("regex", "a", "guided_regex")),
    ({"guided_choice": ["a", "b"]}, Constraint("choice", ["a", "b"], "guided_choice")),
    ({"guided_grammar": "root ::= x"}, Constraint("gbnf", "root ::= x", "guided_grammar")),
    ({"grammar": "root ::= x"}, Constraint("gbnf", "root ::= x", "grammar")),
    ({"json_schema": SCHEMA}, Constraint("json_schema", SCHEMA, "json_schema")),
    ({"json_schema": json.dumps(SCHEMA)}, Constraint("json_schema", SCHEMA, "json_schema")),
    ({"regex": "a"}, Constraint("regex", "a", "regex")),
    ({"ebnf": "root ::= x"}, Constraint("gbnf", "root ::= x", "ebnf")),
    ({"grammar": {"type": "json", "value": SCHEMA}}, Constraint("json_schema", SCHEMA, "grammar.value")),
    ({"grammar": {"type": "regex", "value": "a"}}, Constraint("regex", "a", "grammar.value")),
]


@pytest.mark.parametrize(("body", "wanted"), TAKEN)
def test_every_name_gives_its_constraint(body: dict[str, Any], wanted: Constraint | None) -> None:
    """Chat and completions read the same fields, and none of them is left as unknown."""
    assert chat(body).constraint == wanted
    call, unknown = parse_completion({"prompt": "x", **body}, Rules(100))
    assert call.constraint == wanted and unknown == []


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json"}}, "response_format.type", "one of"),
    ({"response_format": {}}, "response_format.type", "one of"),
    ({"response_format": "json"}, "response_format", "an object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stritc": True}}},
        "response_format.json_schema.stritc",
        "strict",
    ),
    ({"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema", "schema"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format", "structures"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "not known"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "a JSON schema"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "structured_outputs.regex and",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": 1}},
        "structured_outputs.whitespace_pattern",
        "a string",
    ),
    *(
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": odd}},
            "structured_outputs.whitespace_pattern",
            "alone",
        )
        for odd in ["x*", "[ -~]", "[^a]", "[ +]", r"\x20", ".", r"[\S]", "[]", "(?i: )"]
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": "a"}, "guided_whitespace_pattern", "alone"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "whitespace_pattern": " "}},
        "structured_outputs.disable_any_whitespace",
        "contradict",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "in the schema",
    ),
    (
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        "guided_json",
        "response_format.schema and guided_json",
    ),
    ({"grammar": "root ::= x", "json_schema": SCHEMA}, "json_schema", "grammar and json_schema"),
    ({"grammar": "root ::= x", "grammar_lazy": True}, "grammar_lazy", "not supported"),
    ({"grammar": {"type": "bnf", "value": "x"}}, "grammar.type", "one of"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED)
def test_contradictions_and_mistakes_name_their_fields(body: dict[str, Any], param: str, words: str) -> None:
    """A body that cannot be followed says which field is at fault, and both of two that contradict each other."""
    with pytest.raises(InvalidRequest) as caught:
        chat(body)
    assert caught.value.param == param and words in caught.value.message
