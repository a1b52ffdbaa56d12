"""Schemas in which an object has the properties that it lists, and no others, unless it says otherwise.

So llama.cpp reads them, and with it llama-server and Ollama: what their callers write relies on it. Whatever such a
schema takes, the schema as written takes too. Pure.
"""

from __future__ import annotations

from typing import Any

_OPEN = frozenset(
    {
        "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties",
        "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas",
    }
)  # fmt: skip
"""An object that says one of these may have others, or is put together with other schemas."""

_DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are no schemas."""

_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties` false where an object lists its properties. Schemas that are joined by
    allOf describe one object in parts: then nothing is closed."""
    return schema if _joins(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _close(each) for name, each in value.items()}
        else:
            found[key] = value if key in _DATA else _close(value)
    if isinstance(schema.get("properties"), dict) and _OPEN.isdisjoint(schema):
        found["additionalProperties"] = False
    return found


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    return "allOf" in schema or any(_joins(value) for key, value in schema.items() if key not in _DATA)
