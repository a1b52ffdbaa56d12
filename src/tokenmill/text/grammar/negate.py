"""What a schema does not allow, as a schema; and with it `oneOf` as `anyOf`.

Works on rewritten schemas (see `schema`). Exact: where the opposite of a keyword cannot be said by the keywords that
the library has, `CannotNegate` is raised; nothing is approximated. The library takes `oneOf` whose options it can tell
apart by types, constants and required properties. Where it cannot, each option is joined with the opposite of those it
may overlap with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .patterns import TooLong, other_strings
from .refusals import is_about_one_of, refusal

Schema = dict[str, Any] | bool

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OPPOSITES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""Keyword -> (the type it is about, the keyword of the opposite, what its value differs by)."""


class CannotNegate(Exception):
    """`reason`: which keyword stands in the way; `asked`: for whom it was tried, as (pointer, keyword)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.asked = ("#", "not")


class Negation:
    """Negates schemas that share `defs`, adding the opposites of definitions to them."""

    def __init__(self, defs: dict[str, Schema]) -> None:
        self._defs = defs
        self._pending: list[tuple[str, tuple[str, str]]] = []
        self._begun: set[str] = set()

    def of(self, schema: Schema, asked: tuple[str, str]) -> Schema:
        """Raises CannotNegate. `asked`: pointer and keyword that want it, for messages."""
        try:
            return self._of(schema, asked)
        except CannotNegate as error:
            error.asked = asked
            raise

    def complete(self) -> None:
        """Add the opposites of definitions that were asked for before the definitions were there."""
        while self._pending:
            name, asked = self._pending.pop()
            self._defs[f"not-{name}"] = self.of(self._defs[name], asked)

    def _of(self, schema: Schema, asked: tuple[str, str]) -> Schema:
        if isinstance(schema, bool):
            return not schema
        options: list[Schema] = []
        for keyword, value in schema.items():
            options += self._opposite(keyword, value, schema, asked)
        if any(option is True for option in options):
            return True
        options = [option for option in options if option is not False]
        return False if not options else options[0] if len(options) == 1 else {"anyOf": options}

    def _opposite(self, keyword: str, value: Any, schema: dict[str, Any], asked: tuple[str, str]) -> list[Schema]:
        """Schemas of which one holds where `keyword` does not."""
        if keyword == "type":
            return [_other_types(value)]
        if keyword in ("enum", "const"):
            return _other_values(value if keyword == "enum" else [value])
        if keyword in _OPPOSITES:
            kind, other, difference = _OPPOSITES[keyword]
            if abs(value) > 2**53:  # it has been drawn in
                raise CannotNegate(f"the opposite of {keyword!r} beyond {2**53} cannot be enforced")
            return [{"type": kind, other: value + difference}] if value + difference >= 0 or kind == "number" else []
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "properties":
            return [
                {"type": "object", "properties": {name: opposite}, "required": [name]}
                for name, part in value.items()
                if (opposite := self._of(part, asked)) is not False
            ]
        if keyword == "prefixItems":
            return [
                {"type": "array", "prefixItems": [*[True] * place, opposite], "minItems": place + 1}
                for place, part in enumerate(value)
                if (opposite := self._of(part, asked)) is not False
            ]
        if keyword == "items" and value is False:
            return [{"type": "array", "minItems": len(schema.get("prefixItems", [])) + 1}]
        if keyword == "allOf":
            return [self._of(part, asked) for part in value]
        if keyword == "anyOf":
            parts = [opposite for part in value if (opposite := self._of(part, asked)) is not True]
            return [True] if not parts else [False] if False in parts else [{"allOf": parts}]
        if keyword == "$ref":
            return [self._of_definition(value.rpartition("/")[2], asked)]
        if keyword in ("additionalProperties", "items", "patternProperties") and _allows_all(value):
            return []
        raise CannotNegate(f"the opposite of {keyword!r} cannot be enforced")

    def _of_definition(self, name: str, asked: tuple[str, str]) -> Schema:
        if name.startswith("not-"):
            return {"$ref": f"#/$defs/{name[4:]}"}
        if name not in self._begun:
            self._begun.add(name)
            self._pending.append((name, asked))
        return {"$ref": f"#/$defs/not-{name}"}


def _allows_all(value: Any) -> bool:
    return value is True or (isinstance(value, dict) and all(part is True or part == {} for part in value.values()))


def _other_types(types: Any) -> Schema:
    named = {types} if isinstance(types, str) else set(types)
    if "integer" in named and "number" not in named:
        raise CannotNegate("numbers that are no integers cannot be enforced")
    rest = [name for name in _TYPES if name not in named]
    return {"type": rest} if rest else False


def _other_values(values: list[Any]) -> list[Schema]:
    """Schemas of all that is none of `values`."""
    if any(isinstance(value, (dict, list)) for value in values):
        raise CannotNegate("the opposite of a constant array or object cannot be enforced")
    options: list[Schema] = [{"type": ["array", "object"]}]
    if None not in values:
        options.append({"type": "null"})
    flags = [flag for flag in (False, True) if not any(value is flag for value in values)]
    if flags:
        options.append({"enum": flags})
    numbers = sorted({value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True):
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        options.append({"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}})
    try:
        pattern = other_strings([value for value in values if isinstance(value, str)])
    except TooLong:
        raise CannotNegate("so many constant strings are too much to rule out") from None
    options.append({"type": "string", "pattern": pattern} if pattern else {"type": "string"})
    return options


MAX_TOLD_APART = 16
"""Options of which each pair is tried."""


def settle_one_of(document: dict[str, Any], negation: Negation, pointer: Callable[[Any], str]) -> None:
    """Rewrites `document` in place. `pointer`: where a part of it comes from. Raises CannotNegate."""
    if not any(True for _ in _holders(document)):
        return
    eased = _ease(document)
    defs = eased["$defs"]
    for node in [*_holders(document)]:
        options = [_ease(option) for option in node["oneOf"]]
        around = {key: _ease(value) for key, value in node.items() if key not in ("oneOf", "$defs")}
        if is_about_one_of(refusal({**around, "oneOf": options, "$defs": defs})):
            _replace(node, options, defs, negation, (pointer(node), "oneOf"))
    negation.complete()


def _replace(
    node: dict[str, Any], eased: list[Any], defs: dict[str, Any], negation: Negation, asked: tuple[str, str]
) -> None:
    options = node["oneOf"]
    ways = []
    for number, option in enumerate(options):
        others = [
            negation.of(other, asked)
            for place, other in enumerate(options)
            if place != number and _may_overlap(eased[number], eased[place], defs, len(options))
        ]
        if False not in others:
            ways.append({"allOf": [option, *others]} if others else option)
    kept = dict(node)
    node.clear()
    for key, value in kept.items():
        if key == "oneOf" and "allOf" not in kept:
            node["allOf"] = [{"anyOf": ways}]
        elif key == "allOf":
            node["allOf"] = [*value, {"anyOf": ways}]
        elif key != "oneOf":
            node[key] = value


def _may_overlap(one: Any, other: Any, defs: dict[str, Any], num_options: int) -> bool:
    if num_options > MAX_TOLD_APART:
        return True
    return is_about_one_of(refusal({"oneOf": [one, other], "$defs": defs}))


def _holders(node: Any) -> Iterator[dict[str, Any]]:
    """Schemas that have a `oneOf`, the inner ones first."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in ("enum", "const"):
                yield from _holders(value)
        if isinstance(node.get("oneOf"), list):
            yield node
    elif isinstance(node, list):
        for value in node:
            yield from _holders(value)


def _ease(node: Any) -> Any:
    """A copy in which `oneOf` is `anyOf`, so that the library has nothing to say about it."""
    if isinstance(node, list):
        return [_ease(value) for value in node]
    if not isinstance(node, dict):
        return node
    copy = {key: value if key in ("enum", "const") else _ease(value) for key, value in node.items()}
    if not isinstance(node.get("oneOf"), list):
        return copy
    options = copy.pop("oneOf")
    return {**copy, "allOf": [*copy.get("allOf", []), {"anyOf": options}]}
