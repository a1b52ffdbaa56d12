"""Schemas taken or refused, and their own data replayed through the masks of their grammars, token by token.

What fits a schema must be drawable, what does not must not be. Data that fits may be written in a way that no grammar
here takes (keys in another order, 1.0 for an integer): what is replayed is its text with keys in an order that the
grammar takes. That order is searched, first the order of the schema's own properties, then others, within a budget; the
library follows the text byte by byte and takes back what leads nowhere.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...core.errors import InvalidRequest
from ...text.grammar.build import to_grammar
from ...text.grammar.constraint import Constraint
from ...text.grammar.matcher import GrammarFailed, Vocabulary
from ...text.tokenizer import Tokenizer
from .answers import Case


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


MOST_TRIED = 20_000
MOST_TRIED_INVALID = 1000
"""Keys and values tried to find an order that is taken; where there is none, all would be tried in vain."""

_KEYWORD = re.compile(r"'([^']+)' at #")


def take(cases: Sequence[Case]) -> tuple[dict[str, Any], list[tuple[Case, str]]]:
    """(figures, the cases that are taken with their grammars)."""
    taken = []
    refused: Counter[str] = Counter()
    unnamed = []
    for case in cases:
        try:
            taken.append((case, to_grammar(Constraint("json_schema", case.schema, "schema"))))
        except InvalidRequest as error:
            found = _KEYWORD.search(error.message)
            refused[found[1] if found else "no keyword"] += 1
            if not found:
                unnamed.append({"name": case.name, "message": error.message})
    figures = {
        "num_schemas": len(cases),
        "num_taken": len(taken),
        "refused_by_keyword": dict(refused.most_common()),
        "refused_without_keyword": unnamed,
    }
    return figures, taken


class Replay:
    """Of many cases, with one model's tokens."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, eos_token_ids)
        self._mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)

    def run(self, taken: Sequence[tuple[Case, str]]) -> dict[str, Any]:
        """Figures, with the errors by name."""
        counts: Counter[str] = Counter()
        errors = []
        for case, grammar in taken:
            speller = Speller(grammar, case.schema)
            for number, (data, valid) in enumerate(case.tests):
                what = self._judge(grammar, speller, data, valid)
                counts[what] += 1
                if what in ("invalid taken", "valid refused"):
                    errors.append({"name": case.name, "test": number, "what": what})
        return {"num_tests": sum(counts.values()), "counts": dict(counts.most_common()), "errors": errors}

    def _judge(self, grammar: str, speller: Speller, data: Any, valid: bool) -> str:
        try:
            text = speller.spell(data, MOST_TRIED if valid else MOST_TRIED_INVALID)
        except OutOfBudget:
            # Every order that was tried fails; the one that was given is tried on tokens too.
            text, plain = None, json.dumps(data, ensure_ascii=False)
            if not valid and not self._draws(grammar, plain):
                return "invalid refused, not every order of keys tried"
        if text is None:
            return "valid refused" if valid else "invalid refused"
        if not self._draws(grammar, text):
            return "valid refused" if valid else "invalid refused"
        if not valid:
            return "invalid taken"
        return "valid taken" if speller.takes(json.dumps(data, ensure_ascii=False)) else "valid taken in another order"

    def _draws(self, grammar: str, text: str) -> bool:
        """Whether each token of `text` is in its mask, and the answer may end there."""
        try:
            matcher = self._vocabulary.matcher(grammar)
            for token in self._tokenizer.encode(text, add_special=False, parse_special=False):
                matcher.fill(self._mask.ctypes.data, self._mask.nbytes)
                if not self._mask[token >> 5] >> (token & 31) & 1:
                    return False
                matcher.follow([token])
            return matcher.is_whole
        except GrammarFailed:
            return False
