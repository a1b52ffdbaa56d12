"""One schema object rewritten, keyword by keyword (see `schema`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

from ...core.errors import InvalidRequest
from .keywords import COUNTS, KNOWN, NUMBERS, REFUSED, TYPES, meant
from .negate import Negation
from .patterns import BUILT_IN, FREE, NUMERIC, PATTERNS, CannotMend, check_text, mend

MAX_PATTERN_CHARS = 4096
MAX_ENUM = 10_000
MAX_OPTIONAL = 500
"""Optional properties in a row, each of which may come next. Twice as many take four times as long."""

MAX_EXACT = 2**53
"""Integers beyond it are not told apart by who reads JSON numbers as floats, the library among them."""

MAX_BOUND = 2**63 - 1024
"""The largest integer that the library computes with, among those that a float can be."""

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")

Schema = dict[str, Any] | bool


class Surroundings(Protocol):
    """What the rewriting of one object needs of the walk over all."""

    negation: Negation

    def visit(self, node: Any, pointer: str) -> Schema: ...
    def reference(self, node: dict[str, Any], pointer: str) -> Schema: ...
    def error(self, pointer: str, keyword: str, reason: str) -> InvalidRequest: ...


def rewrite(node: dict[str, Any], pointer: str, walk: Surroundings) -> Schema:
    """`node`, which stands at `pointer`. Raises InvalidRequest that names keyword and pointer, or CannotNegate."""
    return _Rewriting(node, pointer, walk).run()


class _Rewriting:
    """`out` is what comes of the object so far; `more` holds schemas that must hold beside it."""

    def __init__(self, node: dict[str, Any], pointer: str, walk: Surroundings) -> None:
        self._node = node
        self._pointer = pointer
        self._walk = walk
        self._out: dict[str, Any] = {}
        self._more: list[Schema] = []

    def run(self) -> Schema:
        for keyword, value in self._node.items():
            if keyword in REFUSED:
                self._refuse_or_drop(keyword, value)
            elif keyword in COUNTS:
                self._out[keyword] = self._count(keyword, value)
            elif keyword in NUMBERS:
                self._number(keyword, value)
            elif keyword in _METHODS:
                _METHODS[keyword](self, value)
            elif keyword not in KNOWN and (known := meant(keyword)) is not None:
                raise self._error(keyword, f"there is no such keyword; {known!r} is one")
        self._check_min_properties()
        self._check_optional()
        self._more = [schema for schema in self._more if schema is not True]
        if False in self._more:
            return False
        if self._more:
            self._out["allOf"] = [*self._out.get("allOf", []), *self._more]
        return self._out

    def _error(self, keyword: str, reason: str) -> InvalidRequest:
        return self._walk.error(self._pointer, keyword, reason)

    def _within(self, *steps: str | int) -> str:
        return "/".join([self._pointer, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)])

    def _visit(self, value: Any, *steps: str | int) -> Schema:
        return self._walk.visit(value, self._within(*steps))

    def _opposite(self, schema: Schema, keyword: str) -> Schema:
        return self._walk.negation.of(schema, (self._pointer, keyword))

    # What is checked and kept.

    def _count(self, keyword: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
            raise self._error(keyword, "it must be an integer that is not negative")
        return int(value)

    def _number(self, keyword: str, value: Any) -> None:
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"  # as draft 4 has it
            if value and bound in self._node:
                self._out.pop(bound, None)
                self._bound(keyword, self._node[bound])
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(keyword, "it must be a number")
        if keyword == "multipleOf" and value <= 0:
            raise self._error(keyword, "it must be above 0")
        exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
        if exclusive is None or self._node.get(exclusive) is not True:
            self._bound(keyword, value)

    def _bound(self, keyword: str, value: Any) -> None:
        """A bound so large that the library would round it is drawn in: a little less is taken, never more."""
        if keyword == "multipleOf" or not isinstance(value, (int, float)) or abs(value) <= MAX_EXACT:
            self._out[keyword] = value
            return
        is_least = keyword in ("minimum", "exclusiveMinimum")
        number = float(value)
        is_out = number < value if is_least else number > value
        if is_out or keyword.startswith("exclusive"):
            number = math.nextafter(number, math.inf if is_least else -math.inf)
        if is_least:
            self._more.append({"minimum": int(max(number, -MAX_BOUND))})
        else:
            self._more.append({"maximum": int(min(number, MAX_BOUND))})

    def _type(self, value: Any) -> None:
        named = value if isinstance(value, list) else [value]
        if not named or not all(isinstance(name, str) and name in TYPES for name in named):
            raise self._error("type", f"it must be one or more of {', '.join(TYPES)}")
        self._out["type"] = value

    def _enum(self, value: Any) -> None:
        if not isinstance(value, list):
            raise self._error("enum", "it must be an array")
        if len(value) > MAX_ENUM:
            raise self._error("enum", f"it may hold at most {MAX_ENUM} values")
        self._check_exact("enum", value)
        self._out["enum"] = value

    def _const(self, value: Any) -> None:
        self._check_exact("const", value)
        self._out["const"] = value

    def _check_exact(self, keyword: str, value: Any) -> None:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for part in inner:
            self._check_exact(keyword, part)
        if isinstance(value, (int, float)) and abs(value) > MAX_EXACT:
            raise self._error(keyword, f"numbers beyond {MAX_EXACT} cannot be told apart exactly")
        if isinstance(value, str):
            self._check_text(keyword, value)

    def _check_text(self, keyword: str, text: str) -> None:
        try:
            check_text(text)
        except CannotMend as error:
            raise self._error(keyword, f"{error.args[0]} cannot be enforced in JSON text") from None

    def _required(self, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error("required", "it must be an array of strings")
        for name in value:
            self._check_text("required", name)
        self._out["required"] = list(dict.fromkeys(value))

    def _pattern(self, value: Any) -> None:
        if not isinstance(value, str):
            raise self._error("pattern", "it must be a string")
        if len(value) > MAX_PATTERN_CHARS:
            raise self._error("pattern", f"it may have at most {MAX_PATTERN_CHARS} characters")
        self._out["pattern"] = self._mend("pattern", value)

    def _format(self, value: Any) -> None:
        if not isinstance(value, str):
            raise self._error("format", "it must be a string")
        if value in PATTERNS:
            self._more.append({"pattern": f"^(?:{PATTERNS[value]})$"})
        elif value in BUILT_IN:
            self._out["format"] = value
        elif value not in FREE | NUMERIC and self._may_be("string"):
            known = ", ".join(sorted(PATTERNS.keys() | BUILT_IN))
            raise self._error("format", f"{value!r} cannot be enforced; {known} can")

    def _may_be(self, kind: str) -> bool:
        named = self._node.get("type")
        return named is None or named == kind or (isinstance(named, list) and kind in named)

    # What holds other schemas.

    def _schemas(self, keyword: str, value: Any) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise self._error(keyword, "it must be an array of at least one schema")
        return [self._visit(part, keyword, number) for number, part in enumerate(value)]

    def _map(self, keyword: str, value: Any) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise self._error(keyword, "it must be an object of schemas")
        return {name: self._visit(part, keyword, name) for name, part in value.items()}

    def _properties(self, value: Any) -> None:
        self._out["properties"] = self._map("properties", value)
        for name in self._out["properties"]:
            self._check_text("properties", name)

    def _pattern_properties(self, value: Any) -> None:
        found = self._map("patternProperties", value)
        for pattern in found:
            if len(pattern) > MAX_PATTERN_CHARS:
                raise self._error("patternProperties", f"a pattern may have at most {MAX_PATTERN_CHARS} characters")
        self._out["patternProperties"] = {
            self._mend("patternProperties", pattern): part for pattern, part in found.items()
        }

    def _mend(self, keyword: str, pattern: str) -> str:
        try:
            return mend(pattern)
        except CannotMend as error:
            raise self._error(keyword, f"{error.args[0]} cannot be enforced in JSON text") from None

    def _additional_properties(self, value: Any) -> None:
        self._out["additionalProperties"] = self._visit(value, "additionalProperties")

    def _items(self, value: Any) -> None:
        if not isinstance(value, list):
            self._out["items"] = self._visit(value, "items")
        elif value:
            self._out["prefixItems"] = self._schemas("items", value)
            if "additionalItems" in self._node:
                self._out["items"] = self._visit(self._node["additionalItems"], "additionalItems")

    def _prefix_items(self, value: Any) -> None:
        self._out["prefixItems"] = self._schemas("prefixItems", value)

    def _any_of(self, value: Any) -> None:
        self._out["anyOf"] = self._schemas("anyOf", value)

    def _all_of(self, value: Any) -> None:
        self._out["allOf"] = self._schemas("allOf", value)

    def _one_of(self, value: Any) -> None:
        self._out["oneOf"] = self._schemas("oneOf", value)

    def _ref(self, _: Any) -> None:
        stand_in = self._walk.reference(self._node, self._pointer)
        if isinstance(stand_in, bool):
            self._more.append(stand_in)
        else:
            self._out |= stand_in

    # What is said by other keywords.

    def _not(self, value: Any) -> None:
        if isinstance(value, dict) and [word for word in value if word in KNOWN] == ["not"]:
            self._more.append(self._visit(value["not"], "not", "not"))
        else:
            self._more.append(self._opposite(self._visit(value, "not"), "not"))

    def _if(self, value: Any) -> None:
        branches = {word: self._visit(self._node[word], word) for word in ("then", "else") if word in self._node}
        if not branches:
            return
        condition = self._visit(value, "if")
        opposite = self._opposite(condition, "if")
        if "else" not in branches:
            self._either([opposite, branches["then"]])
        elif "then" not in branches:
            self._either([condition, branches["else"]])
        else:
            self._either([_both(condition, branches["then"]), _both(opposite, branches["else"])])

    def _dependencies(self, keyword: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise self._error(keyword, "it must be an object")
        for name, needed in value.items():
            if isinstance(needed, list):
                if not all(isinstance(other, str) for other in needed):
                    raise self._error(keyword, "it must name properties by strings")
                then: Schema = {"required": list(dict.fromkeys([name, *needed]))}
            else:
                then = _both({"required": [name]}, self._visit(needed, keyword, name))
            self._either([{"properties": {name: False}}, then])

    def _either(self, options: Sequence[Schema]) -> None:
        kept = [option for option in options if option is not False]
        if True not in kept:
            self._more.append({"anyOf": kept} if len(kept) > 1 else kept[0] if kept else False)

    def _property_names(self, value: Any) -> None:
        """Names by a pattern: further properties must match it, and named ones that do not are not allowed."""
        names = self._visit(value, "propertyNames")
        if names is True or (isinstance(names, dict) and set(names) <= {"type"} and has_strings(names)):
            return
        if "patternProperties" in self._node:
            raise self._error("propertyNames", "it cannot be enforced beside patternProperties")
        given = self._node.get("properties")
        own = list(given) if isinstance(given, dict) else []
        listed = listed_names(names)
        if listed is not None and len(listed) <= MAX_LISTED:
            named = {name: name in listed for name in dict.fromkeys([*own, *listed])}
            self._more.append({"properties": named, "additionalProperties": False})
            return
        pattern = name_pattern(names) if listed is None else one_of(listed)
        if pattern is None:
            raise self._error(
                "propertyNames", "only pattern, enum, const, minLength and maxLength of names are enforced"
            )
        try:
            named = {name: re.search(pattern, name) is not None for name in own}
        except re.error:
            raise self._error("propertyNames", "its pattern cannot be read") from None
        self._more.append({"properties": named, "patternProperties": {pattern: True}, "additionalProperties": False})

    def _unique_items(self, value: Any) -> None:
        if value is True and self._may_be("array") and self._node.get("maxItems") not in (0, 1):
            raise self._error("uniqueItems", "that items differ cannot be enforced; leave it out, or give maxItems 1")

    def _unevaluated_properties(self, value: Any) -> None:
        if value is True or "additionalProperties" in self._node:
            return
        if any(word in self._node for word in _APPLICATORS):
            reason = "it cannot be enforced beside what combines schemas; give additionalProperties"
            raise self._error("unevaluatedProperties", reason)
        self._out["additionalProperties"] = self._visit(value, "unevaluatedProperties")

    def _refuse_or_drop(self, keyword: str, value: Any) -> None:
        is_idle = (
            (keyword == "contains" and self._node.get("minContains") == 0 and "maxContains" not in self._node)
            or (keyword in ("minContains", "maxContains") and "contains" not in self._node)
            or (keyword == "minContains" and value == 0 and "maxContains" not in self._node)
            or (keyword == "unevaluatedItems" and value is True)
            or (keyword in ("contains", "minContains", "maxContains", "unevaluatedItems") and not self._may_be("array"))
        )
        if not is_idle:
            raise self._error(keyword, REFUSED[keyword])

    def _check_optional(self) -> None:
        required, num_optional = frozenset(self._out.get("required", ())), 0
        for name in self._out.get("properties", ()):
            num_optional = 0 if name in required else num_optional + 1
            if num_optional > MAX_OPTIONAL:
                reason = f"more than {MAX_OPTIONAL} optional properties in a row are too slow to follow"
                raise self._error("properties", f"{reason}; name some of them in required")

    def _check_min_properties(self) -> None:
        """Names of further properties may come twice in an answer, and then count once for who reads it."""
        least = self._out.get("minProperties", 0)
        if least >= 2 and least > len(self._out.get("required", ())) + 1 and self._may_be("object"):
            reason = "more than one property beyond those that are required cannot be enforced; name them in required"
            raise self._error("minProperties", reason)


def _both(one: Schema, other: Schema) -> Schema:
    if one is False or other is False:
        return False
    kept = [schema for schema in (one, other) if schema is not True]
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else True


_METHODS = {
    "type": _Rewriting._type,
    "enum": _Rewriting._enum,
    "const": _Rewriting._const,
    "required": _Rewriting._required,
    "pattern": _Rewriting._pattern,
    "format": _Rewriting._format,
    "properties": _Rewriting._properties,
    "patternProperties": _Rewriting._pattern_properties,
    "additionalProperties": _Rewriting._additional_properties,
    "items": _Rewriting._items,
    "prefixItems": _Rewriting._prefix_items,
    "anyOf": _Rewriting._any_of,
    "allOf": _Rewriting._all_of,
    "oneOf": _Rewriting._one_of,
    "$ref": _Rewriting._ref,
    "not": _Rewriting._not,
    "if": _Rewriting._if,
    "dependentRequired": lambda self, value: self._dependencies("dependentRequired", value),
    "dependentSchemas": lambda self, value: self._dependencies("dependentSchemas", value),
    "dependencies": lambda self, value: self._dependencies("dependencies", value),
    "propertyNames": _Rewriting._property_names,
    "uniqueItems": _Rewriting._unique_items,
    "unevaluatedProperties": _Rewriting._unevaluated_properties,
}


MAX_LISTED = 100
"""Names that become properties of their own. More of them are found by a pattern, and may come in any order."""


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
