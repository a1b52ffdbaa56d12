"""Schemas taken or refused, and their own data replayed through the masks of their grammars, token by token.

What fits a schema must be drawable, what does not must not be. Data that fits may be written in a way that no grammar
here takes (keys in another order, 1.0 for an integer): what is replayed is its text in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import InvalidRequest
from ...text.grammar.build import to_grammar
from ...text.grammar.constraint import Constraint
from ...text.grammar.matcher import GrammarFailed, Vocabulary
from ...text.tokenizer import Tokenizer
from .cases import Case
from .spelling import OutOfBudget, Speller

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
