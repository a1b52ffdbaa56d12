"""JSON schemas: what an answer may be, and what is refused by name. The library itself judges texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from tests.grammars import byte_tokenizer, schema_takes

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.grammar.rewrite import MAX_OPTIONAL
from tokenmill.text.grammar.schema import prepare

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

TAKEN: list[tuple[str, Any, list[Any], list[Any]]] = [
    (
        "object",
        PERSON,
        [{"name": "Ada", "age": 36}],
        [{"name": "Ada"}, {"name": "Ada", "age": -1}, {"name": 1, "age": 2}],
    ),
    ("true", True, [1, {"a": [None]}], []),
    ("enum", {"enum": ["a", 1, None, [True]]}, ["a", 1, None, [True]], ["b", 2, [False]]),
    ("const", {"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    ("escapes", {"const": 'q"\\\n\t/é😀'}, ['q"\\\n\t/é😀'], ["q"]),
    ("date", {"format": "date"}, ["2024-02-29", "1999-12-31", 5], ["2023-02-29", "0000-01-01", "2024-13-01", "x"]),
    ("time", {"format": "time"}, ["23:59:59Z", "00:00:00.5+01:00"], ["23:59:60Z", "24:00:00Z", "10:00:00"]),
    ("date-time", {"format": "date-time"}, ["2000-02-29T12:00:00Z"], ["1900-02-29T12:00:00Z", "2000-01-01 12:00:00Z"]),
    ("hostname", {"format": "hostname"}, ["a", "a.b-c.de", "x1"], ["-a", "a_b", "xn--x", "a..b", ""]),
    ("email", {"format": "email"}, ["a@b.c"], ["a", "@"]),
    ("uri", {"format": "uri"}, ["https://a.b/c?d#e"], ["a b", "/a"]),
    ("uri-reference", {"format": "uri-reference"}, ["/a/b?c", "a", "", "http://x/y"], ["a b", "\\"]),
    ("json-pointer", {"format": "json-pointer"}, ["", "/a~0/b~1"], ["a", "/~2"]),
    ("format and pattern", {"format": "date", "pattern": "^20"}, ["2020-01-01"], ["1990-01-01", "20"]),
    ("format of numbers", {"type": "integer", "format": "int32"}, [1], ["1"]),
    ("a set without backslash", {"type": "string", "pattern": "^[^\\\\]+$"}, ["ab\n"], ["a\\b", "\\"]),
    ("a set without quote", {"type": "string", "pattern": '^[^"]$'}, ["a", "\\"], ['"']),
    ("not required", {"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ("not type", {"not": {"type": ["object", "array", "string"]}}, [1, None, True], ["a", [], {}]),
    ("not const", {"type": "string", "not": {"const": 'a"b'}}, ["", "a", 'a"', 'a"bc', "é"], ['a"b', 1]),
    (
        "not enum",
        {"not": {"enum": ["yes", "no", 3, None, True]}},
        ["ye", "yess", 2, 3.5, False, []],
        ["yes", "no", 3, None, True],
    ),
    ("not minimum", {"not": {"minimum": 3}}, [2], [3, "a"]),
    ("not required alone", {"not": {"required": ["a"]}}, [{}], [1, [], {"a": 1}]),
    ("not minLength", {"not": {"minLength": 3}}, ["", "ab"], ["abc", 1]),
    ("not maxLength", {"not": {"maxLength": 1}}, ["ab"], ["a", 1]),
    ("not minItems", {"not": {"minItems": 2}}, [[], [1]], [[1, 2], 1]),
    ("not maxItems", {"not": {"maxItems": 1}}, [[1, 2]], [[1], 1]),
    ("not maxProperties", {"not": {"maxProperties": 0}}, [{"a": 1}], [{}, 1]),
    ("not maximum", {"not": {"maximum": 3}}, [4, 3.5], [3, "a"]),
    ("not exclusiveMinimum", {"not": {"exclusiveMinimum": 3}}, [3, 2], [4, "a"]),
    ("not exclusiveMaximum", {"not": {"exclusiveMaximum": 3}}, [3, 4], [2, "a"]),
    ("not prefixItems", {"not": {"prefixItems": [{"type": "null"}]}}, [[1], [1, 2]], [[], [None], 1]),
    ("not properties", {"not": {"properties": {"a": {"type": "null"}}}}, [{"a": 1}], [{}, {"a": None}, 1]),
    ("not anyOf", {"not": {"anyOf": [{"type": "string"}, {"minItems": 1}]}}, [[]], ["a", [1], 1]),
    ("not not", {"not": {"not": {"type": "integer"}}}, [1], ["a"]),
    (
        "not of a reference",
        {"$defs": {"a": {"required": ["x"]}}, "type": "object", "not": {"$ref": "#/$defs/a"}},
        [{}],
        [{"x": 1}],
    ),
    (
        "if then else",
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "x": {}, "y": {}},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}, {"kind": "a", "x": 1, "y": 2}],
        [{"kind": "a"}, {"kind": "a", "y": 1}, {"kind": "b", "x": 1}],
    ),
    (
        "dependentRequired",
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}, 3],
        [{"a": 1}, {"a": 1, "c": 2}],
    ),
    (
        "dependencies",
        {
            "type": "object",
            "properties": {"a": {}, "b": {}},
            "dependencies": {"a": {"properties": {"b": {"type": "null"}}}},
        },
        [{"b": 1}, {"a": 1}, {"a": 1, "b": None}],
        [{"a": 1, "b": 1}],
    ),
    (
        "oneOf that may overlap",
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ("oneOf of types", {"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    (
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^x"}},
        [{}, {"x1": 1}],
        [{"y": 1}, {"x": 1, "y": 2}],
    ),
    (
        "propertyNames of named",
        {"properties": {"x": {}, "y": {}}, "propertyNames": {"enum": ["x", "z"]}},
        [{"x": 1, "z": 2}],
        [{"y": 1}, {"a": 1}],
    ),
    (
        "propertyNames beside further properties",
        {
            "properties": {"x": {"type": "null"}},
            "additionalProperties": {"const": 1},
            "propertyNames": {"pattern": "x"},
        },
        [{"x": None, "xy": 1}],
        [{"x": 1}, {"xy": None}, {"y": 1}],
    ),
    (
        "propertyNames that are all required",
        {
            "required": ["a b"],
            "propertyNames": {"enum": ["a b", 'q"\\', 1]},
            "additionalProperties": {"type": "integer"},
        },
        [{"a b": 1}, {"a b": 1, 'q"\\': 2}],
        [{}, {"a b": "x"}, {"a b": 1, "c": 1}, {'q"\\': 2}],
    ),
    (
        "propertyNames of many",
        {"propertyNames": {"enum": [f"n {number}" for number in range(1000)]}},
        [{"n 7": 1, "n 6": 2}],
        [{"n7": 1}, {"n 1000": 1}],
    ),
    (
        "a reference to what nothing fits",
        {"anyOf": [{"$ref": "#/$defs/n", "enum": [1]}, {"const": 2}], "$defs": {"n": False}},
        [2],
        [1],
    ),
    (
        "bounds of 64 bits",
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, 2**53 + 1, -(2**62)],
        [2**63, -(2**63) - 1],
    ),
    ("bounds that floats cannot be", {"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53, 2**53 + 1 - 2]),
    (
        "an exclusive bound that floats cannot leave",
        {"type": "integer", "exclusiveMaximum": 2**53 + 4},
        [2**53 + 2],
        [2**53 + 4, 2**53 + 5],
    ),
    ("bounds of floats", {"minimum": -1.7e308, "maximum": 1.7e308}, [-1.5, 2e9], []),
    ("unevaluatedProperties alone", {"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ("idle keywords", {"uniqueItems": False, "then": False, "minContains": 2, "minLength": 1.0}, ["a", [1, 1]], [""]),
    ("draft 4 bounds", {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, [2], [1]),
    ("tuples", {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[], [1]], [["a"], [1, 2]]),
    (
        "recursion",
        {
            "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["v"], "type": "object"}},
            "$ref": "#/$defs/n",
        },
        [{"next": {"v": 1}, "v": 2}],
        [{"next": {}, "v": 1}],
    ),
    ("an anchor", {"$defs": {"n": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, [None], [1]),
    ("an id", {"$id": "http://x/y", "$defs": {"n": {"$id": "z", "type": "null"}}, "$ref": "http://x/z"}, [None], [1]),
    (
        "a property called enum",
        {"properties": {"enum": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "null"}}},
        [{"enum": None}],
        [{"enum": 1}],
    ),
    ("annotations", {"title": "t", "default": 1, "nullable": True, "x-mine": {"not": 1}, "type": "null"}, [None], [1]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), [case[1:] for case in TAKEN], ids=[case[0] for case in TAKEN])
def test_answers_are_exactly_what_the_schema_allows(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """Each keyword, kept or rewritten, takes what it allows and nothing else."""
    for value in good:
        assert schema_takes(schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not schema_takes(schema, json.dumps(value, ensure_ascii=False)), value


REFUSED: list[tuple[str, str, Any]] = [
    ("uniqueItems", "#/properties/a", {"properties": {"a": {"type": "array", "uniqueItems": True}}}),
    ("contains", "#", {"type": "array", "contains": {"const": 1}}),
    ("minContains", "#", {"type": "array", "minContains": 1, "contains": {}}),
    ("unevaluatedItems", "#", {"type": "array", "unevaluatedItems": False}),
    ("unevaluatedProperties", "#", {"allOf": [{}], "unevaluatedProperties": False}),
    ("$dynamicRef", "#", {"$dynamicRef": "#a"}),
    ("$recursiveRef", "#", {"$recursiveRef": "#"}),
    ("x-guidance", "#", {"x-guidance": {"lenient": True}}),
    ("not", "#", {"not": {"pattern": "a"}}),
    ("not", "#/$defs/a", {"$ref": "#/$defs/a", "$defs": {"a": {"not": {"multipleOf": 3}}}}),
    ("if", "#", {"if": {"items": {"const": 1}}, "then": False}),
    ("oneOf", "#/items", {"items": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}),
    ("propertyNames", "#", {"propertyNames": {"format": "date"}}),
    ("minProperties", "#", {"type": "object", "minProperties": 2}),
    ("format", "#", {"format": "regex"}),
    ("pattern", "#/properties/a~1b", {"properties": {"a/b": {"pattern": "(?=a)b"}}}),
    ("pattern", "#", {"pattern": "a\\u0001"}),
    ("patternProperties", "#", {"patternProperties": {"a": {}, "b": {"type": "null"}}}),
    ("$ref", "#/items", {"items": {"$ref": "#/nowhere"}}),
    ("$ref", "#", {"$ref": "http://example.com/schema"}),
    ("type", "#", {"type": "strin"}),
    ("required", "#/properties/a", {"properties": {"a": {"required": True}}}),
    ("minLength", "#", {"minLength": -1}),
    ("minimum", "#", {"minimum": "3"}),
    ("multipleOf", "#", {"multipleOf": 0}),
    ("enum", "#", {"enum": [2**53 + 2]}),
    ("const", "#", {"const": "nul\0"}),
    ("properties", "#", {"properties": []}),
    ("anyOf", "#", {"anyOf": []}),
    ("maxlength", "#", {"type": "string", "maxlength": 3}),
]


@pytest.mark.parametrize(
    ("keyword", "pointer", "schema"), REFUSED, ids=[f"{case[0]}-{i}" for i, case in enumerate(REFUSED)]
)
def test_what_cannot_be_enforced_is_refused_by_name(keyword: str, pointer: str, schema: Any) -> None:
    """The message names the field, the keyword and where in the schema it is."""
    with pytest.raises(InvalidRequest) as caught:
        prepare(schema, "response_format.json_schema.schema")
    assert caught.value.param == "response_format.json_schema.schema"
    assert f"{keyword!r} at {pointer}:" in caught.value.message


def test_a_refused_keyword_out_of_reach_does_no_harm() -> None:
    """Definitions that nothing refers to are not read."""
    assert schema_takes({"type": "null", "$defs": {"a": {"uniqueItems": True}}}, "null")


def test_keys_come_in_the_order_of_the_schema() -> None:
    """An answer has its keys in one order, also where a property is only required or comes from a reference."""
    schema = {
        "type": "object",
        "properties": {"b": {"type": "null"}, "a": {"$ref": "#/$defs/n"}},
        "required": ["c", "a"],
        "$defs": {"n": {"type": "null"}},
    }
    assert schema_takes(schema, '{"b":null,"a":null,"c":1}')
    assert not schema_takes(schema, '{"a":null,"b":null,"c":1}')


def test_no_comma_leads_nowhere() -> None:
    """Once all names that propertyNames lists are there, an object can only end."""
    schema = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a", "b"]}
    matcher = LLMatcher(byte_tokenizer(), to_grammar(Constraint("json_schema", schema)), log_level=0)
    whole = list(b'{"a":1,"b":2,')
    assert matcher.try_consume_tokens(whole) == len(whole) - 1


def test_a_key_cannot_come_again_under_another_spelling() -> None:
    """A further property spelled by escapes would override a named one for who reads the answer."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert schema_takes(schema, '{"a":1,"b":"x"}')
    assert not schema_takes(schema, '{"a":1,"\\u0061":"x"}')
    assert not schema_takes(schema, '{"a":1,"a":"x"}')


def test_size_and_depth_are_bounded() -> None:
    """A schema too large or too deep is refused as such, not by what it exhausts."""
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="nested deeper than"):
        prepare(deep, "p")
    with pytest.raises(InvalidRequest, match="more than 50000 parts"):
        prepare({"enum": list(range(60_000))}, "p")
    with pytest.raises(InvalidRequest, match="'pattern' at #"):
        prepare({"pattern": "a" * 5000}, "p")


def test_more_optional_properties_than_can_be_followed_are_refused_by_name() -> None:
    """Those between two required ones count; the place is said."""
    names = [f"p{number}" for number in range(MAX_OPTIONAL + 1)]
    inner = {"type": "object", "properties": dict.fromkeys(names, True)}
    with pytest.raises(InvalidRequest, match="'properties' at #/properties/a: more than 500 optional"):
        prepare({"properties": {"a": inner}}, "guided_json")
    prepare({"properties": {"a": {**inner, "required": [names[250]]}}}, "guided_json")
