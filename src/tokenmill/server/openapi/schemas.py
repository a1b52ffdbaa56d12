"""JSON schemas of request fields, from the kinds in which the tables of fields tell of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_PLAIN = {
    "string": "string",
    "true": "boolean",
    "true or false": "boolean",
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "object": "object",
    "array": "array",
}
_ITEMS: dict[str, Schema] = {
    "strings": {"type": "string"},
    "integers": {"type": "integer"},
    "objects": {"type": "object"},
    "pairs": {"type": "array", "minItems": 2, "maxItems": 2},
    "such": {"type": "array", "items": {"type": "integer"}},
}
_RANGE = re.compile(r"(?:(integer|number), )?(above )?(\S+(?: - 1)?),? to (\S+(?: - 1)?)")


def schema_of(kind: str) -> Schema:
    """'integer, 0 to 20' -> {"type": "integer", "minimum": 0, "maximum": 20}. Raises ValueError for other words."""
    if found := _RANGE.fullmatch(kind):
        name, is_open, low, high = found.groups()
        least = "exclusiveMinimum" if is_open else "minimum"
        return {"type": name or "integer", least: _number(low), "maximum": _number(high)}
    if kind == "string, not empty":
        return {"type": "string", "minLength": 1}
    kind = kind.replace("true, false or", "boolean or").replace("true or false or", "boolean or")
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    parts = re.split(r",? or ", kind)
    if len(parts) > 1:
        return {"anyOf": _merged([schema_of(part.replace("of such", "array of such")) for part in parts])}
    if kind.startswith("array of ") and kind.removeprefix("array of ") in _ITEMS:
        return {"type": "array", "items": _ITEMS[kind.removeprefix("array of ")]}
    raise ValueError(f"no schema is known for {kind!r}")


def object_of(fields: Mapping[str, tuple[str, str]], required: list[str]) -> Schema:
    """`fields`: name -> (kind, meaning); "a.b" is the property b of a."""
    root: Schema = {"type": "object", "properties": {}}
    if required:
        root["required"] = sorted(required)
    for name in sorted(fields, key=lambda each: (each.count("."), each)):
        kind, meaning = fields[name]
        *outer, last = name.split(".")
        place = root
        for part in outer:
            place = place.setdefault("properties", {}).setdefault(part, {"type": ["object", "null"]})
        schema = schema_of(kind)
        if name not in required:
            schema = _nullable(schema)
        place.setdefault("properties", {})[last] = schema | {"description": plain(meaning)}
    return root


def example_schema(*values: Any) -> Schema:
    """Of what looks like one of `values`."""
    if all(isinstance(value, dict) for value in values):
        names = [name for name in values[0] if all(name in value for value in values)]
        return {
            "type": "object",
            "properties": {name: example_schema(*(value[name] for value in values)) for name in names},
            "required": sorted(names),
        }
    known = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}
    kinds = sorted({known[type(value)] for value in values})
    return {"type": kinds if len(kinds) > 1 else kinds[0]}


def plain(text: str) -> str:
    """Without links, which lead to pages that are not beside the document."""
    return re.sub(r" ?\(?\[[^\]]*\]\([^)]*\)\)?", "", text).replace(":.", ".")


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema | {"type": [schema["type"], "null"]}


def _merged(schemas: list[Schema]) -> list[Schema]:
    return [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]


def _number(text: str) -> int | float:
    """'2^31 - 1' -> 2147483647."""
    if found := re.fullmatch(r"(-?)2\^(\d+)( - 1)?", text):
        return (-1 if found[1] else 1) * (2 ** int(found[2]) - bool(found[3]))
    number = float(text.replace(",", ""))
    return int(number) if number.is_integer() else number


def bound(number: float) -> str:
    """The other way round: 2147483647 -> '2^31 - 1'."""
    whole = int(number)
    if abs(number) < 2**31 - 1 or whole != number:
        return f"{number:,g}" if abs(number) < 1e5 else f"{whole:,}"
    power = (abs(whole) + 1).bit_length() - 1
    for rest, tail in ((0, ""), (-1, " - 1")):
        if abs(whole) == 2**power + rest:
            return f"{'-' if whole < 0 else ''}2^{power}{tail}"
    return f"{whole:,}"
