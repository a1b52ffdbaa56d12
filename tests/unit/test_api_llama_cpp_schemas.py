"""Schemas as llama.cpp reads them: objects have the properties that they list."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from tokenmill.api.llama_cpp import closed

STRING = {"type": "string"}


def test_objects_that_list_their_properties_are_closed_wherever_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"properties": {"b": STRING}},
            "c": {"type": "array", "items": {"$ref": "#/$defs/d"}},
            "e": {"anyOf": [{"type": "object", "properties": {}}, {"type": "null"}]},
        },
        "$defs": {"d": {"type": "object", "properties": {"f": STRING}}},
    }
    found = closed(schema)
    for data in ({}, {"a": {"b": ""}}, {"c": [{"f": ""}]}, {"e": None}):
        jsonschema.validate(data, found)
    for data in ({"x": 1}, {"a": {"x": 1}}, {"c": [{"x": 1}]}, {"e": {"x": 1}}):
        jsonschema.validate(data, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": STRING}, "additionalProperties": True},
        {"properties": {"a": STRING}, "patternProperties": {"^x": STRING}},
        {"allOf": [{"properties": {"a": STRING}}, {"properties": {"b": STRING}}]},
        {"properties": {"a": STRING}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"const": {"properties": {}}},
        {"enum": [{"properties": {}}]},
        True,
        5,
    ],
)
def test_what_says_otherwise_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


def test_a_property_may_be_called_properties() -> None:
    schema = {"type": "object", "properties": {"properties": {"type": "object"}}}
    assert closed(schema) == schema | {"additionalProperties": False}
