"""Which names of properties a schema of names (`propertyNames`) allows."""

from __future__ import annotations

import re
from typing import Any

MAX_LISTED = 100
"""Names that become properties of their own. More of them are found by a pattern, and may come in any order."""

Schema = dict[str, Any] | bool


def has_strings(schema: dict[str, Any]) -> bool:
    named = schema.get("type", "string")
    return named == "string" or (isinstance(named, list) and "string" in named)


def listed_names(schema: Schema) -> list[str] | None:
    """The strings that `schema` allows, if it lists them."""
    if not isinstance(schema, dict) or not has_strings(schema) or not schema.keys() <= {"type", "enum", "const"}:
        return None
    if len(schema.keys() & {"enum", "const"}) != 1:
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return [name for name in values if isinstance(name, str)]


def name_pattern(schema: Schema) -> str | None:
    """A pattern of the strings that `schema` allows; None: none can be told."""
    if not isinstance(schema, dict) or not has_strings(schema):
        return None
    rest = {keyword: value for keyword, value in schema.items() if keyword != "type"}
    if len(rest) == 1:
        [(keyword, value)] = rest.items()
        if keyword == "pattern":
            return str(value)
        if keyword == "anyOf":
            found = [name_pattern(option) for option in value if isinstance(option, dict) and has_strings(option)]
            if all(pattern is not None for pattern in found) and len(found) == 1:
                return found[0]
    if rest and set(rest) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{rest.get('minLength', 0)},{rest.get('maxLength', '')}}}$"
    return None


def one_of(names: list[str]) -> str:
    """A pattern of these strings."""
    return f"^(?:{'|'.join(map(re.escape, names))})$"
