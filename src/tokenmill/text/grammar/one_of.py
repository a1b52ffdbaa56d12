"""`oneOf` as `anyOf`, where that says the same.

The library takes `oneOf` whose options it can tell apart by types, constants and required properties. Where it cannot,
each option is joined with the opposite of those it may overlap with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import library
from .negate import Negation

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
        if library.is_about_one_of(library.refusal({**around, "oneOf": options, "$defs": defs})):
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
    return library.is_about_one_of(library.refusal({"oneOf": [one, other], "$defs": defs}))


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
