"""JSON data written as a grammar wants it: with its keys in an order that the grammar takes, where there is one.

A grammar fixes the order of keys, and data does not. The order is searched: first that of the schema's own properties,
then others, as far as a budget goes. The library follows the text byte by byte and takes back what leads nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


class OutOfBudget(Exception):
    """More orders than were tried are left."""


class Speller:
    """Of one grammar, and of the schema it was made of (which only says what to try first)."""

    def __init__(self, grammar: str, schema: Any) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        self._orders = [{key: rank for rank, key in enumerate(names)} for names in _property_names(schema)]
        self._left = 0

    def takes(self, text: str) -> bool:
        """Whether `text` is a whole answer."""
        self._matcher.reset()
        size = len(text.encode("utf8", "surrogatepass"))
        return self._feed(text) == size and bool(self._matcher.is_accepting())

    def spell(self, value: Any, budget: int) -> str | None:
        """Some text of `value` that is a whole answer; None: there is none. Raises OutOfBudget where that takes trying
        more keys and values than `budget`."""
        self._matcher.reset()
        self._left = budget
        text = self._value(value)
        return text if text is not None and self._matcher.is_accepting() else None

    def _feed(self, text: str) -> int:
        """Bytes taken: all of them or none."""
        tokens = list(text.encode("utf8", "surrogatepass"))
        taken = int(self._matcher.try_consume_tokens(tokens))
        if taken == len(tokens):
            return taken
        self._unfeed(taken)
        return 0

    def _unfeed(self, num_bytes: int) -> None:
        if num_bytes:
            self._matcher.rollback(num_bytes)

    def _take_back(self, text: str) -> None:
        self._unfeed(len(text.encode("utf8", "surrogatepass")))

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OutOfBudget

    def _value(self, value: Any) -> str | None:
        self._spend()
        if isinstance(value, dict):
            return self._members(value)
        if isinstance(value, list):
            return self._items("[", value, first=True)
        text = json.dumps(value, ensure_ascii=False)
        return text if self._feed(text) else None

    def _members(self, value: dict[str, Any]) -> str | None:
        if not self._feed("{"):
            return None
        keys = sorted(value, key=self._rank(value))
        rest = self._some_order(value, keys, "") if keys else ("}" if self._feed("}") else None)
        if rest is None:
            self._take_back("{")
            return None
        return "{" + rest

    def _some_order(self, value: dict[str, Any], keys: Sequence[str], comma: str) -> str | None:
        for key in keys:
            self._spend()
            head = f"{comma}{json.dumps(key, ensure_ascii=False)}:"
            if not self._feed(head):
                continue
            text = self._value(value[key])
            if text is not None:
                others = [other for other in keys if other != key]
                rest = self._some_order(value, others, ",") if others else ("}" if self._feed("}") else None)
                if rest is not None:
                    return head + text + rest
                self._take_back(text)
            self._take_back(head)
        return None

    def _items(self, opening: str, items: Sequence[Any], *, first: bool) -> str | None:
        if not items:
            closing = opening + "]" if first else "]"
            return closing if self._feed(closing) else None
        before = opening if first else ","
        if not self._feed(before):
            return None
        text = self._value(items[0])
        if text is not None:
            rest = self._items(opening, items[1:], first=False)
            if rest is not None:
                return before + text + rest
            self._take_back(text)
        self._take_back(before)
        return None

    def _rank(self, value: dict[str, Any]) -> Any:
        """The order of the properties that have most of these keys."""
        known = max(self._orders, key=lambda order: sum(key in order for key in value), default={})
        return lambda key: known.get(key, len(known))


def _property_names(schema: Any) -> Iterator[list[str]]:
    """Keys of every `properties` in a schema."""
    if isinstance(schema, dict):
        names = schema.get("properties")
        if isinstance(names, dict):
            yield list(names)
        for value in schema.values():
            yield from _property_names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _property_names(value)
