"""What llguidance refuses of a schema, and which keyword it stumbled over, which it seldom says.

The keyword is found by trying: the innermost part that the library refuses for the same reason, and there the keyword
without which it does not. Trying costs a compilation each, so there is a limit; beyond it a part further out is named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def refusal(schema: dict[str, Any]) -> str:
    """Why the library refuses `schema`, or what of it it would not enforce; "" where it takes all of it. Costs a
    compilation: a fraction of a millisecond as a rule."""
    from llguidance import LLMatcher

    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if messages else ""


def is_about_one_of(message: str) -> bool:
    return message.startswith("oneOf constraints")


def plain(message: str) -> str:
    """The library's message as one line of ours."""
    line = " ".join(message.split("\n  while")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."


MAX_TRIES = 80


def find_fault(document: dict[str, Any], message: str) -> tuple[list[dict[str, Any]], str]:
    """(the parts from the root to the one at fault, the keyword at fault). `message`: what the library says of
    `document`, which has its definitions in `$defs`."""
    search = _Search(document, message)
    path = search.descend()
    return path, search.keyword(path[-1])


class _Search:
    def __init__(self, document: dict[str, Any], message: str) -> None:
        self._root = document
        self._defs = document.get("$defs", {})
        self._kind = _kind(message)
        self._left = MAX_TRIES

    def descend(self) -> list[dict[str, Any]]:
        path = [self._root]
        seen = {id(self._root)}
        while True:
            inner = next((part for part in self._parts(path[-1]) if id(part) not in seen and self._fails(part)), None)
            if inner is None:
                return path
            seen.add(id(inner))
            path.append(inner)

    def keyword(self, node: dict[str, Any]) -> str:
        keywords = [key for key in node if key != "$defs"]
        for key in keywords:
            if not self._fails({other: value for other, value in node.items() if other not in (key, "$defs")}):
                return key
        return keywords[0] if keywords else "schema"

    def _fails(self, part: dict[str, Any]) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        return _kind(refusal({**part, "$defs": self._defs})) == self._kind

    def _parts(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for key, value in node.items():
            if key == "$ref":
                yield from _schemas([self._defs.get(value.rpartition("/")[2])])
            elif key in ("properties", "patternProperties"):
                yield from _schemas(value.values())
            elif key in ("anyOf", "allOf", "oneOf", "prefixItems"):
                yield from _schemas(value)
            elif key in ("items", "additionalProperties"):
                yield from _schemas([value])


def _schemas(values: Any) -> Iterator[dict[str, Any]]:
    return (value for value in values if isinstance(value, dict))


def _kind(message: str) -> str:
    """What sort of complaint: its first words, without what it quotes."""
    return message[:16]
