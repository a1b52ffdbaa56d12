"""API keys, as nobody who reads logs, traces and records may find them: one mask, which all writers of these share.

A key is known by its form where it was given out by `tokenmill keys`, else by its value. Callers put keys in the wrong
places: in paths, in names that they give their calls, in fields of other APIs; also with characters as %XX.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_FORMS = (r"tm-[A-Za-z0-9_-]{20,}", r"(?i:(?<=bearer ))[^\s\"']+", r"(?<=[?&]key=)[^\s&\"]+")
"""API keys of tokenmill, bearer tokens, keys in addresses."""
_WORD = re.compile(r"[^\s\"']+")
MIN_KEY_CHARS = 8
"""A server starts with no shorter key. What is masked beside keys and has fewer is hidden where it stands as a word, or
texts without it would become unreadable."""


class Mask:
    """`values`: keys that are hidden besides those that are known by their form. Cut a text after it is masked: the
    rest of a key that was cut has no form."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        spelled = {each for value in values for each in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}
        longest_first = sorted(spelled, key=lambda each: (-len(each), each))
        self._pattern = re.compile("|".join([*map(_value, longest_first), *_FORMS]))

    def __call__(self, text: str) -> str:
        shown = self._pattern.sub(HIDDEN, text)
        return _WORD.sub(self._decoded, shown) if "%" in shown else shown

    def deep(self, value: Any) -> Any:
        """The same with all texts masked in mappings and sequences, at any depth; names of fields stay."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {name: self.deep(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.deep(each) for each in value]
        return value

    def _decoded(self, word: re.Match[str]) -> str:
        return HIDDEN if "%" in word[0] and self._pattern.search(unquote(word[0])) else word[0]


def _value(key: str) -> str:
    return re.escape(key) if len(key) >= MIN_KEY_CHARS else rf"(?<!\w){re.escape(key)}(?!\w)"
